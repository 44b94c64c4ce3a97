"""Attributes of a program's ops as arrays: what the filters of a trace look up.

All comes from the columns of the templates' bodies, each body once, however many stages share it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import Formatter

import numpy as np

from emulator.plan.body import Body, Template
from emulator.plan.op import PHASES
from emulator.plan.program import Collective, Fixed, HostCopy, Kernel, Load, Program, Transfer, Work
from emulator.spec.arrays import Bool, Int64


def kind_of(work: Work) -> str:
    """Name what an op does: a kernel's or collective's kind, send, recv, copy, load, fixed or join."""
    match work:
        case Kernel() | Collective() | Transfer():
            return work.kind
        case Fixed():
            return "fixed"
        case HostCopy():
            return "copy"
        case Load():
            return "load"
        case None:
            return "join"


def axis_of(work: Work) -> str:
    """Return the mesh axis of a collective or transfer; "" for anything else."""
    return work.axis if isinstance(work, Collective | Transfer) else ""


def bodies(program: Program) -> tuple[Body, ...]:
    """Bodies of a program's templates, each once."""
    return tuple(dict.fromkeys(template.body for template in program.templates))


def on_stream(body: Body, stream: str) -> Bool:
    """Mark the ops of one stream."""
    marks: Bool = body.stream == _place(body.streams, stream)
    return marks


def in_phase(body: Body, phases: str) -> Bool:
    """Mark the ops of any of these phases, a letter each."""
    marks: Bool = np.array([phase in phases for phase in PHASES])[body.phase]
    return marks


def kernels(body: Body) -> Bool:
    """Mark the ops that run a kernel of the model."""
    return body.of_work(isinstance(work, Kernel | Fixed) for work in body.works)


class OpIndex:
    """Attributes of all ops of all templates of a program: what filters look up.

    Op i of template t stands at `offset[t] + i`.
    """

    def __init__(self, program: Program) -> None:
        self._templates = program.templates
        self._bodies = {body: _BodyIndex(body) for body in bodies(program)}
        self.offset: Int64 = np.cumsum([0, *map(len, program.templates)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.offset[-1])

    def matches(self, attribute: str, value: str | int) -> Bool:
        """Tell for every op whether an attribute that `Trace.where` knows (but step) has this value."""
        match attribute, value:
            case "name", str():
                return self._joined(lambda t: self._bodies[t.body].named(t, value))
            case "stage", _:
                return self._joined(lambda t: np.full(len(t), t.stage == value))
            case "layer", _:
                return self._joined(lambda t: t.layer == value)
        found = {body: index.matches(attribute, value) for body, index in self._bodies.items()}
        return self._joined(lambda t: found[t.body])

    def of_work(self, test: Callable[[Work], bool]) -> Bool:
        """Tell for every op whether its work passes a test, which is asked once for each distinct work."""
        found = {body: body.of_work(map(test, body.works)) for body in self._bodies}
        return self._joined(lambda t: found[t.body])

    def _joined(self, part: Callable[[Template], Bool]) -> Bool:
        none = np.zeros(0, dtype=np.bool_)
        return np.concatenate([none, *map(part, self._templates)])


class _BodyIndex:
    """What is looked up in one body, whoever has it."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.names: tuple[dict[str, int], list[tuple[re.Pattern[str], int]]] | None = None

    def matches(self, attribute: str, value: str | int) -> Bool:
        body = self.body
        match attribute:
            case "microbatch":
                return np.equal(body.microbatch, value)
            case "stream":
                return on_stream(body, str(value))
            case "phase":
                return np.equal(body.phase, _place(PHASES, str(value)))
            case "kind":
                return body.of_work(kind_of(work) == value for work in body.works)
            case "axis":
                return body.of_work(axis_of(work) == value for work in body.works)
        raise KeyError(attribute)

    def named(self, template: Template, value: str) -> Bool:
        """Ops of this name: only those are written out whose pattern could give it."""
        if self.names is None:
            self.names = _patterns(self.body.names)
        plain, patterns = self.names
        marks = np.zeros(len(self.body.names), dtype=np.bool_)
        marks[[number for pattern, number in patterns if pattern.fullmatch(value)]] = True
        if value in plain:
            marks[plain[value]] = True
        found = marks[self.body.name]
        for i in np.flatnonzero(found).tolist():
            found[i] = template.op_name(i) == value
        return found


def _place(words: Sequence[str], word: str) -> int:
    return words.index(word) if word in words else -1


def _patterns(names: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[re.Pattern[str], int]]]:
    """Names without places by their text; the others as expressions with any number in each place."""
    plain: dict[str, int] = {}
    patterns = []
    for number, name in enumerate(names):
        parts = list(Formatter().parse(name))
        if all(place is None for _, place, _, _ in parts):
            plain["".join(text for text, *_ in parts)] = number
        else:
            places = (re.escape(text) + ("" if place is None else r"-?\d+") for text, place, _, _ in parts)
            patterns.append((re.compile("".join(places)), number))
    return plain, patterns
