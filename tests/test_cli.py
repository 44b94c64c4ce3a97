"""The command line in process: exit statuses, one-line errors, what goes to which stream, whole files."""

import csv
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import inspect
from test_load import ODD, fields

import emulator.cli
from emulator.cli import main
from emulator.run import DeadlockError
from emulator.spec.job import Job
from emulator.spec.load import load_job

HERE = Path(__file__).parent
BAD = tomllib.loads((HERE / "bad_jobs.toml").read_text())["bad"]
GOOD = {
    "model": 'model = "llama3-8b"',
    "cluster": 'cluster = "dgx-h100"',
    "seq_len": "seq_len = 8192",
    "global_batch": "global_batch = 32",
}
GPIPE = """
cluster = "dgx-h100"
seq_len = 128
global_batch = 4

[model]
name = "small"
layers = 4
hidden = 64
ffn_hidden = 128
heads = 4
kv_heads = 4
vocab = 100

[layout]
pp = 4

[pipeline]
schedule = "gpipe"

[fixed_times]
forward = 1.0
backward = 2.0
"""
REPORT_KEYS = {
    "job",
    "step_seconds",
    "step_seconds_each",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "mfu_conventions",
    "bubble",
    "time",
    "time_ps",
    "step_ps",
    "communication",
    "memory",
    "faults",
    "emulation",
    "hints",
}
TOO_BIG = ["--set", "model=llama3-70b", "--set", "layout.pp=1", "--set", "layout.dp_shard=4"]

Capture = pytest.CaptureFixture[str]


def written(folder: Path, text: str, omit: tuple[str, ...] = ()) -> str:
    """Write the good job with `text` put in; a key that `text` sets replaces the good one."""
    keep = [
        line
        for key, line in GOOD.items()
        if key not in omit and not re.search(rf"^\[?{key}\b", text, re.MULTILINE)
    ]
    path = folder / "job.toml"
    path.write_text("\n".join([*keep, text]) + "\n")
    return str(path)


@pytest.fixture
def gpipe(tmp_path: Path) -> str:
    path = tmp_path / "gpipe.toml"
    path.write_text(GPIPE)
    return str(path)


def refused(capsys: Capture, *arguments: str) -> str:
    """Run a command that must exit with 2 and print one line on standard error; return the line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_the_good_job_is_good(tmp_path: Path) -> None:
    assert load_job(written(tmp_path, "")).microbatches == 32


def test_there_are_enough_bad_jobs() -> None:
    assert len({case["name"] for case in BAD}) == len(BAD) >= 60


@pytest.mark.parametrize("case", BAD, ids=[case["name"] for case in BAD])
def test_bad_job_gives_one_line(case: dict[str, object], tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, str(case["text"]), tuple(case.get("omit", ())))  # type: ignore[arg-type]
    line = refused(capsys, "run", path)
    for fragment in case["says"]:  # type: ignore[attr-defined]
        assert fragment in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "JOB"),
        (["run", "gpipe_99x99"], "job gpipe_99x99: no such file"),
        (["run", "nowhere/job.toml"], "job nowhere/job.toml: no such file"),
        (["run", "job.toml", "--jsn", "x"], "; see emulator run --help"),
        (["run", "job.toml", "more.toml"], "more.toml"),
        (["run", "job.toml", "--steps", "two"], '"two" is not a whole number'),
        (["estimate", "llama3-8b", "--mfu", "40%"], '"40%" is not a number'),
        (["fly"], "fly"),
        (["catalog", "device"], 'catalog = "device" must be devices, clusters, models or schedules'),
        (["estimate", "llama3-9b"], "did you mean llama3-8b"),
        (["estimate", "llama3-8b", "--device", "h100"], "h100-sxm"),
        (["estimate", "llama3-8b", "--tflops", "400", "--mfu", "0.4"], "give one"),
        (["estimate", "llama3-8b", "--mfu", "40"], "mfu = 40"),
        (["estimate", "llama3-8b", "--gpus", "0"], "gpus = 0"),
        (["estimate", "llama3-8b", "--tokens=-1"], "tokens = -1"),
        (["validate", "table.csv", "--json", "out.json"], "emulator validate is not available yet"),
        (["campaign", "job.toml", "--days", "54"], "emulator campaign is not available yet"),
        (["sweep", "sweep.toml", "--workers", "2"], "emulator sweep is not available yet"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys: Capture) -> None:
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--timeline", "out.gif"], '--timeline "out.gif" must end in .png, .svg or .pdf'),
        (["--trace", "out.txt"], '--trace "out.txt" must end in .json or .json.gz, or be a directory'),
        (["--json", "/dev/null/report.json"], "/dev/null is not a directory that can be written to"),
        (["--json", "/tmp"], '--json "/tmp" is a directory, not a file'),
        (["--steps", "0"], "steps = 0 must be at least 1"),
        (["--set", "layout.pp"], "must be PATH=VALUE"),
    ],
)
def test_wrong_options_of_run(option: list[str], says: str, gpipe: str, capsys: Capture) -> None:
    assert says in refused(capsys, "run", gpipe, *option)


def test_module_entry_gives_the_same_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "emulator", "run", written(tmp_path, "steps = 0")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: steps = 0 must be at least 1\n"


def test_a_closed_pipe_says_nothing_about_the_job() -> None:
    command = [sys.executable, "-m", "emulator", "catalog"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HERE.parent
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_no_command_prints_help(capsys: Capture) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert "catalog" in out
    assert err == ""


def test_the_version_is_that_of_the_package(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"emulator {emulator.__version__}\n"


def test_run_prints_only_json_on_request(gpipe: str, capsys: Capture) -> None:
    """GPipe with P = m = 4: (m + P - 1)(F + B) = 7 x 3 = 21 s, exactly."""
    assert main(["run", gpipe, "--json", "-", "--no-fold"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert set(report) >= REPORT_KEYS
    assert report["step_ps"] == 21 * 10**12
    assert report["job"]["layout"]["stage_layers"] == [1, 1, 1, 1]
    assert report["memory"]["fits"] is True


def test_run_writes_whole_files(gpipe: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "folder"
    files = {"--json": out / "r.json", "--trace": out / "t.json.gz", "--timeline": out / "t.png"}
    options = [word for option, path in files.items() for word in (option, str(path))]
    assert main(["run", gpipe, "--steps", "2", *options]) == 0
    assert sorted(out.iterdir()) == sorted(files.values())
    assert all(path.stat().st_size for path in files.values())
    report = json.loads(files["--json"].read_text())
    assert report["step_seconds_each"] == [21.0, 21.0]
    printed, err = capsys.readouterr()
    assert "small" in printed
    assert err == ""


def test_run_takes_overrides(gpipe: str, capsys: Capture) -> None:
    options = ["--set", "pipeline.schedule=naive", "--set", "fixed_times.backward=1"]
    assert main(["run", gpipe, *options, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == 4 * 4 * 2


def test_a_job_that_does_not_fit(gpipe: str, tmp_path: Path, capsys: Capture) -> None:
    """70B over 4 GPUs: 16 B a parameter / 4 = 282 GB on an 80 GB device."""
    path = tmp_path / "report.json"
    assert main(["run", gpipe, *TOO_BIG, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["memory"]["fits"] is False
    assert report["memory"]["over"]["stage"] == 0
    assert report["memory"]["over"]["bytes"] > 0
    assert report["memory"]["stages"][0]["peak"] > report["memory"]["capacity_bytes"]
    assert report["step_seconds"] is None
    assert report["mfu"] is None
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert err == ""


def test_a_job_that_does_not_fit_can_be_run(gpipe: str, capsys: Capture) -> None:
    assert main(["run", gpipe, *TOO_BIG, "--ignore-memory", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory"]["fits"] is False
    assert report["step_seconds"] > 0


def stopped(error: BaseException) -> Callable[..., object]:
    def play(*_: object, **__: object) -> object:
        raise error

    return play


def test_a_deadlock_is_reported(
    gpipe: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator.cli, "play", stopped(DeadlockError(5, ["rank 0 waits for rank 1"])))
    path = tmp_path / "report.json"
    assert main(["run", gpipe, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["step_seconds"] is None
    assert "rank 0 waits for rank 1" in report["outcome"]["why"]
    assert "rank 0 waits for rank 1" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["play", "measure"])
def test_an_interrupt_leaves_old_files_alone(
    where: str, gpipe: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator.cli, where, stopped(KeyboardInterrupt()))
    path = tmp_path / "report.json"
    path.write_text("old")
    before = sorted(tmp_path.iterdir())
    assert main(["run", gpipe, "--json", str(path)]) == 130
    assert path.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_interrupt_while_writing(
    gpipe: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "replace", stopped(KeyboardInterrupt()))
    path = tmp_path / "report.json"
    assert main(["run", gpipe, "--json", str(path)]) == 130
    assert [each.name for each in tmp_path.iterdir()] == ["gpipe.toml"]
    assert capsys.readouterr().err == "interrupted\n"


def test_progress_is_for_terminals(gpipe: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["run", gpipe, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step_seconds"] == 21.0
    assert "ops" in err


def test_check_says_whether_it_fits(gpipe: str, capsys: Capture) -> None:
    assert main(["check", gpipe]) == 0
    out = capsys.readouterr().out
    assert "pp(4) = 4 ranks" in out
    assert "4 of 1 layers; schedule gpipe" in out
    assert "microbatches 4, each of 1" in out
    assert "\nfits: stage" in out
    assert main(["check", gpipe, *TOO_BIG]) == 1
    assert "\ndoes not fit: stage 0 needs" in capsys.readouterr().out


def test_show_says_who_is_in_the_class_of_a_rank(gpipe: str, capsys: Capture) -> None:
    """A job of four stages, with and without two replicas; a rank that is not there is refused."""
    assert main(["show", gpipe, "--rank", "3"]) == 0
    assert "rank 3 is in class 3, alone" in capsys.readouterr().out
    replicas = ["--set", "layout.dp_shard=2", "--set", "global_batch=8"]
    assert main(["show", gpipe, *replicas, "--rank", "5"]) == 0
    out = capsys.readouterr().out
    assert "rank 5 is in class 1, with 1 other: 1" in out
    assert "rank 5 (stage1" in out
    assert main(["show", gpipe, "--rank", "4"]) == 2
    assert capsys.readouterr().err == "error: --rank 4: the job has ranks 0 to 3\n"


def test_show_writes_the_schedule_as_torch_does(gpipe: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "gpipe.csv"
    assert main(["show", gpipe, "--schedule", str(path)]) == 0
    assert "3F0" in capsys.readouterr().out
    rows = [[cell for cell in row if cell] for row in csv.reader(path.open())]
    assert rows == [[f"{s}{kind}{mb}" for kind in "FB" for mb in range(4)] for s in range(4)]


def test_estimate_of_llama_3(tmp_path: Path, capsys: Capture) -> None:
    """The course notes' arithmetic: 3.8e25 FLOPs, 5.8e6 s at 400 TFLOP/s on 16,384 GPUs."""
    path = tmp_path / "estimate.json"
    arguments = ["--tokens", "15.6e12", "--gpus", "16384", "--tflops", "400", "--json", str(path)]
    assert main(["estimate", "llama3-405b", *arguments]) == 0
    table = json.loads(path.read_text())
    assert table["flops"] == pytest.approx(3.8e25, rel=0.01)
    assert table["seconds"] == pytest.approx(5.8e6, rel=0.01)
    assert "67.09 days" in capsys.readouterr().out
    assert main(["estimate", "llama3-8b", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_030_261_248


def test_catalog_prints_the_totals_of_llama_3s_cluster(capsys: Capture) -> None:
    assert main(["catalog", "clusters"]) == 0
    out = capsys.readouterr().out
    for figure in ("24,576", "1.875 PiB", "415 million", "13 million", "24.3"):
        assert figure in out


def test_catalog_names_everything(capsys: Capture) -> None:
    assert main(["catalog"]) == 0
    out = capsys.readouterr().out
    for name in ("trainium2", "dgx-a100", "megatron-1t", "8,030,261,248", "dualpipev", "not available yet"):
        assert name in out


@pytest.mark.parametrize("what", ["devices", "clusters", "models", "schedules"])
def test_a_narrow_terminal_cuts_no_figure(
    what: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["catalog", what]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    for figure in {
        "devices": ("h100-96gb-500w", "132/144", "494.5", "179.1"),
        "clusters": ("llama3-24k", "8 x 192 x 2 x 8", "415 million", "24.3 (bf16)"),
        "models": ("megatron-1t", "1,008,038,758,400"),
        "schedules": ("interleaved_1f1b",),
    }[what]:
        assert figure in out


def test_a_run_beyond_the_clock_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """64-bit picoseconds hold 106 days; a host that takes a year to launch a kernel is a slip of the pen."""
    path = written(tmp_path, "[data_parallel]\nsharding = 'none'")
    line = refused(capsys, "run", path, "--ignore-memory", "--set", "cluster.host.launch_seconds=3e7")
    assert "longer than 2**63 ps = 106 days" in line


@pytest.mark.slow
@pytest.mark.parametrize("path", fields(inspect.type_info(Job)))
def test_whatever_stands_in_a_field_never_gives_a_traceback(path: str, gpipe: str, capsys: Capture) -> None:
    for value in ODD:
        assert main(["run", gpipe, "--set", f"{path}={value}"]) in (0, 1, 2)
        assert capsys.readouterr().err.count("\n") <= 1
