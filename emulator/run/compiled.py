"""The levels of `maxmin`, and the ends that follow from them, in machine code: for hundreds of activities.

Every number is the one that Python's integers give: see `pairs`. `crowd.fits` says which activities have
such numbers; a pool plays others in Python. For the sake of speed, less is solved than could have changed:
`sweep` says why that is exact.

Members, claims and resources go by the rows that they have in `tables`.
"""

from __future__ import annotations

from emulator.run.maxmin import FULL
from emulator.run.pairs import compiled, ends_in, kept, minus, pop, push, quotient, sink, times
from emulator.run.tables import ALL, ASIDE, FAR, GONE, STATE, Claims, Ints, Members, Resources, Table, Users

RISING = -1
"""Target of who has not stopped yet."""
TOUCHED, FILLING, LISTED, WAITING, EVENTS = range(STATE)
"""State of a sweep: how many resources are in it, and how many in the heap by key; how many members are in
it, how many of them in the heap, and with how many resources the others wait."""


@compiled
def link(members: Members, claims: Claims, users: Users, resources: Resources, linked: int) -> bool:
    """List users anew, and count the demands of claims from `linked` on; False if those on one pass 2**62."""
    for c in range(linked, len(claims.demand)):
        r = claims.resource[c]
        resources.load[r] += claims.demand[c]
        if resources.load[r] > FULL:
            return False
    resources.last[:] = 0
    for m in range(len(members.level)):
        for c in range(members.first[m], members.last[m]):
            resources.last[claims.resource[c]] += 1
    end = 0
    for r in range(len(resources.last)):
        resources.first[r] = end
        end += resources.last[r]
        resources.last[r] = resources.first[r]
    for m in range(len(members.level)):
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            at = resources.last[r]
            users.member[at], users.demand[at] = m, claims.demand[c]
            resources.last[r] = at + 1
    return True


@compiled
def unlink(members: Members, claims: Claims, resources: Resources, gone: Ints) -> int:
    """Take members off their resources; the lowest level of them, at most ALL.

    They stay in the lists of users for now.
    """
    least = ALL
    for i in range(len(gone)):
        m = gone[i]
        least = min(least, members.level[m])
        for c in range(members.first[m], members.last[m]):
            resources.load[claims.resource[c]] -= claims.demand[c]
        members.last[m] = members.first[m]
        members.target[m] = GONE
        members.level[m] = 0
        members.end[m] = FAR
    return least


@compiled
def rise(members: Members, claims: Claims, resources: Resources, state: Ints, m: int, new: bool) -> None:
    """Let a member rise; the sweep looks at it where it stopped: at its bound, or with a resource of it."""
    members.target[m] = RISING
    members.list[state[LISTED]] = m
    state[LISTED] += 1
    if not new:
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            if not resources.touched[r]:
                resources.before[r] = resources.level[r]
            if resources.before[r] == members.level[m]:
                if resources.waiting[r] < 0:
                    state[EVENTS] = push(resources.events, state[EVENTS], r, resources.before)
                members.after[m] = resources.waiting[r]
                resources.waiting[r] = m
                return
    state[WAITING] = push(members.heap, state[WAITING], m, members.bound)


@compiled
def fill(
    members: Members, claims: Claims, users: Users, resources: Resources, state: Ints, r: int, level: int
) -> None:
    """Take a resource into the sweep, which has come to this level: its users rise unless they have stopped.

    Those who are gone are taken out of its list on the way.
    """
    resources.touched[r] = 1
    resources.list[state[TOUCHED]] = r
    state[TOUCHED] += 1
    resources.before[r] = resources.level[r]
    if resources.level[r] >= level:
        resources.level[r] = ALL
    high, low, load = resources.room[r], 0, 0
    kept = resources.first[r]
    for u in range(kept, resources.last[r]):
        m, demand = users.member[u], users.demand[u]
        at = members.target[m]
        if at == GONE:
            continue
        users.member[kept], users.demand[kept] = m, demand
        kept += 1
        if at == ASIDE:
            at = members.level[m]
            if at >= level:
                rise(members, claims, resources, state, m, False)
                at = RISING
        if at == RISING:
            load += demand
        else:
            used_high, used_low = times(demand, at)
            high, low = minus(high, low, used_high, used_low)
    resources.last[r] = kept
    resources.left_high[r], resources.left_low[r], resources.rising[r] = high, low, load
    if resources.binds[r] and load:
        resources.key[r] = quotient(high, low, load)
        resources.stale[r] = 0
        state[FILLING] = push(resources.heap, state[FILLING], r, resources.key)


@compiled
def fill_others(
    members: Members,
    claims: Claims,
    users: Users,
    resources: Resources,
    state: Ints,
    m: int,
    level: int,
    most: int,
) -> None:
    """Take other contended resources of a member into the sweep that are full at `most` at most."""
    for c in range(members.first[m], members.last[m]):
        r = claims.resource[c]
        if resources.binds[r] and not resources.touched[r] and resources.level[r] <= most:
            fill(members, claims, users, resources, state, r, level)


@compiled
def fill_up(resources: Resources, state: Ints, level: int) -> tuple[int, int]:
    """Level of the next round, at most the given one, and how many resources are full there.

    The quotient left // rising of a resource never falls, so a key that is stale is a lower bound.
    """
    key, heap, size, n = resources.key, resources.heap, state[FILLING], 0
    while size and key[heap[0]] <= level:
        r = heap[0]
        if resources.stale[r] and resources.rising[r]:
            resources.stale[r] = 0
            key[r] = quotient(resources.left_high[r], resources.left_low[r], resources.rising[r])
            sink(heap, size, 0, key)
            continue
        size = pop(heap, size, key)
        if resources.rising[r]:
            level = key[r]
            resources.level[r] = level
            resources.full[n] = r
            n += 1
    state[FILLING] = size
    return level, n


@compiled
def stays(members: Members, claims: Claims, resources: Resources, m: int, level: int) -> bool:
    """Whether this level is a member's bound, or that of a full resource of it that is not in the sweep."""
    if level == members.bound[m]:
        return True
    for c in range(members.first[m], members.last[m]):
        r = claims.resource[c]
        if resources.binds[r] and not resources.touched[r] and resources.level[r] == level:
            return True
    return False


@compiled
def halt(
    members: Members, claims: Claims, users: Users, resources: Resources, state: Ints, level: int, n: int
) -> tuple[int, int]:
    """Stop at this level who uses one of n full resources, or stays at it anyway.

    So many have stopped, and so many rise past the level that they had.
    """
    stopped, passing, count, others = members.stopped, members.passing, 0, 0
    for i in range(n):
        r = resources.full[i]
        for u in range(resources.first[r], resources.last[r]):
            m = users.member[u]
            if members.target[m] == RISING:
                members.target[m] = level
                stopped[count] = m
                count += 1
    while state[EVENTS] and resources.before[resources.events[0]] <= level:
        r = resources.events[0]
        state[EVENTS] = pop(resources.events, state[EVENTS], resources.before)
        m, resources.waiting[r] = resources.waiting[r], -1
        while m >= 0:
            if members.target[m] == RISING:
                if stays(members, claims, resources, m, level):
                    members.target[m] = level
                    stopped[count] = m
                    count += 1
                else:
                    passing[others] = m
                    others += 1
            m = members.after[m]
    while state[WAITING] and members.bound[members.heap[0]] <= level:
        m = members.heap[0]
        state[WAITING] = pop(members.heap, state[WAITING], members.bound)
        if members.target[m] == RISING:
            members.target[m] = level
            stopped[count] = m
            count += 1
    return count, others


@compiled
def stop(members: Members, claims: Claims, resources: Resources, stopped: Ints, level: int) -> None:
    """What these use at this level is no longer there for those who still rise."""
    for i in range(len(stopped)):
        for c in range(members.first[stopped[i]], members.last[stopped[i]]):
            r = claims.resource[c]
            if resources.touched[r] and resources.level[r] > level:
                high, low = times(claims.demand[c], level)
                high, low = minus(resources.left_high[r], resources.left_low[r], high, low)
                resources.left_high[r], resources.left_low[r] = high, low
                resources.rising[r] -= claims.demand[c]
                resources.stale[r] = 1


@compiled
def sweep(
    members: Members,
    claims: Claims,
    users: Users,
    resources: Resources,
    state: Ints,
    changed: Ints,
    new: int,
    same: int,
) -> int:
    """Set the targets of those whom a change can concern: so many, who are then listed.

    Members from `new` on have just joined. This is the progressive filling of `maxmin.solve`, from level
    `same` on, the lowest that what changes had or can have: levels below it are as they were. A resource is
    not in the sweep as long as all that has happened to it up to the present level has happened before: it is
    full where it was then, and whoever stopped there still does. At first only changed resources are in, and
    those of new members; others come in when a user stops lower than he did, if they were full above that,
    or rises past the level that he had.
    """
    state[:] = 0
    for m in range(new, len(members.level)):
        rise(members, claims, resources, state, m, True)
    for i in range(len(changed)):
        if not resources.touched[changed[i]]:
            fill(members, claims, users, resources, state, changed[i], same)
    for m in range(new, len(members.level)):
        fill_others(members, claims, users, resources, state, m, same, ALL)
    halted = 0
    while halted < state[LISTED]:
        level = FULL
        if state[WAITING]:
            level = members.bound[members.heap[0]]
        if state[EVENTS]:
            level = min(level, resources.before[resources.events[0]])
        level, n = fill_up(resources, state, level)
        count, others = halt(members, claims, users, resources, state, level, n)
        halted += count
        stop(members, claims, resources, members.stopped[:count], level)
        for i in range(count):
            m = members.stopped[i]
            if level < members.level[m]:
                fill_others(members, claims, users, resources, state, m, level, FULL)
        for i in range(others):
            m = members.passing[i]
            state[WAITING] = push(members.heap, state[WAITING], m, members.bound)
            fill_others(members, claims, users, resources, state, m, level, ALL)
    for i in range(state[EVENTS]):
        resources.waiting[resources.events[i]] = -1
    for i in range(state[TOUCHED]):
        resources.touched[resources.list[i]] = 0
    return int(state[LISTED])


@compiled
def move(now: int, members: Members, concerned: Ints) -> None:
    """Give members their new levels. What is left of a length changes only here."""
    for i in range(len(concerned)):
        m = concerned[i]
        before, level = members.level[m], members.target[m]
        members.target[m] = ASIDE
        if level == before:
            continue
        done_high, done_low = times(before, now - members.since[m])
        high, low = minus(members.left_high[m], members.left_low[m], done_high, done_low)
        members.left_high[m], members.left_low[m] = high, low
        members.since[m], members.level[m] = now, level
        members.end[m] = min(FAR, now + ends_in(high, low, level)) if level else FAR


@compiled
def least_share(members: Members, claims: Claims, resources: Resources, new: int, same: int) -> int:
    """The lowest level, at most `same`, at which a member from `new` on can stop.

    That is its bound, or  room // load  of a resource, as that quotient never falls while others stop.
    """
    for m in range(new, len(members.level)):
        same = min(same, members.bound[m])
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            if resources.binds[r]:
                same = min(same, quotient(resources.room[r], 0, resources.load[r]))
    return same


@kept
def settle(
    now: int,
    member_table: Table,
    lists: Table,
    claim_table: Table,
    user_table: Table,
    resource_table: Table,
    member_count: int,
    claim_count: int,
    resource_count: int,
    state: Ints,
    changed: Ints,
    gone: int,
    new: int,
    linked: int,
    same: int,
) -> tuple[int, int]:
    """Level members anew at a time: the earliest end, and how many have it, who are then listed.

    The end is -1 if the demands on a resource pass 2**62. state: room for the state of a sweep. changed:
    resources that have other users or another room or state, and after them so many members that have ended.
    new, linked: the first member and the first claim that have been added. same: levels below it are as they
    were, as far as rooms go.
    """
    m, w, c = member_table[:member_count], lists[:, :member_count], claim_table[:claim_count]
    r = resource_table[:, :resource_count]
    members = Members(
        m[:, 0], m[:, 1], m[:, 2], m[:, 3], m[:, 4], m[:, 5], m[:, 6], m[:, 7],
        w[0], w[1], w[2], w[3], w[4], w[5],
    )  # fmt: skip
    claims, users = Claims(c[:, 0], c[:, 1]), Users(user_table[0], user_table[1])
    resources = Resources(
        r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15],
        r[16], r[17],
    )  # fmt: skip
    ended = len(changed) - gone
    same = min(same, unlink(members, claims, resources, changed[ended:]))
    if linked < claim_count and not link(members, claims, users, resources, linked):
        return -1, 0
    same = least_share(members, claims, resources, new, same)
    count = sweep(members, claims, users, resources, state, changed[:ended], new, same)
    move(now, members, members.list[:count])
    earliest, count = FAR, 0
    for one in range(member_count):
        if members.end[one] <= earliest:
            if members.end[one] < earliest:
                earliest, count = members.end[one], 0
            members.list[count] = one
            count += 1
    return earliest, count
