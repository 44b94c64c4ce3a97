"""From what a user names to a Job: a TOML file, a Python scenario, or the name of one in scenarios/."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import inspect

from emulator.spec.checks import hint, listed, shown
from emulator.spec.cluster import cluster as cluster_named
from emulator.spec.device import device as device_named
from emulator.spec.errors import JobError
from emulator.spec.job import Job
from emulator.spec.model import Model, from_hf_config
from emulator.spec.model import model as model_named
from emulator.spec.schema import Table, build, join, struct_in, unknown, verify


def load_job(ref: str, overrides: Sequence[str] = ()) -> Job:
    """Load the job that `ref` names, with `PATH=VALUE` overrides applied in order.

    Raises JobError, with one line that says what is wrong and what would be right, for whatever a user can
    get wrong: a missing or broken file, an unknown key, a wrong type, a job that cannot be.
    """
    path = _locate(ref)
    if path.suffix == ".py":
        job = _from_python(path)
        if not overrides:
            return job
        table: Table = msgspec.to_builtins(job)
    else:
        table = _from_toml(path)
    for text in overrides:
        _override(table, text, path.parent)
    _resolve(table, path.parent)
    return build(table, Job)


def load_model(ref: str, beside: Path | None = None) -> Model:
    """Look up a model: a catalogue name, or a path to a Hugging Face config.json (or to its directory).

    A relative path is looked for beside the job file first, then in the current directory.
    """
    roots = [beside or Path(), Path()]
    found = [root / ref for root in roots if (root / ref).exists()]
    if found and found[0].is_dir():
        found = [each / "config.json" for each in found if (each / "config.json").is_file()]
    if found:
        return from_hf_config(found[0])
    if "/" in ref or ref.endswith(".json"):
        raise JobError(f"model = {shown(ref)}: there is no file {roots[0] / ref}")
    return model_named(ref)


def scenarios() -> dict[str, Path]:
    """Files of scenarios/ by name, from the current directory and from beside the package."""
    found: dict[str, Path] = {}
    for folder in (Path("scenarios"), Path(__file__).resolve().parents[2] / "scenarios"):
        for path in sorted(folder.glob("*")):
            if path.suffix in (".toml", ".py") and not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return found


def _locate(ref: str) -> Path:
    path = Path(ref)
    if path.is_file():
        if path.suffix not in (".toml", ".py"):
            raise JobError(f"job {ref}: a job is a .toml file or a .py scenario, not {path.suffix or 'this'}")
        return path
    known = scenarios()
    name = path.stem if path.suffix in (".toml", ".py") else ref
    if len(path.parts) == 1 and name in known and path.suffix in ("", known[name].suffix):
        return known[name]
    if path.is_dir():
        raise JobError(f"job {ref}: this is a directory; name a .toml file or a .py scenario in it")
    names = f"scenarios/ has {listed(known)}" if known else "there is no scenarios/ here"
    raise JobError(f"job {ref}: no such file, and {names}{hint(name, known)}")


def _from_toml(path: Path) -> Table:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: not UTF-8 text, at byte {error.start}") from None
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(_toml_error(path, text, str(error))) from None
    except (RecursionError, ValueError):
        raise JobError(
            f"{path}: not a job: a value in it is nested too deep or has too many digits"
        ) from None


def _toml_error(path: Path, text: str, message: str) -> str:
    at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if at:
        line, column = int(at[1]), int(at[2])
    else:
        lines = text.splitlines() or [""]
        line, column = len(lines), len(lines[-1]) + 1
    return f"{path}, line {line}, column {column}: not TOML: {message.split(' (at ', maxsplit=1)[0]}"


def _from_python(path: Path) -> Job:
    spec = importlib.util.spec_from_file_location(f"emulator_scenario_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        # Standard output belongs to the report.
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except JobError:
        raise
    except SyntaxError as error:
        raise JobError(f"{path}, line {error.lineno}: not Python: {error.msg}") from None
    except SystemExit:
        raise JobError(f'{path} exits when it is loaded; keep that under if __name__ == "__main__"') from None
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        line = f", line {frames[-1].lineno}" if frames else ""
        cause = " ".join(str(error).split())
        raise JobError(f"{path}{line}: {type(error).__name__}: {cause}") from None
    job = getattr(module, "job", None)
    if not isinstance(job, Job):
        what = "defines no job" if job is None else f"defines job as {type(job).__name__}, not Job"
        raise JobError(f"{path} {what}; write job = Job(...) at its top level")
    return job


def _override(table: Table, text: str, beside: Path) -> None:
    path, sign, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not sign or not all(keys):
        raise JobError(f"--set {shown(text)} must be PATH=VALUE, for example --set layout.pp=8")
    kind: inspect.Type = inspect.type_info(Job)
    at = ""
    for key in keys[:-1]:
        kind = _step(kind, key, at)
        at = join(at, key)
        child = _expanded(at, table.get(key), beside)
        table[key] = child
        table = child
    kind = _step(kind, keys[-1], at)
    parsed = _value(value.strip(), join(at, keys[-1]))
    if not (at in ("", "cluster") and keys[-1] in ("model", "cluster", "device") and isinstance(parsed, str)):
        verify(parsed, kind, join(at, keys[-1]))
    table[keys[-1]] = parsed


def _step(kind: inspect.Type, key: str, at: str) -> inspect.Type:
    kind = struct_in(kind)
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.name == key:
                return field.type
        raise JobError(f"--set: {unknown(kind, key, at)}")
    if isinstance(kind, inspect.DictType):
        return kind.value_type
    raise JobError(f'--set: {at} is a single value and has no "{key}"')


def _expanded(path: str, value: object, beside: Path) -> Table:
    """Turn what stands where an override goes into: a table as it is, a catalogue name as its table."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and path == "model":
        return _builtins(load_model(value, beside))
    if isinstance(value, str) and path == "cluster":
        return _builtins(cluster_named(value))
    if isinstance(value, str) and path == "cluster.device":
        return _builtins(device_named(value))
    return {}


def _value(text: str, path: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if not text or text[0] in "\"'[{":
            raise JobError(f"--set {path}={text}: the value is not TOML") from None
        return text
    except (RecursionError, ValueError):
        raise JobError(f"--set {path}: the value is nested too deep or has too many digits") from None
    return parsed["value"] if len(parsed) == 1 else text


def _resolve(table: Table, beside: Path) -> None:
    """Put tables where the job names a catalogue entry or a file."""
    for name in ("model", "cluster"):
        if isinstance(table.get(name), str):
            table[name] = _expanded(name, table[name], beside)
    model, cluster = table.get("model"), table.get("cluster")
    if isinstance(model, dict):
        model.setdefault("name", "custom")
    if isinstance(cluster, dict) and isinstance(cluster.get("device"), str):
        cluster["device"] = _builtins(device_named(cluster["device"]))


def _builtins(value: object) -> Table:
    table: Table = msgspec.to_builtins(value)
    return table
