"""Units: SI everywhere; the clock alone counts integer picoseconds."""

from fractions import Fraction

KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
KIB, MIB, GIB, TIB, PIB = 2**10, 2**20, 2**30, 2**40, 2**50

PS_PER_SECOND = 10**12

BYTES_PER_ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of one stored element by precision; tf32 is a rounding inside the tensor core of fp32 data."""


def to_ps(seconds: float) -> int:
    """Nearest picosecond to a time in seconds (exact for the decimal the user wrote)."""
    return round(Fraction(repr(float(seconds))) * PS_PER_SECOND)


def to_seconds(ps: int) -> float:
    """Seconds of a time in picoseconds."""
    return ps / PS_PER_SECOND


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun: 1 rank, 64 ranks, 2 classes."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
