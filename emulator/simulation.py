"""One call from a job to its report: plan, run, measure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from emulator.plan import plan
from emulator.plan.program import Program
from emulator.report import Report, measure
from emulator.report.export import save_trace
from emulator.report.memory import memory_by_stage
from emulator.run import run
from emulator.run.trace import Trace
from emulator.spec.job import Job


class DoesNotFitError(RuntimeError):
    """The job needs more device memory than there is: which term, on which stage, by how much."""


class Result(NamedTuple):
    """What a simulated job leaves."""

    report: Report
    trace: Trace
    program: Program

    def __repr__(self) -> str:
        """Say in one line what happened; a report, a trace and a program written out fill pages."""
        return f"<Result: {self.trace!r}; .report, .trace and .program have the rest>"

    def __str__(self) -> str:
        """Return the report as text."""
        return str(self.report)

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a Chrome trace (.json, .json.gz, or a directory with a file per rank)."""
        save_trace(self.trace, Path(path))

    def save_timeline(self, path: str | Path) -> None:
        """Draw the timeline (.png, .svg or .pdf)."""
        from emulator.report.plot import timeline

        timeline(self.trace, Path(path))


def simulate(job: Job, ignore_memory: bool = False) -> Result:
    """Play the job's steps and measure them.

    Raises DoesNotFitError before anything is played if the job cannot fit in device memory, unless
    `ignore_memory`; DeadlockError if the run comes to rest with ops left.
    """
    began = time.perf_counter()
    program = plan(job)
    memory = memory_by_stage(program)
    if not memory.fits and not ignore_memory:
        raise DoesNotFitError(memory.verdict())
    trace = run(program)
    return Result(measure(trace, began), trace, program)
