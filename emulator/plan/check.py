"""What must hold of a Program before it is run, checked without a clock.

Within a template: no op waits for itself by any path, and every buffer is allocated once, used only between
its allocation and its release, and freed once. "Before" is the order that streams and waits enforce, not the
order in which the host issues: an op knows of each stream how far it has certainly come (a vector clock).
Across templates: both ends of every transfer agree, every member of a group takes part in the same
collectives in the same order, and no chain of streams, waits, transfers and collectives closes on itself.
All is done per template and pair of templates, never per rank, so a Program of thousands of ranks costs what
its templates cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from emulator.plan.program import Collective, Op, Program, Template, Transfer


class ProgramError(Exception):
    """A Program that cannot be run as it is written; the planner's mistake, never the user's."""


def check(program: Program) -> None:
    """Raise ProgramError, naming the ops, unless the Program can be run."""
    orders = [_order(template) for template in program.templates]
    for template, order in zip(program.templates, orders, strict=True):
        _check_buffers(template, order)
    _check_names(program)
    together = [*_check_transfers(program), *_check_collectives(program)]
    _check_joint_order(program, together)


Node = tuple[int, int]
"""(template, op)."""


def _predecessors(template: Template) -> list[list[int]]:
    """For each op, the op before it on its stream and those it waits for."""
    waits = template.body.waits.rows()
    for index, these in enumerate(waits):
        for wait in these:
            if not 0 <= wait < len(template) or wait == index:
                name = template.op_name(index)
                raise ProgramError(f"{template.name}: {name} waits for op {wait}, which cannot be")
    before = template.body.predecessors().tolist()
    return [[last, *these] if last >= 0 else [*these] for last, these in zip(before, waits, strict=True)]


def _order(template: Template) -> list[int]:
    """Order the ops so that each comes after all that it waits for."""
    before = _predecessors(template)
    order = _topological(len(before), before)
    if len(order) < len(before):
        names = [template.ops[i].name for i in _cycle(before, set(range(len(before))) - set(order))]
        raise ProgramError(f"{template.name}: these ops wait for each other: {' -> '.join(names)}")
    return order


def _topological(count: int, before: list[list[int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(count)]
    missing = [len(each) for each in before]
    for node, each in enumerate(before):
        for earlier in each:
            after[earlier].append(node)
    order = [node for node in range(count) if not missing[node]]
    for node in order:  # grows while it is read
        for later in after[node]:
            missing[later] -= 1
            if not missing[later]:
                order.append(later)
    return order


def _cycle(before: list[list[int]], left: set[int]) -> list[int]:
    """Find a cycle among the nodes that no order could place; its first node is repeated at the end."""
    node, path, seen = min(left), list[int](), dict[int, int]()
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next(earlier for earlier in before[node] if earlier in left)
    return [*path[seen[node] :], node]


def _check_buffers(template: Template, order: list[int]) -> None:
    streams = {name: i for i, name in enumerate(template.streams)}
    position: list[int] = []
    count = [0] * len(streams)
    stream_of = [streams[op.stream] for op in template.ops]
    for stream in stream_of:
        count[stream] += 1
        position.append(count[stream])
    known = _clocks(template, order, stream_of, position)
    touched: dict[int, list[int]] = defaultdict(list)
    born: dict[int, int] = {}
    dead: dict[int, int] = {}
    for index, op in enumerate(template.ops):
        _record(template, op, index, born, op.allocates, "allocated")
        _record(template, op, index, dead, op.frees, "freed")
        for buffer in (*op.allocates, *op.uses, *op.frees):
            touched[buffer].append(index)
    for buffer, ops in touched.items():
        what = f"{template.name}: buffer {template.buffers[buffer].name}"
        if template.buffers[buffer].persistent:
            continue
        if buffer not in born:
            raise ProgramError(f"{what} is used by {template.ops[ops[0]].name} but never allocated")
        if buffer not in dead:
            raise ProgramError(f"{what} is allocated by {template.ops[born[buffer]].name} but never freed")
        first, last = born[buffer], dead[buffer]
        maker, freer = template.ops[first].name, template.ops[last].name
        for index in ops:
            if index != first and known[index][stream_of[first]] < position[first]:
                user = template.ops[index].name
                raise ProgramError(f"{what}: {user} may use it before {maker} allocates it")
        for index in ops:
            if index != last and known[last][stream_of[index]] < position[index]:
                user = template.ops[index].name
                raise ProgramError(f"{what}: {user} may use it after {freer} has freed it")


def _record(
    template: Template, op: Op, index: int, where: dict[int, int], buffers: Iterable[int], what: str
) -> None:
    for buffer in buffers:
        name = template.buffers[buffer].name
        if template.buffers[buffer].persistent:
            raise ProgramError(f"{template.name}: persistent buffer {name} is {what} by {op.name}")
        if buffer in where:
            earlier = template.ops[where[buffer]].name
            raise ProgramError(f"{template.name}: buffer {name} is {what} twice, by {earlier} and {op.name}")
        where[buffer] = index


def _clocks(
    template: Template, order: list[int], stream_of: list[int], position: list[int]
) -> list[tuple[int, ...]]:
    """For each op, how many ops of each stream have certainly ended when it begins."""
    before = _predecessors(template)
    nothing = (0,) * len(template.streams)
    known = [nothing] * len(order)
    # An op's clock once it has ended, so that each of its successors merges one tuple.
    ended = [nothing] * len(order)
    for index in order:
        earlier = before[index]
        if len(earlier) == 1:
            clock = ended[earlier[0]]
        elif earlier:
            clock = tuple(map(max, *(ended[e] for e in earlier)))
        else:
            clock = nothing
        known[index] = clock
        at = stream_of[index]
        ended[index] = (*clock[:at], position[index], *clock[at + 1 :])
    return known


def _check_names(program: Program) -> None:
    """Raise unless each class binds every group and peer that its template names."""
    ranks = [rank for c in program.classes for rank in c.members]
    if sorted(ranks) != list(range(len(ranks))):
        raise ProgramError(
            f"classes: the {len(ranks)} members are not ranks 0 to {len(ranks) - 1}, once each"
        )
    needs = []
    for template in program.templates:
        works = [op.work for op in template.ops]
        needs.append(
            (
                {w.group for w in works if isinstance(w, Collective)},
                {w.peer for w in works if isinstance(w, Transfer)},
            )
        )
    for rank_class in program.classes:
        groups, peers = needs[rank_class.template]
        who = f"rank {rank_class.members[0]} ({program.templates[rank_class.template].name})"
        for group in sorted(groups):
            if group not in rank_class.groups:
                raise ProgramError(f"{who} has no group named {group}")
            absent = set(rank_class.members) - set(program.groups[rank_class.groups[group]].ranks)
            if len(absent) == len(rank_class.members):
                raise ProgramError(f"{who} is not in its group {group}")
        for peer in sorted(peers):
            if peer not in rank_class.peers:
                raise ProgramError(f"{who} has no peer named {peer}")


Joined = tuple[Node, ...]
"""Ops that happen at one meeting: both ends of a transfer, all parts of a collective."""


def _check_transfers(program: Program) -> list[Joined]:
    """Match sends with receives, class by class; returns the pairs, each pair of templates once.

    Several names of a class may lead to one other class, as in a ring of two: what goes between two classes
    is told apart by its tag alone.
    """
    ends = [_ends(template) for template in program.templates]
    class_of = {rank: i for i, c in enumerate(program.classes) for rank in c.members}
    seen: set[Hashable] = set()
    pairs: list[Joined] = []
    for i, rank_class in enumerate(program.classes):
        rank = rank_class.members[0]
        to: dict[int, list[str]] = defaultdict(list)
        for name in ends[rank_class.template]:
            other = rank_class.peers[name]
            if other not in class_of:
                raise ProgramError(f"rank {rank}: its peer {name} is rank {other}, which is in no class")
            if other == rank:
                raise ProgramError(f"rank {rank}: its peer {name} is itself, and nobody sends to himself")
            to[class_of[other]].append(name)
        for c, names in to.items():
            other_class = program.classes[c]
            there = other_class.template
            back = [name for name in ends[there] if class_of.get(other_class.peers[name]) == i]
            key = (rank_class.template, *names, there, *back)
            if key not in seen:
                seen.add(key)
                mine = _Side(program.templates[rank_class.template], names, ends[rank_class.template])
                theirs = _Side(program.templates[there], back, ends[there])
                pairs += _match(rank, (rank_class.template, there), mine, theirs)
    return pairs


_Ends = dict[str, dict[str, list[int]]]
"""Per peer name and kind, indices of transfer ops in issue order."""


def _ends(template: Template) -> _Ends:
    out: _Ends = {}
    for index, op in enumerate(template.ops):
        if isinstance(op.work, Transfer):
            out.setdefault(op.work.peer, {"send": [], "recv": []})[op.work.kind].append(index)
    return out


class _Side(NamedTuple):
    """What one of two classes exchanges with the other."""

    template: Template
    names: list[str]
    """Its names for the other."""
    ends: _Ends

    def tags(self, kind: str) -> dict[str, int]:
        """Ops of a kind by tag."""
        return _tags(self.template, sorted(i for name in self.names for i in self.ends[name][kind]))


def _match(rank: int, templates: tuple[int, int], mine: _Side, theirs: _Side) -> list[Joined]:
    pairs: list[Joined] = []
    a, b = mine.template, theirs.template
    for kind, mirror in (("send", "recv"), ("recv", "send")):
        tags, other_tags = mine.tags(kind), theirs.tags(mirror)
        for tag in [*tags, *other_tags]:
            if tag not in other_tags:
                op = a.ops[tags[tag]]
                assert isinstance(op.work, Transfer)
                peer = op.work.peer
                raise ProgramError(
                    f"rank {rank}: {op.name} has no {mirror} with tag {tag} on its peer {peer}"
                )
            if tag not in tags:
                name = b.ops[other_tags[tag]].name
                raise ProgramError(f"{b.name}: {name} has no {kind} with tag {tag} on rank {rank}")
            one, two = a.ops[tags[tag]], b.ops[other_tags[tag]]
            assert isinstance(one.work, Transfer)
            assert isinstance(two.work, Transfer)
            if (one.work.bytes, one.work.duration_ps) != (two.work.bytes, two.work.duration_ps):
                raise ProgramError(
                    f"{one.name} and {two.name} (tag {tag}) differ: {one.work.bytes} and {two.work.bytes} "
                    f"bytes, fixed times {one.work.duration_ps} and {two.work.duration_ps}"
                )
            if kind == "send":
                pairs.append(((templates[0], tags[tag]), (templates[1], other_tags[tag])))
    return pairs


def _tags(template: Template, indices: list[int]) -> dict[str, int]:
    out: dict[str, int] = {}
    for index in indices:
        op = template.ops[index]
        assert isinstance(op.work, Transfer)
        if op.work.tag in out:
            earlier = template.ops[out[op.work.tag]].name
            raise ProgramError(f"{template.name}: {earlier} and {op.name} have the same tag {op.work.tag}")
        out[op.work.tag] = index
    return out


def _check_collectives(program: Program) -> list[Joined]:
    """Compare what the members of each group do; returns the k-th ops of all of them, joined."""
    parts: list[dict[str, list[int]]] = []
    for template in program.templates:
        by_group: dict[str, list[int]] = defaultdict(list)
        for index, op in enumerate(template.ops):
            if isinstance(op.work, Collective):
                by_group[op.work.group].append(index)
        parts.append(dict(by_group))
    members: dict[int, set[tuple[int, str]]] = defaultdict(set)
    present: dict[int, set[int]] = defaultdict(set)
    # Members of a class may sit in different groups: each rank's own seat says in which.
    for seat in (program.seat(rank) for rank in range(program.ranks)):
        for name in parts[seat.template]:
            group = seat.groups[name]
            members[group].add((seat.template, name))
            present[group].update(seat.members)
    joined: dict[tuple[tuple[int, str], ...], None] = {}
    for group, who in members.items():
        absent = sorted(set(program.groups[group].ranks) - present[group])
        if absent:
            raise ProgramError(
                f"group {group} ({program.groups[group].axis}): rank {absent[0]} takes no part in it"
            )
        joined[tuple(sorted(who))] = None
    return [meeting for who in joined for meeting in _join(program, who, parts)]


def _join(
    program: Program, who: tuple[tuple[int, str], ...], parts: list[dict[str, list[int]]]
) -> Iterable[Joined]:
    (first, name), *others = who
    lead = parts[first][name]
    for template, other_name in others:
        mine = parts[template][other_name]
        for k in range(max(len(lead), len(mine))):
            one = program.templates[first].ops[lead[k]] if k < len(lead) else None
            two = program.templates[template].ops[mine[k]] if k < len(mine) else None
            if _part(one) != _part(two):
                raise ProgramError(
                    f"group {name}, collective {k}: {program.templates[first].name} does {_say(one)}, "
                    f"but {program.templates[template].name} does {_say(two)}"
                )
    for k in range(len(lead)):
        yield tuple((template, parts[template][other][k]) for template, other in who)


def _part(op: Op | None) -> tuple[str, int, int] | None:
    if op is None:
        return None
    assert isinstance(op.work, Collective)
    return op.work.kind, op.work.bytes, op.work.root


def _say(op: Op | None) -> str:
    if op is None:
        return "nothing"
    assert isinstance(op.work, Collective)
    return f"{op.name} ({op.work.kind} of {op.work.bytes} bytes, root {op.work.root})"


def _check_joint_order(program: Program, together: list[Joined]) -> None:
    """Raise when streams, waits and meetings form a cycle, so that the ranks would wait for each other.

    Templates stand for their ranks: no cycle among templates means none among ranks.
    """
    offsets = [0]
    for template in program.templates:
        offsets.append(offsets[-1] + len(template.ops))
    total = offsets[-1]
    leader = list(range(total))

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for meeting in together:
        nodes = [offsets[template] + index for template, index in meeting]
        for node in nodes[1:]:
            leader[find(node)] = find(nodes[0])
    leaders = [find(node) for node in range(total)]
    before: list[list[int]] = [[] for _ in range(total)]
    for t, template in enumerate(program.templates):
        for index, earlier in enumerate(_predecessors(template)):
            before[leaders[offsets[t] + index]] += [leaders[offsets[t] + e] for e in earlier]
    order = _topological(total, before)
    if len(order) < total:
        names = [_op_at(program, offsets, node) for node in _cycle(before, set(range(total)) - set(order))]
        raise ProgramError(f"the ranks would wait for each other: {' -> '.join(names)}")


def _op_at(program: Program, offsets: list[int], node: int) -> str:
    t = next(t for t in range(len(offsets) - 1) if offsets[t + 1] > node)
    return f"{program.templates[t].name}: {program.templates[t].ops[node - offsets[t]].name}"
