"""The README's snippets run, and its outputs are what the program prints.

`python tests/test_readme.py` writes the outputs anew after a change of the model.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from emulator import Cluster, DataParallel, Job, Layout, Pipeline, clusters, models
from emulator.cli import main
from emulator.plan import plan
from emulator.report.memory import memory_by_stage
from emulator.spec.faults import Fault
from emulator.spec.load import load_job
from emulator.spec.units import GIB
from plots import speed
from plots.accuracy import point, rows, table

README = Path(__file__).parents[1] / "README.md"
JOB = re.compile(r"```toml\n(.*?)```", re.S)
SNIPPET = re.compile(r"```python\n(.*?)```", re.S)
OUTPUT = re.compile(r"(<!-- output: (.*?) -->\n```console\n\$ [^\n]*\n)(.*?)(```)", re.S)
ACCURACY = re.compile(r"(<!-- accuracy -->\n)(\|.*\n)*")
SPEED = re.compile(r"(<!-- speed: (\w+) -->\n)((?:\|.*\n)*)")
SPEED_TABLES = {"executor": speed.executor_table, "jobs": speed.job_table, "flows": speed.flow_table}
VARIES = re.compile(r"\d[\d,]* events, [\d.]+ s")
"""Wall time is not the same twice."""


def printed(command: str, folder: Path) -> str:
    """What a command of the README prints, piped through its grep if it has one."""
    line, _, pattern = command.partition(" | grep -E ")
    arguments = [str(folder / word) if word == "job.toml" else word for word in line.split()[1:]]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(arguments) == 0
    lines = text.getvalue().rstrip().splitlines()
    if pattern:
        lines = [each for each in lines if re.search(pattern.strip('"'), each)]
    return "\n".join(each.rstrip() for each in lines) + "\n"


@pytest.mark.parametrize("command", [match[1] for match in OUTPUT.findall(README.read_text())])
def test_output_is_what_the_program_prints(command: str, tmp_path: Path) -> None:
    text = README.read_text()
    (tmp_path / "job.toml").write_text(JOB.findall(text)[0])
    shown = next(match[2] for match in OUTPUT.findall(text) if match[1] == command)
    assert VARIES.sub("", shown) == VARIES.sub("", printed(command, tmp_path))


@pytest.mark.parametrize("number", range(len(SNIPPET.findall(README.read_text()))))
def test_snippet_runs(number: int) -> None:
    exec(compile(SNIPPET.findall(README.read_text())[number], f"README snippet {number}", "exec"), {})


def test_the_job_file_shows_every_field_that_works_with_its_default(tmp_path: Path) -> None:
    """What is not built yet is left out, and nothing else."""
    _, shown, cluster, faults = JOB.findall(README.read_text())
    (tmp_path / "job.toml").write_text(shown)
    job = load_job(str(tmp_path / "job.toml"))
    assert job == Job(
        model=models.LLAMA3_8B, cluster=clusters.dgx_h100(nodes=8), seq_len=8192, global_batch=64
    )
    table = tomllib.loads(shown)
    left_out = {
        Job: {"gpus", "seed", "recompute", "fixed_times", "faults", "failures", "checkpoint", "recovery"},
        Layout: {"tp", "cp", "ep", "virtual_stages", "sequence_parallel", "context"},
    }
    for kind, keys in (
        (Job, table),
        (Layout, table["layout"]),
        (Pipeline, table["pipeline"]),
        (DataParallel, table["data_parallel"]),
        (Cluster, tomllib.loads(cluster)["cluster"] | {"name": "", "source": ""}),
    ):
        assert set(keys) == set(kind.__struct_fields__) - left_out.get(kind, set()), kind.__name__
    (tmp_path / "own.toml").write_text(
        shown.split("cluster =")[0] + "seq_len = 8192\nglobal_batch = 64\n" + cluster
    )
    assert load_job(str(tmp_path / "own.toml")).cluster.nic_gbit_per_gpu == 200
    (tmp_path / "slow.toml").write_text(shown + faults)
    assert load_job(str(tmp_path / "slow.toml"), ["layout.dp_shard=64"]).faults == (
        Fault(kind="straggler", rank=17, factor=0.8),
    )


def test_llama_3_70b_fits_as_the_limits_say() -> None:
    short, long = (
        memory_by_stage(
            plan(
                Job(
                    model=models.LLAMA3_70B,
                    cluster=clusters.dgx_h100(nodes=32),
                    layout=Layout(dp_shard=256),
                    seq_len=seq_len,
                    global_batch=256,
                )
            )
        )
        for seq_len in (2048, 4096)
    )
    assert short.fits
    assert not long.fits
    assert f"with 4,096, which need {long.stages[0].peak / GIB:.0f} GiB" in README.read_text()


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text())
    assert pictures
    assert all((README.parent / picture).is_file() for picture in pictures)


def measured(part: str) -> str:
    """Table of the figures that `make bench` left."""
    return SPEED_TABLES[part](json.loads(speed.FIGURES.read_text())[part])


@pytest.mark.parametrize("part", SPEED_TABLES)
def test_figures_of_speed_are_those_of_the_last_bench(part: str) -> None:
    tables = {name: text for _, name, text in SPEED.findall(README.read_text())}
    assert tables[part] == measured(part)


def rewrite() -> None:
    """Put the program's present output into the README."""
    import tempfile

    text = README.read_text()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB.findall(text)[0])
        fresh = OUTPUT.sub(lambda match: match[1] + printed(match[2], Path(folder)) + match[4], text)
    fresh = ACCURACY.sub(lambda match: match[1] + table([point(row) for row in rows()]), fresh)
    fresh = SPEED.sub(lambda match: match[1] + measured(match[2]), fresh)
    README.write_text(fresh)


if __name__ == "__main__":
    sys.exit(rewrite())
