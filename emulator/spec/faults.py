"""What is wrong with a part of the cluster: who, how, and from when to when."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from emulator.spec.checks import choice, finite, whole
from emulator.spec.errors import JobError, NotAvailableYetError

KINDS = ("gpu", "hbm", "nvlink", "nic", "link", "switch", "node", "straggler", "loader", "software", "sdc")

SLOW = ("straggler", "nic")
"""Kinds that only make a part slower: a device's clock, a NIC's rate."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault. Without `at`, `step` and `duration` it is there from the beginning to the end."""

    kind: str
    rank: int = 0
    factor: float | None = None
    """What is left of the speed, for what slows: more than 0, less than 1."""
    at: str | None = None
    step: int | None = None
    duration: str | None = None

    def __post_init__(self) -> None:
        """Check the words and ranges; raises JobError."""
        choice("faults.kind", self.kind, KINDS)
        whole("faults.rank", self.rank, least=0)
        if self.factor is not None:
            finite("faults.factor", self.factor, positive=True)
            if not 0.001 <= self.factor < 1:
                raise JobError(
                    f"faults.factor = {self.factor:g} must be at least 0.001 and less than 1: "
                    "what is left of the speed"
                )
        if self.kind in SLOW and self.factor is None:
            raise JobError(f'faults: kind = "{self.kind}" needs a factor, such as factor = 0.8')

    def refuse_what_is_not_built(self) -> None:
        """Raise NotAvailableYetError unless it only slows a part, from the beginning to the end."""
        if self.kind not in SLOW:
            raise NotAvailableYetError(f'[[faults]] with kind = "{self.kind}"')
        for name in ("at", "step", "duration"):
            if getattr(self, name) is not None:
                raise NotAvailableYetError(f"[[faults]] with {name} (without it the whole run is slow)")

    @property
    def left(self) -> Fraction:
        """What is left of the speed, as the decimal that the user wrote."""
        return Fraction(repr(self.factor))


def left_of(faults: tuple[Fault, ...], kind: str) -> dict[int, Fraction]:
    """Rank -> what is left of the speed of the part that this kind of fault slows; without sound ranks."""
    left: dict[int, Fraction] = {}
    for fault in faults:
        if fault.kind == kind:
            left[fault.rank] = left.get(fault.rank, Fraction(1)) * fault.left
    return left
