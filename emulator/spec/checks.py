"""Small checks that raise JobError with the field, the value and what would be right."""

import difflib
import math
from collections.abc import Collection, Iterable

from emulator.spec.errors import JobError


def shown(value: object) -> str:
    """Write a value as a job file does: strings in quotes, true and false in lower case."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {shown(each)}" for key, each in value.items()) + "}"
    return str(value)


def listed(words: Iterable[str]) -> str:
    """Join words as `a, b or c`."""
    each = list(words)
    return each[0] if len(each) == 1 else ", ".join(each[:-1]) + " or " + each[-1]


def hint(word: str, words: Collection[str]) -> str:
    """`; did you mean x?` with the closest of the words, or nothing when none is close."""
    near = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


LARGEST_WHOLE = 2**50
"""Bound of every count: a PiB where it counts bytes, beyond any model or cluster elsewhere."""

LARGEST_NUMBER = 1e24
"""Bound of every rate and time: a million exaFLOP/s; products of two stay well inside a float."""


def whole(field: str, value: object, least: int = 1, most: int = LARGEST_WHOLE) -> None:
    """Demand an integer within `least` and `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise JobError(f"{field} = {shown(value)} must be a whole number of at least {least}")
    if value < least:
        raise JobError(f"{field} = {value} must be at least {least}")
    if value > most:
        raise JobError(f"{field} = {value} must be at most {most}")


def finite(field: str, value: object, *, positive: bool = False) -> None:
    """Demand a finite number, at least zero or above it."""
    bound = "above 0" if positive else "of at least 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise JobError(f"{field} = {shown(value)} must be a finite number {bound}")
    if value < 0 or (positive and value == 0):
        raise JobError(f"{field} = {shown(value)} must be a finite number {bound}")
    if value > LARGEST_NUMBER:
        raise JobError(f"{field} = {shown(value)} must be at most {LARGEST_NUMBER:g}")


def flag(field: str, value: object) -> None:
    """Demand true or false."""
    if not isinstance(value, bool):
        raise JobError(f"{field} = {shown(value)} must be true or false")


def choice(field: str, value: object, words: Collection[str]) -> None:
    """Demand one of the words."""
    if not isinstance(value, str) or value not in words:
        near = hint(value, words) if isinstance(value, str) else ""
        raise JobError(f"{field} = {shown(value)} must be {listed(words)}{near}")
