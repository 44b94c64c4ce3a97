"""Every scenario loads, plays, and does what its docstring expects."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest

from emulator import simulate
from emulator.spec.job import Job
from emulator.spec.load import load_job, scenarios

FOLDER = Path(__file__).parents[1] / "scenarios"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".py", ".toml"))
WANTED = {
    "llama3_8b_fsdp64",
    "gpipe_4x4",
    "naive_pipeline_8",
    "ddp_bucket_overlap",
    "fsdp_steady_state",
    "fp32_fallback",
}

each = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scenario_under_test_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scenarios_asked_for_are_there():
    names = {path.stem for path in FILES}
    assert names >= WANTED
    assert {name for name in scenarios() if name in names} == names


@each
def test_it_loads_as_a_job_by_name_and_by_path(path: Path):
    by_path = load_job(str(path))
    assert isinstance(by_path, Job)
    assert load_job(path.stem) == by_path


@each
def test_it_takes_an_override(path: Path):
    """A scenario in Python is as open to --set as a TOML file."""
    assert load_job(str(path), ["seed=7"]).seed == 7


@each
def test_it_does_what_it_expects(path: Path):
    """The docstring's expectation, as the scenario's own `expect` asserts it."""
    module = module_of(path)
    assert module.__doc__ is not None
    assert "Expect" in module.__doc__, "a scenario states what to expect before it runs"
    result = simulate(module.job)
    assert result.trace.outcome.kind == "complete"
    module.expect(result)


def test_the_expectations_can_fail():
    """An expectation is held against the result it is given: another job's result breaks it."""
    gpipe, naive = (module_of(FOLDER / f"{name}.py") for name in ("gpipe_4x4", "naive_pipeline_8"))
    with pytest.raises(AssertionError, match="14 s"):
        gpipe.expect(simulate(naive.job))
    with pytest.raises(AssertionError, match="96 s"):
        naive.expect(simulate(gpipe.job))


def test_running_a_scenario_prints_its_report(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(FOLDER / "gpipe_4x4.py"), run_name="__main__")
    assert "bubble" in capsys.readouterr().out
