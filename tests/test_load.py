"""Loading: TOML files, Python scenarios, names in scenarios/, overrides, and what their errors say."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from msgspec import inspect

from emulator.spec.errors import JobError
from emulator.spec.job import Job, resolved, stage_layers
from emulator.spec.load import load_job, load_model, scenarios
from emulator.spec.schema import join, struct_in

SMALL = """
seq_len = 128
global_batch = 8
cluster = "dgx-h100"

[model]
layers = 8
hidden = 64
ffn_hidden = 128
heads = 4
kv_heads = 4
vocab = 100
"""

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}

SCENARIO = """
from emulator.spec.cluster import dgx_h100
from emulator.spec.job import Job, Layout
from emulator.spec.model import model

print("loading")
llama = model("llama3-8b")
job = Job(model=llama, cluster=dgx_h100(nodes=2), layout=Layout(dp_shard=16), seq_len=128, global_batch=16)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_toml_with_a_model_table_and_a_cluster_name(small: Path) -> None:
    job = load_job(str(small))
    assert (job.model.name, job.model.layers) == ("custom", 8)
    assert job.cluster.name == "dgx-h100"
    assert job.microbatches == 8


def test_toml_with_a_cluster_table(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = 'model = "llama3-8b"\nseq_len = 8\nglobal_batch = 4\n[cluster]\ndevice = "a100-80"\nnodes = 3\n'
    path.write_text(text + "[cluster.host]\nlaunch_seconds = 1e-6\n[layout]\ndp_shard = 4\n")
    job = load_job(str(path))
    assert job.cluster.gpus == 24
    assert job.cluster.device.name == "a100-80"
    assert job.cluster.host.launch_seconds == 1e-6


def test_model_path_is_relative_to_the_job_file(small: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job.toml").write_text(
        'model = "config.json"\ncluster = "dgx-h100"\nseq_len = 8\nglobal_batch = 1\n'
    )
    assert load_job(str(tmp_path / "job.toml")).model.layers == 4
    assert load_model(str(tmp_path)).layers == 4, "a directory with a config.json in it"
    assert load_job(str(small), [f"model={tmp_path / 'config.json'}"]).model.layers == 4


def test_python_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scene.py"
    path.write_text(SCENARIO)
    assert load_job(str(path)).layout.dp_shard == 16
    job = load_job(str(path), ["layout.dp_shard=4", "cluster.nodes=1", "precision=fp16"])
    assert (job.layout.dp_shard, job.cluster.gpus, job.precision) == (4, 8, "fp16")
    assert capsys.readouterr().out == "", "standard output belongs to the report"


def test_name_of_a_scenario(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenarios").mkdir()
    small.rename(tmp_path / "scenarios" / "little.toml")
    (tmp_path / "scenarios" / "_hidden.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert "little" in scenarios()
    assert "_hidden" not in scenarios()
    assert load_job("little") == load_job("little.toml") == load_job("scenarios/little.toml")
    with pytest.raises(
        JobError, match=r"job litle: no such file, and scenarios/ has .*did you mean little\?"
    ):
        load_job("litle")


OVERRIDES = {
    "layout.dp_shard=4": lambda job: job.layout.dp_shard == 4,
    "layout.stage_layers=[8]": lambda job: stage_layers(job) == (8,),
    " seq_len = 64 ": lambda job: job.seq_len == 64,
    "data_parallel.sharding=ddp": lambda job: job.data_parallel.sharding == "ddp",
    'data_parallel.sharding="none"': lambda job: job.data_parallel.sharding == "none",
    "data_parallel.reshard_after_forward=false": lambda job: not job.data_parallel.reshard_after_forward,
    "pipeline.schedule=zbv": lambda job: job.pipeline.schedule == "zbv",
    "fixed_times={forward = 1, backward = 2}": lambda job: job.fixed_times.backward == 2,
    "model=llama3-8b": lambda job: job.model.name == "llama3-8b",
    "model.layers=9": lambda job: job.model.layers == 9,
    "cluster=dgx-a100": lambda job: job.cluster.device.name == "a100-80",
    "cluster=dgx-h100:8": lambda job: job.cluster.gpus == 64,
    "cluster.nodes=9": lambda job: job.cluster.gpus == 72 and job.cluster.rail_optimised,
    "cluster.device=h200": lambda job: job.cluster.device.name == "h200",
    "cluster.device.hbm_efficiency=0.5": lambda job: job.cluster.device.hbm_efficiency == 0.5,
    "cluster.device.peak_flops.bf16=5e14": lambda job: job.cluster.device.peak("bf16") == 5e14,
    "cluster.host.launch_seconds=0": lambda job: job.cluster.host.launch_seconds == 0,
}


@pytest.mark.parametrize("text", OVERRIDES)
def test_override(small: Path, text: str) -> None:
    assert OVERRIDES[text](load_job(str(small), [text]))


def test_overrides_apply_in_order(small: Path) -> None:
    job = load_job(
        str(small), ["cluster.nodes=9", "cluster=dgx-a100", "cluster.nodes=2", "seq_len=1", "seq_len=2"]
    )
    assert (job.cluster.device.name, job.cluster.nodes, job.seq_len) == ("a100-80", 2, 2)


def test_an_override_makes_a_missing_table(small: Path) -> None:
    times = load_job(str(small), ["fixed_times.forward=1", "fixed_times.backward=2"]).fixed_times
    assert times is not None
    assert (times.forward, times.backward) == (1, 2)


BAD_OVERRIDES = {
    "layout.pp": '--set "layout.pp" must be PATH=VALUE',
    "=8": "must be PATH=VALUE",
    "layout..pp=8": "must be PATH=VALUE",
    "layout.ppp=8": 'unknown key "ppp" in [layout]; did you mean pp?',
    "pp=8": 'unknown key "pp" at the top of the job; did you mean layout.pp?',
    "layuot.pp=8": 'unknown key "layuot" at the top of the job; did you mean layout?',
    "seq_len.x=8": '--set: seq_len is a single value and has no "x"',
    "layout.pp=eight": 'layout.pp = "eight" must be a whole number',
    "layout.pp=[8": "--set layout.pp=[8: the value is not TOML",
    "layout.pp=2.0": "layout.pp = 2.0 must be a whole number",
    "seq_len=": "--set seq_len=: the value is not TOML",
    "data_parallel.reshard_after_forward=True": "must be true or false",
    "layout=3": "layout = 3 must be a table: write [layout] and its fields below",
    "seq_len=1\nsteps=2": "must be a whole number",
    "cluster.device.sms=0": "device.sms = 0 must be at least 1",
    "model=llama3-9b": "did you mean",
    "model=nowhere/config.json": "there is no file",
    "cluster=dgx-h101": "did you mean dgx-h100?",
    "cluster.device=h101-sxm": "did you mean h100-sxm?",
}


@pytest.mark.parametrize("text", BAD_OVERRIDES)
def test_bad_override(small: Path, text: str) -> None:
    with pytest.raises(JobError, match=re.escape(BAD_OVERRIDES[text])):
        load_job(str(small), [text])


BROKEN_TOML = {
    "seq_len = ": "line 1, column 11: not TOML: Invalid value",
    "seq_len = 1\nseq_len = 2\n": "line 2, column 12: not TOML: Cannot overwrite a value",
    "[layout\npp = 2\n": "line 1, column 8: not TOML",
    "\nseq_len = 8 192\n": "line 2, column 13: not TOML",
}


@pytest.mark.parametrize("text", BROKEN_TOML)
def test_broken_toml_says_where(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(JobError, match=re.escape(f"{path}, {BROKEN_TOML[text]}")):
        load_job(str(path))


BROKEN_PYTHON = {
    "job = (\n": "line 1: not Python: '(' was never closed",
    "x = 1\n": "defines no job; write job = Job(...)",
    "job = 3\n": "defines job as int, not Job",
    "x = 1\njob = undefined\n": "line 2: NameError: name 'undefined' is not defined",
    "import nowhere\n": "line 1: ModuleNotFoundError: No module named 'nowhere'",
    "import sys\nsys.exit(3)\n": "exits when it is loaded",
    "from emulator.spec.job import Layout\nLayout(tpp=2)\n": "line 2: TypeError",
    "from emulator.spec.job import Layout\nLayout(tp=0)\n": "layout.tp = 0 must be at least 1",
}


@pytest.mark.parametrize("text", BROKEN_PYTHON)
def test_broken_python_says_where(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.py"
    path.write_text(text)
    with pytest.raises(JobError, match=re.escape(BROKEN_PYTHON[text])) as caught:
        load_job(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_jobs(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match=r"a job is a \.toml file or a \.py scenario, not \.yaml"):
        load_job(str(tmp_path / "job.yaml"))
    with pytest.raises(JobError, match="this is a directory"):
        load_job(str(tmp_path))
    with pytest.raises(JobError, match="not UTF-8 text, at byte 0"):
        load_job(str(tmp_path / "binary.toml"))


def fields(kind: inspect.Type, path: str = "") -> list[str]:
    """Paths of all fields of a job, tables included."""
    kind = struct_in(kind)
    if not isinstance(kind, inspect.StructType):
        return [path]
    inner = [place for field in kind.fields for place in fields(field.type, join(path, field.name))]
    return [path, *inner] if path else inner


ODD = [
    "-1",
    "0",
    "1",
    "1.5",
    "nan",
    "inf",
    "1e300",
    str(10**30),
    "true",
    '"x"',
    '""',
    "[]",
    "[1]",
    "{}",
    '{x = "y"}',
    "2026-01-01",
]


@pytest.mark.parametrize("path", fields(inspect.type_info(Job)))
def test_whatever_stands_in_a_field_is_a_job_or_one_line(path: str, small: Path) -> None:
    for value in ODD:
        with contextlib.suppress(JobError):
            table = resolved(load_job(str(small), [f"{path}={value}"]))
            # Every number of a job that was accepted is one that JSON can hold.
            json.dumps(table, allow_nan=False)
