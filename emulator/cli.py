"""The command line: run, check, show, estimate and catalog.

Exit status: 0 done; 1 the job ran and cannot work (the report is still written and says why); 2 the input is
wrong, with one line on standard error; 130 on interrupt. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from emulator.plan import plan
from emulator.plan.program import Program
from emulator.plan.schedule import grid, schedule, to_csv
from emulator.plan.text import show as show_program
from emulator.report.export import replacing, save_trace
from emulator.report.memory import memory_by_stage
from emulator.report.metrics import Report, measure, unmeasured
from emulator.run import DeadlockError
from emulator.run import run as play
from emulator.run.trace import Trace
from emulator.spec.checks import choice, listed, shown
from emulator.spec.device import device as device_named
from emulator.spec.errors import JobError, NotAvailableYetError
from emulator.spec.load import load_job, load_model
from emulator.study import catalog as catalogue
from emulator.study.estimate import estimate as estimate_model
from emulator.version import __version__

_PICTURE_ENDS = (".png", ".svg", ".pdf")
_TRACE_ENDS = (".json", ".json.gz")
_WIDE = 160
"""Columns of a table that no terminal cuts."""

# typer exports this subclass only; its parent is what every wrong option or argument raises.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Discrete-event emulator of GPU training clusters.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A .toml file, a .py scenario, or the name of one in scenarios/.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override one field, such as layout.pp=8; repeatable."),
]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for standard output."),
]


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{shown(text)} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{shown(text)} is not a number") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        status = app(args=arguments, prog_name="emulator", standalone_mode=False)
    except JobError as error:
        return _refuse(str(error))
    except _UsageError as error:
        return _refuse(_usage(error))
    except OSError as error:
        # A full disk, or a file that only looked as if it could be written to or read.
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    if status == 130:
        print("interrupted", file=sys.stderr)
    return status or 0


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # A reader such as head has seen enough; the status speaks of the job alone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(text: str) -> int:
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return 2


def _usage(error: Exception) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    return f"{text.rstrip('.')}; see {context.command_path} --help" if context else text


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        _print(f"emulator {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        _print(context.get_help())


@app.command("run")
def _run(
    job: JobArgument,
    sets: SetOption = None,
    json_file: JsonOption = None,
    trace_file: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Chrome trace: .json, .json.gz or a directory."),
    ] = None,
    timeline_file: Annotated[
        str | None, typer.Option("--timeline", metavar="FILE", help="Timeline picture (.png, .svg or .pdf).")
    ] = None,
    no_fold: Annotated[bool, typer.Option("--no-fold", help="Every rank on its own.")] = False,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Run although it does not fit; the verdict is kept.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", parser=_whole_number, help="Training steps to play.")
    ] = None,
) -> int:
    """Play a training step and report what it costs."""
    _check_target("--json", json_file if json_file != "-" else None)
    _check_target("--trace", trace_file, directory=True)
    _check_target("--timeline", timeline_file, _PICTURE_ENDS)
    _check_different(
        {"JOB": job, "--json": json_file, "--trace": trace_file, "--timeline": timeline_file},
    )
    overrides = [*(sets or []), *([f"steps={steps}"] if steps is not None else [])]
    spec = load_job(job, overrides)
    began = time.perf_counter()
    program = plan(spec, folded=not no_fold)
    memory = memory_by_stage(program)
    if not memory.fits and not ignore_memory:
        _write_report(unmeasured(program, "not run", memory.verdict(), began), json_file)
        return 1
    try:
        trace = _played(program)
    except DeadlockError as error:
        _write_report(unmeasured(program, "deadlock", str(error), began), json_file)
        return 1
    report = measure(trace, began)
    if trace_file:
        save_trace(trace, trace_file)
    if timeline_file:
        # matplotlib is slow to import, and most runs draw nothing.
        from emulator.report.plot import timeline

        timeline(trace, timeline_file)
    _write_report(report, json_file)
    return 0 if ignore_memory or report.memory.fits else 1


@app.command("check")
def _check(job: JobArgument, sets: SetOption = None) -> int:
    """Print sizes, memory by stage and the verdict: as planned, and, if that fits, as played."""
    program = plan(load_job(job, sets or []))
    _print(catalogue.sizes(program.job))
    planned = memory_by_stage(program)
    if not planned.fits:
        _print(catalogue.memory_table(planned, "as planned, in the order of issue"))
        return 1
    try:
        memory = memory_by_stage(program, _played(program))
    except DeadlockError as error:
        _print(str(error))
        return 1
    _print(catalogue.memory_table(memory, "as played"))
    return 0 if memory.fits else 1


def _played(program: Program) -> Trace:
    """Play a program, with progress on a terminal; raises DeadlockError, or JobError where time runs out."""
    try:
        with _progress() as progress:
            return play(program, progress=progress)
    except OverflowError:
        raise JobError(
            "the run takes longer than 2**63 ps = 106 days, which the clock cannot hold; look for a rate "
            "that is too low or a time that is too long"
        ) from None


@app.command("show")
def _show(
    job: JobArgument,
    sets: SetOption = None,
    schedule_file: Annotated[
        str | None,
        typer.Option(
            "--schedule", metavar="FILE.csv", help="Write the schedule as torch's compute-only CSV."
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option("--rank", metavar="R", parser=_whole_number, help="Whose streams and class to print."),
    ] = 0,
) -> int:
    """Print the Program: the schedule grid, one rank's streams and class, groups and classes."""
    _check_target("--schedule", schedule_file, (".csv",))
    program = plan(load_job(job, sets or []))
    if not 0 <= rank < program.ranks:
        raise JobError(f"--rank {rank}: the job has ranks 0 to {program.ranks - 1}")
    if schedule_file:
        spec = program.job
        rows = grid(schedule(spec.pipeline.schedule, spec.layout.pp, spec.microbatches))
        _write(Path(schedule_file), to_csv(rows))
    _print(show_program(program, rank=rank))
    return 0


@app.command("estimate")
def _estimate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalogue name, or a path to a config.json.")
    ],
    tokens: Annotated[
        float | None, typer.Option("--tokens", metavar="N", parser=_number, help="Training tokens.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", parser=_whole_number, help="Devices.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="D", help="Catalogue name.")] = "h100-sxm",
    tflops: Annotated[
        float | None,
        typer.Option("--tflops", metavar="R", parser=_number, help="Sustained TFLOP/s of a device."),
    ] = None,
    mfu: Annotated[
        float | None, typer.Option("--mfu", metavar="F", parser=_number, help="Or the MFU, such as 0.4.")
    ] = None,
    json_file: JsonOption = None,
) -> int:
    """Do the arithmetic of a training run before any run."""
    _check_target("--json", json_file if json_file != "-" else None)
    result = estimate_model(
        load_model(model), tokens=tokens, gpus=gpus, device=device_named(device), tflops=tflops, mfu=mfu
    )
    _write_text(result.text(), result.to_dict(), json_file)
    return 0


@app.command("catalog")
def _catalog(
    what: Annotated[str | None, typer.Argument(metavar="[devices|clusters|models|schedules]")] = None,
) -> int:
    """Print what can be named in a job, with sources."""
    if what is not None:
        choice("catalog", what, tuple(catalogue.TABLES))
    tables = [catalogue.TABLES[name]() for name in ([what] if what else catalogue.TABLES)]
    # A pipe or a file has no width to keep to; a terminal that is too narrow breaks lines, not figures.
    wide = Console(width=_WIDE)
    needed = max(Measurement.get(wide, wide.options, table).minimum for table in tables)
    console = Console(width=max(Console().width, needed)) if sys.stdout.isatty() else wide
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    _print(captured.get().rstrip("\n"))
    return 0


def _later(name: str) -> None:
    @app.command(name, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def refuse() -> int:
        raise NotAvailableYetError(f"emulator {name}")

    refuse.__doc__ = "Not available yet."


for _name in ("validate", "campaign", "sweep"):
    _later(_name)


def _check_target(
    option: str, target: str | None, ends: tuple[str, ...] = (), *, directory: bool = False
) -> None:
    """Refuse, before any work, a file that could not be written at the end of it."""
    if target is None:
        return
    path = Path(target)
    if not target or target == "-":
        only = "; only --json writes to standard output" if target else ""
        raise JobError(f"{option} {shown(target)} must be the name of a file{only}")
    if path.is_dir() and not directory:
        raise JobError(f"{option} {shown(target)} is a directory, not a file")
    # A name such as out.txt would become a directory, which nobody means; traces.2 or traces.x/ may be one.
    meant = path.exists() or (path.suffix[1:].isalpha() and not target.endswith("/"))
    if directory and meant and not path.is_dir() and not path.name.endswith(_TRACE_ENDS):
        raise JobError(f"{option} {shown(target)} must end in {listed(_TRACE_ENDS)}, or be a directory")
    if ends and not path.name.endswith(ends):
        raise JobError(f"{option} {shown(target)} must end in {listed(ends)}")
    # Missing directories are made; the nearest one that is there must take them.
    folder = path if path.is_dir() else next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise JobError(f"{option} {shown(target)}: {folder} is not a directory that can be written to")


def _check_different(files: dict[str, str | None]) -> None:
    """Refuse to write two things, or the job and a result, to one file."""
    seen: dict[Path, str] = {}
    for option, name in files.items():
        path = Path(name or "-")
        if name in (None, "-") or (path.exists() and not path.is_file()):
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise JobError(f"{option} {shown(name)} is the file of {other} too; each needs its own")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


def _write_report(report: Report, json_file: str | None) -> None:
    _write_text(str(report), report.to_dict(), json_file)


def _write_text(text: str, table: dict[str, object], json_file: str | None) -> None:
    """Print the text; or with `--json -` nothing but the JSON; with `--json FILE` both."""
    # A NaN is not JSON: null is what does not apply, so one here is our bug and must not be written.
    as_json = json.dumps(table, indent=2, allow_nan=False)
    if json_file == "-":
        _print(as_json)
        return
    if json_file:
        _write(Path(json_file), as_json + "\n")
    _print(text)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Show ops done of ops planned on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("ops"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("ops", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
