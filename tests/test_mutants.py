"""Mutants of folding: each leaves out one thing that exactness needs, and the random programs tell.

The partition's own check is turned off, so that what is found is found by playing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from directed_programs import directed_programs
from random_programs import random_program
from test_folding import assert_plays_the_same, test_the_order_in_a_ring_does_not_leak_into_the_classes

from emulator.plan import folding, loads
from emulator.plan.folding import _Graph
from emulator.plan.loads import GroupLoads
from emulator.plan.program import Program
from emulator.plan.refine import Column, Crowd
from emulator.run import network
from emulator.run.errors import DeadlockError
from emulator.spec.fabric import Fabric

SEEDS = range(200, 320)

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def one_member_loads_for_all(patch: Patch) -> None:
    original = network._together

    def together(parts: list[Any], *rest: Any) -> Any:
        return original([parts[0]._replace(members=parts[0].members[:1])], *rest)

    patch.setattr(network, "_together", together)


@mutant
def a_class_does_not_contend_with_itself(patch: Patch) -> None:
    """On each link the most that one member puts there, not the sum."""

    def most(links: Any, demands: Any) -> Any:
        found: dict[int, int] = {}
        for link, demand in zip(links.tolist(), demands.tolist(), strict=True):
            found[link] = max(found.get(link, 0), demand)
        return tuple(sorted(found.items()))

    patch.setattr(network, "_summed", most)


@mutant
def stage_dropped(patch: Patch) -> None:
    original = _Graph._rank_beginning

    def beginning(graph: _Graph) -> Any:
        seats = graph.seats
        graph.seats = msgspec.structs.replace(seats, template=np.zeros_like(seats.template))
        begun = original(graph)
        graph.seats = seats
        return begun

    patch.setattr(_Graph, "_rank_beginning", beginning)


def unknown(patch: Patch, fault: str) -> None:
    original = folding.left_of
    patch.setattr(folding, "left_of", lambda faults, kind: {} if kind == fault else original(faults, kind))


@mutant
def speed_dropped(patch: Patch) -> None:
    unknown(patch, "straggler")


@mutant
def degraded_nic_dropped(patch: Patch) -> None:
    unknown(patch, "nic")


@mutant
def what_is_put_on_a_link_dropped(patch: Patch) -> None:
    original = GroupLoads._what
    patch.setattr(GroupLoads, "_what", lambda *args: np.minimum(original(*args), 0))


@mutant
def loads_are_those_of_another_algorithm(patch: Patch) -> None:
    original = loads.choose
    patch.setattr(
        loads, "choose", lambda kind, shape, size, _, *rest: original(kind, shape, size, "ring", *rest)
    )


@mutant
def way_of_a_transfer_dropped(patch: Patch) -> None:
    """Transfers begin alike, and see no links, whether they leave the node or not."""
    original = folding.edges
    neighbours_changed(patch, "edges", lambda _graph, each: each[:2])
    patch.setattr(
        folding, "edges", lambda *args: (e := original(*args))._replace(level=np.zeros_like(e.level))
    )


def neighbours_changed(
    patch: Patch, family: str, change: Callable[[_Graph, list[Column | Crowd]], list[Column | Crowd]]
) -> None:
    name = f"_next_to_{family}"
    original = getattr(_Graph, name)
    patch.setattr(_Graph, name, lambda graph: change(graph, original(graph)))


@mutant
def groups_do_not_see_links(patch: Patch) -> None:
    neighbours_changed(patch, "groups", lambda _graph, each: each[:-1])


@mutant
def groups_do_not_see_members(patch: Patch) -> None:
    neighbours_changed(patch, "groups", lambda _graph, each: each[-1:])


@mutant
def transfers_do_not_see_links(patch: Patch) -> None:
    neighbours_changed(patch, "edges", lambda _graph, each: each[:2])


@mutant
def links_see_nobody(patch: Patch) -> None:
    neighbours_changed(patch, "links", lambda _graph, _each: [])


@mutant
def links_see_no_groups(patch: Patch) -> None:
    neighbours_changed(patch, "links", lambda graph, each: [e for e in each if e.theirs is graph.edges])


@mutant
def links_see_no_transfers(patch: Patch) -> None:
    neighbours_changed(patch, "links", lambda graph, each: [e for e in each if e.theirs is graph.groups])


@mutant
def ranks_do_not_see_groups(patch: Patch) -> None:
    neighbours_changed(patch, "ranks", lambda graph, each: [e for e in each if e.theirs is not graph.groups])


@mutant
def ranks_do_not_see_transfers(patch: Patch) -> None:
    neighbours_changed(patch, "ranks", lambda graph, each: [e for e in each if e.theirs is graph.groups])


@mutant
def crowds_are_not_counted(patch: Patch) -> None:
    """Who is in a crowd twice counts once."""
    original = Crowd._rows

    def rows(crowd: Crowd, colours: Any) -> Any:
        return tuple(np.unique(np.stack(original(crowd, colours)), axis=1))

    patch.setattr(Crowd, "_rows", rows)


@mutant
def only_one_of_several_senders_is_seen(patch: Patch) -> None:
    original = loads.lanes
    patch.setattr(loads, "lanes", lambda *args: original(*args)[:1])


@mutant
def placement_of_groups_dropped(patch: Patch) -> None:
    """Groups begin alike, whatever nodes they lie on."""
    original = GroupLoads.__init__

    def init(self: GroupLoads, *rest: Any) -> None:
        original(self, *rest)
        self.beginning = np.zeros_like(self.beginning)

    patch.setattr(GroupLoads, "__init__", init)


@mutant
def one_round(patch: Patch) -> None:
    patch.setattr(folding, "refine", lambda families: [family.refine() for family in families])


@mutant
def no_switch_link_binds(patch: Patch) -> None:
    patch.setattr(folding, "may_bind", lambda _ranks, _fabric: [0, 1, 2, 3])


@mutant
def uplinks_never_bind(patch: Patch) -> None:
    original = folding.may_bind
    patch.setattr(folding, "may_bind", lambda *args: [kind for kind in original(*args) if kind not in (4, 6)])


@mutant
def the_last_pod_never_binds(patch: Patch) -> None:
    """Nor does the last leaf."""
    put, way = GroupLoads.loads, folding.routes

    def last(fabric: Fabric) -> list[int]:
        links = []
        for end, switches in ((len(fabric), fabric.pods), (fabric.first_pod_link, fabric.leaves)):
            links += [end - 2, end - 1] if switches > 1 else []
        return links

    def onto(self: GroupLoads, kinds: Any) -> Any:
        found = put(self, kinds)
        kept = ~np.isin(found.link, last(self.fabric))
        return type(found)(*(column[kept] for column in found))

    def routes(of: Any, kinds: Any, fabric: Fabric) -> Any:
        return [np.where(np.isin(link, last(fabric)), -1, link) for link in way(of, kinds, fabric)]

    patch.setattr(GroupLoads, "loads", onto)
    patch.setattr(folding, "routes", routes)


def changed(patch: Patch, change: Callable[[Program], Program]) -> None:
    original = folding.fold
    patch.setattr(folding, "fold", lambda program: change(original(program)))


@mutant
def bound_as_another_class(patch: Patch) -> None:
    """A class with the groups and peers of another one that does the same: the wrong representative."""

    def change(program: Program) -> Program:
        classes = []
        for c in program.classes:
            other = next((d for d in program.classes if d.template == c.template and d is not c), c)
            classes.append(msgspec.structs.replace(c, groups=other.groups, peers=other.peers))
        return msgspec.structs.replace(program, classes=tuple(classes))

    changed(patch, change)


@mutant
def one_link_of_a_kind_represents_all(patch: Patch) -> None:
    original = _Graph.link_classes

    def merged(graph: _Graph) -> Any:
        links, first = original(graph)
        kinds = graph.fabric.kinds()[links]
        return links, np.array([first[kinds == kind].min() for kind in kinds], dtype=np.int64)

    patch.setattr(_Graph, "link_classes", merged)


@mutant
def group_classes_merged(patch: Patch) -> None:
    def change(program: Program) -> Program:
        first: dict[object, int] = {}
        merged = (first.setdefault((g.axis, len(g.ranks)), i) for i, g in enumerate(program.groups))
        assert program.folding
        wrong = msgspec.structs.replace(program.folding, group_class=np.array(list(merged)))
        return msgspec.structs.replace(program, folding=wrong)

    changed(patch, change)


def play(patch: Patch) -> None:
    patch.setattr(_Graph, "_equitable", lambda _graph: True)
    for program in (*directed_programs(), *map(random_program, SEEDS)):
        assert_plays_the_same(program, folding.fold(program))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: Patch) -> None:
    """By another time, a broken rule or a deadlock."""
    MUTANTS[name](monkeypatch)
    with pytest.raises((AssertionError, DeadlockError)):
        play(monkeypatch)


def test_what_is_not_mutated_survives(monkeypatch: Patch) -> None:
    """The control: nothing left out but the partition's own check."""
    play(monkeypatch)


def test_a_ring_whose_order_leaks_is_caught(monkeypatch: Patch) -> None:
    """Ranks that begin with their place in the ring: exact, and of no use."""
    original = _Graph.__init__

    def leaking(graph: _Graph, *rest: Any) -> None:
        original(graph, *rest)
        graph.ranks.begin_with(np.arange(len(graph.seats)))

    monkeypatch.setattr(_Graph, "__init__", leaking)
    with pytest.raises(AssertionError):
        test_the_order_in_a_ring_does_not_leak_into_the_classes()
