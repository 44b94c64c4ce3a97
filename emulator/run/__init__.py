"""Program to Trace: the Program played on contended resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulator.plan.program import Program
from emulator.run.errors import DeadlockError
from emulator.run.trace import Trace

if TYPE_CHECKING:
    from emulator.run.executor import Progress, Recording


def run(program: Program, steps: int | None = None, progress: Progress | None = None) -> Trace:
    """Play a Program for `steps` steps (default: the job's) and return what happened.

    Raises DeadlockError, naming who waits for what, if the run comes to rest with ops left.
    """
    from emulator.run.executor import Executor

    return Executor(program, program.job.steps if steps is None else steps, progress=progress).run()


def run_audited(program: Program, steps: int | None = None) -> tuple[Trace, Recording]:
    """As `run`, and also return every level of every activity, for `emulator.report.audit`."""
    from emulator.run.executor import Executor

    executor = Executor(program, program.job.steps if steps is None else steps, audit=True)
    return executor.run(), executor.recording


__all__ = ["DeadlockError", "Trace", "run", "run_audited"]
