"""Builtins (from TOML) against the job's types: plain one-line errors before anything is constructed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import inspect

from emulator.spec.checks import choice, hint, listed, shown
from emulator.spec.errors import JobError
from emulator.spec.job import Job

Table = dict[str, object]
T = TypeVar("T")

_EXAMPLES = {
    "model": 'model = "llama3-8b"',
    "cluster": 'cluster = "dgx-h100"',
    "seq_len": "seq_len = 8192, in tokens",
    "global_batch": "global_batch = 64, in sequences a step",
    "cluster.device": 'device = "h100-sxm"',
    "cluster.nodes": "nodes = 8",
    "fixed_times.forward": "forward = 1.0, in seconds",
}
"""What to write for a field that has no default, by path."""


def build(table: Table, kind: type[T]) -> T:
    """Construct a struct from builtins; raises JobError with one plain line for whatever is wrong."""
    verify(table, inspect.type_info(kind), "")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        # What a struct's own checks raise arrives wrapped.
        if isinstance(error.__cause__, JobError):
            raise error.__cause__ from None
        raise JobError(str(error).replace("$.", "")) from None


def verify(value: object, kind: inspect.Type, path: str) -> None:
    """Compare a value with its type, field by field, and raise JobError at the first difference."""
    if isinstance(kind, inspect.UnionType):
        fitting = [each for each in kind.types if _fits(value, each)]
        if not fitting:
            raise JobError(f"{path} = {shown(value)} must be {expected(kind)}")
        verify(value, fitting[0], path)
    elif not _fits(value, kind):
        raise JobError(f"{path} = {shown(value)} must be {expected(kind)}{_heading(kind, path)}")
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        _verify_struct(value, kind, path)
    elif isinstance(kind, inspect.DictType) and isinstance(value, dict):
        for key, each in value.items():
            verify(each, kind.value_type, join(path, key))
    elif isinstance(kind, inspect.VarTupleType) and isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            verify(each, kind.item_type, f"{path}[{index}]")
    elif isinstance(kind, inspect.LiteralType):
        choice(path, value, [str(word) for word in kind.values])


def _verify_struct(value: Table, kind: inspect.StructType, path: str) -> None:
    fields = {field.name: field for field in kind.fields}
    for key in value:
        if key not in fields:
            raise JobError(unknown(kind, key, path))
    for name, field in fields.items():
        if name in value:
            verify(value[name], field.type, join(path, name))
        elif field.required:
            where = join(path, name)
            example = f": write for example {_EXAMPLES[where]}" if where in _EXAMPLES else ""
            raise JobError(f"{where} is missing{example}")


def join(path: str, key: str) -> str:
    """Path of a key inside the table at `path`."""
    return f"{path}.{key}" if path else key


def struct_in(kind: inspect.Type) -> inspect.Type:
    """Pick the table of an optional one: the struct of `Struct | None`, the dict of `str | dict`."""
    if isinstance(kind, inspect.UnionType):
        tables = [each for each in kind.types if isinstance(each, (inspect.StructType, inspect.DictType))]
        return tables[0] if tables else kind
    return kind


def unknown(kind: inspect.StructType, key: str, path: str) -> str:
    """Error text for a key that a table does not have: the table, and the closest right key."""
    table = f"in [{path}]" if path else "at the top of the job"
    names = [field.name for field in kind.fields]
    near = hint(key, names)
    elsewhere = [place for place in _paths(inspect.type_info(Job)) if place.split(".")[-1] == key]
    if elsewhere and elsewhere[0] != join(path, key):
        return f'unknown key "{key}" {table}; did you mean {listed(elsewhere)}?'
    if near:
        return f'unknown key "{key}" {table}{near}'
    return f'unknown key "{key}" {table}, which takes {listed(names)}'


def _paths(kind: inspect.Type, path: str = "") -> list[str]:
    kind = struct_in(kind)
    if not isinstance(kind, inspect.StructType):
        return [path]
    inner = [place for field in kind.fields for place in _paths(field.type, join(path, field.name))]
    return [path, *inner] if path else inner


_FITS: Mapping[type[inspect.Type], tuple[type, ...]] = {
    inspect.IntType: (int,),
    inspect.FloatType: (int, float),
    inspect.BoolType: (bool,),
    inspect.StrType: (str,),
    inspect.LiteralType: (str,),
    inspect.NoneType: (type(None),),
    inspect.StructType: (dict,),
    inspect.DictType: (dict,),
    inspect.VarTupleType: (list, tuple),
}


def _fits(value: object, kind: inspect.Type) -> bool:
    if type(kind) not in _FITS:
        return True  # a table that is not built yet takes anything
    if isinstance(value, bool):
        return isinstance(kind, inspect.BoolType)
    return isinstance(value, _FITS[type(kind)])


def expected(kind: inspect.Type) -> str:
    """Say in plain words what a type takes."""
    words: Mapping[type[inspect.Type], str] = {
        inspect.IntType: "a whole number",
        inspect.FloatType: "a number",
        inspect.BoolType: "true or false",
        inspect.StrType: "a word in quotes",
        inspect.StructType: "a table",
        inspect.DictType: "a table",
    }
    if isinstance(kind, inspect.UnionType):
        return listed(expected(each) for each in kind.types if not isinstance(each, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        return listed(str(word) for word in kind.values)
    if isinstance(kind, inspect.VarTupleType):
        return "a list of tables" if _of_tables(kind) else "a list of whole numbers"
    return words[type(kind)]


def _of_tables(kind: inspect.VarTupleType) -> bool:
    return isinstance(kind.item_type, inspect.StructType)


def _heading(kind: inspect.Type, path: str) -> str:
    if isinstance(kind, inspect.StructType):
        return f": write [{path}] and its fields below"
    if isinstance(kind, inspect.VarTupleType) and _of_tables(kind):
        return f": write [[{path}]]"
    return ""
