"""Files and names that are there to break a command: one line and exit 2, or a result, never harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from emulator.cli import main
from emulator.plan import plan
from emulator.report.export import replacing, save_trace
from emulator.run import run
from emulator.spec.load import load_job

Capture = pytest.CaptureFixture[str]

JOB = """\
model = {name = "tiny", layers = 2, hidden = 64, ffn_hidden = 128, heads = 4, kv_heads = 2, vocab = 100}
seq_len = 64
global_batch = 4
layout = {dp_shard = 4}
cluster = {device = "h100-sxm", nodes = 2}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A good job in an empty directory, which is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    return "job.toml"


def refused(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json", "job.toml"], '--json "job.toml" is the file of JOB too'),
        (["--json", "a.json", "--trace", "./a.json"], '--trace "./a.json" is the file of --json too'),
        (["--trace", "job.toml"], "must end in .json or .json.gz, or be a directory"),
        (["--trace", "-"], '--trace "-" must be the name of a file; only --json writes to standard output'),
        (["--trace", ""], '--trace "" must be the name of a file'),
        (["--json", ""], '--json "" must be the name of a file'),
        (["--json", "/proc/none.json"], "No such file"),
        (["--json", "/dev/full"], "/dev/full: No space left on device"),
        (["--set", "seq_len=" + "9" * 5000], "too many digits"),
        (["--set", "seq_len=" + "[" * 100_000], "nested too deep"),
        (["--set", 'model.name="a\\nb"'], "model.name = 'a\\nb' must be text on one line"),
    ],
)
def test_outputs_and_values_that_cannot_be(job: str, options: list[str], says: str, capsys: Capture) -> None:
    assert says in refused(capsys, "run", job, *options)
    assert Path(job).read_text() == JOB


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", "a = " + "[" * 100_000),
        ("digits.toml", "seq_len = " + "9" * 5000),
    ],
)
def test_toml_that_no_parser_takes(tmp_path: Path, name: str, text: str, capsys: Capture) -> None:
    (tmp_path / name).write_text(text)
    assert name in refused(capsys, "run", str(tmp_path / name))


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_a_config_that_no_parser_takes(job: str, text: str, capsys: Capture) -> None:
    Path("config.json").write_text(text)
    assert "config.json" in refused(capsys, "run", job, "--set", "model=config.json")


def test_a_byte_order_mark_does_no_harm(job: str, capsys: Capture) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    Path(job).write_text(JOB, encoding="utf-8-sig")
    assert main(["check", job, "--set", "model=config.json"]) == 0
    capsys.readouterr()


def test_a_link_is_followed_and_a_device_is_written_to(job: str, capsys: Capture) -> None:
    """What a name stands for is written, and stays what it is."""
    Path("real.json").write_text("old")
    Path("link.json").symlink_to("real.json")
    Path("new.json").symlink_to("made.json")
    assert main(["run", job, "--json", "link.json"]) == 0
    assert main(["run", job, "--json", "new.json"]) == 0
    assert Path("link.json").is_symlink()
    assert json.loads(Path("real.json").read_text()) is not None
    assert json.loads(Path("made.json").read_text()) is not None
    assert names(".") == ["job.toml", "link.json", "made.json", "new.json", "real.json"]
    with replacing(Path("/dev/null")) as file:
        file.write(b"nothing")
    assert Path("/dev/null").is_char_device()
    capsys.readouterr()


def test_all_results_at_once_are_quiet_and_whole(job: str, capsys: Capture) -> None:
    """Beside --json - nothing is printed, whatever letters the name has; missing directories are made."""
    files = ["--trace", "a/b", "--timeline", "c/d.svg"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["run", job, "--set", 'model.name="模型 ü"', "--json", "-", *files]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["job"]["model"]["name"] == "模型 ü"
    assert err == ""
    assert names("a/b") == ["rank0.json.gz"], "one for each class, and the four ranks do the same"
    assert names("c") == ["d.svg"]


def test_another_directory_and_another_hash_seed_give_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    root = str(Path(__file__).resolve().parents[1])
    traces, reports = set(), []
    for seed in ("0", "1", "2"):
        here = tmp_path / seed
        here.mkdir()
        command = [sys.executable, "-m", "emulator", "run", "../job.toml", "--json", "r", "--trace", "t.json"]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root}
        subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True, timeout=60)
        traces.add((here / "t.json").read_bytes())
        report = json.loads((here / "r").read_text())
        del report["emulation"]["wall_seconds"]
        reports.append(report)
    assert len(traces) == 1
    assert reports[0] == reports[1] == reports[2]


def test_the_file_of_any_rank_is_the_same_whether_folded_or_not(job: str) -> None:
    """Ranks deep inside a class, beside a slow NIC and at the edge of a pod, byte for byte."""
    slow = 'faults=[{kind = "nic", rank = 17, factor = 0.5}]'
    sizes = ["layout={pp = 2, dp_shard = 21}", 'pipeline={schedule = "gpipe"}', "global_batch=42"]
    narrow = {"gpus_per_node": 3, "nodes": 15, "racks_per_pod": 4, "pod_oversubscription": 20.0}
    spec = load_job(job, [*sizes, slow, *(f"cluster.{field}={value}" for field, value in narrow.items())])
    folded, unfolded = plan(spec), plan(spec, folded=False)
    assert len(folded.classes) < len(unfolded.classes) == 42
    traces = {"folded": run(folded), "unfolded": run(unfolded)}
    for ranks in ([41], [11, 12], [16, 17, 18], list(range(42))):
        for name, trace in traces.items():
            save_trace(trace, f"{name}.json", ranks=ranks)
        assert Path("folded.json").read_bytes() == Path("unfolded.json").read_bytes(), ranks
