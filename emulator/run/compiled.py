"""The levels of `maxmin`, and the ends that follow from them, in machine code: for hundreds of activities.

Every number is the one that Python's integers give: see `pairs`. `crowd.fits` says which activities have
such numbers; a pool plays others in Python. For the sake of speed, less is solved than could have changed:
`level_anew` says why that is exact.

Members, claims and resources go by the rows that they have in the tables of `crowd`.
"""

from __future__ import annotations

from emulator.run.crowd import ALL, FAR, Claims, Ints, Members, Resources, Table
from emulator.run.maxmin import FULL
from emulator.run.pairs import compiled, ends_in, heapify, kept, minus, plus, pop, quotient, sink, times

RISING = -1
"""Target of who has not stopped yet."""


@compiled
def link(members: Members, claims: Claims, resources: Resources, linked: int) -> bool:
    """Put claims from `linked` on on their resources; False if the demands on one pass 2**62."""
    for c in range(linked, len(claims.member)):
        r = claims.resource[c]
        claims.after[c] = resources.head[r]
        resources.head[r] = c
        resources.load[r] += claims.demand[c]
        if resources.load[r] > FULL:
            return False
        high, low = times(claims.demand[c], members.level[claims.member[c]])
        high, low = plus(resources.used_high[r], resources.used_low[r], high, low)
        resources.used_high[r], resources.used_low[r] = high, low
    return True


@compiled
def unlink(members: Members, claims: Claims, resources: Resources, gone: Ints) -> int:
    """Take members off their resources; the lowest level of them, at most ALL.

    Their claims stay in the lists for now.
    """
    least = ALL
    for i in range(len(gone)):
        m = gone[i]
        least = min(least, members.level[m])
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            high, low = times(claims.demand[c], members.level[m])
            high, low = minus(resources.used_high[r], resources.used_low[r], high, low)
            resources.used_high[r], resources.used_low[r] = high, low
            resources.load[r] -= claims.demand[c]
        members.last[m] = members.first[m]
        members.level[m] = 0
        members.end[m] = FAR
    return least


@compiled
def touch(
    members: Members, claims: Claims, resources: Resources, rising: Ints, new: int, touched: Ints, n: int
) -> int:
    """Add the contended resources of those who are new, or get another level, to the n touched ones.

    Returns how many there are then.
    """
    for i in range(len(rising)):
        m = rising[i]
        if m >= new or members.target[m] != members.level[m]:
            for c in range(members.first[m], members.last[m]):
                r = claims.resource[c]
                if resources.binds[r] and not resources.touched[r]:
                    resources.touched[r] = 1
                    touched[n] = r
                    n += 1
    return n


@compiled
def gather(
    members: Members, claims: Claims, resources: Resources, same: int, touched: Ints, rising: Ints, n: int
) -> int:
    """Let those rise who use a touched resource, and stop no lower than `same`: after the n that do already.

    Returns how many do then. Claims of those who are gone are taken out of the lists on the way.
    """
    for i in range(len(touched)):
        r = touched[i]
        before, c = -1, resources.head[r]
        while c >= 0:
            m, after = claims.member[c], claims.after[c]
            if members.first[m] == members.last[m]:
                if before < 0:
                    resources.head[r] = after
                else:
                    claims.after[before] = after
            else:
                before = c
                if members.level[m] >= same and members.target[m] != RISING:
                    members.target[m] = RISING
                    rising[n] = m
                    n += 1
            c = after
    return n


@compiled
def stop(members: Members, claims: Claims, resources: Resources, stopped: Ints, level: int) -> None:
    """What these use at this level is no longer there for those who still rise."""
    for i in range(len(stopped)):
        for c in range(members.first[stopped[i]], members.last[stopped[i]]):
            r = claims.resource[c]
            if resources.touched[r]:
                high, low = times(claims.demand[c], level)
                high, low = minus(resources.left_high[r], resources.left_low[r], high, low)
                resources.left_high[r], resources.left_low[r] = high, low
                resources.rising[r] -= claims.demand[c]
                resources.stale[r] = 1


@compiled
def everything(
    members: Members, resources: Resources, same: int, touched: Ints, rising: Ints, n: int
) -> tuple[int, int]:
    """Touch all resources, and let all rise who stop no lower than `same`: how many there are of both."""
    for r in range(len(resources.room)):
        resources.touched[r] = 1
        touched[r] = r
    for m in range(len(members.level)):
        if members.level[m] >= same and members.target[m] != RISING and members.first[m] < members.last[m]:
            members.target[m] = RISING
            rising[n] = m
            n += 1
    return len(resources.room), n


@compiled
def limit(members: Members, claims: Claims, resources: Resources, rising: Ints, heap: Ints) -> None:
    """Cap of each: its bound, and the levels at which contended resources that are not touched are full."""
    for i in range(len(rising)):
        m = rising[i]
        cap = members.bound[m]
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            if resources.binds[r] and not resources.touched[r]:
                cap = min(cap, resources.level[r])
        members.cap[m] = cap
        heap[i] = m
    heapify(heap, len(heap), members.cap)


@compiled
def empty(
    members: Members, claims: Claims, resources: Resources, touched: Ints, rising: Ints, same: int
) -> None:
    """Begin filling the touched resources: what those who rise used is there for them again."""
    for i in range(len(touched)):
        r = touched[i]
        resources.left_high[r], resources.left_low[r] = minus(
            resources.room[r], 0, resources.used_high[r], resources.used_low[r]
        )
        resources.rising[r] = 0
        if resources.level[r] >= same:
            resources.level[r] = ALL
    for i in range(len(rising)):
        m = rising[i]
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            if resources.touched[r]:
                high, low = times(claims.demand[c], members.level[m])
                high, low = plus(resources.left_high[r], resources.left_low[r], high, low)
                resources.left_high[r], resources.left_low[r] = high, low
                resources.rising[r] += claims.demand[c]


@compiled
def by_quotient(resources: Resources, touched: Ints, heap: Ints) -> int:
    """Put the contended resources with users who rise in the heap; how many they are."""
    size = 0
    for i in range(len(touched)):
        r = touched[i]
        if resources.binds[r] and resources.rising[r]:
            left_high, left_low = resources.left_high[r], resources.left_low[r]
            resources.key[r] = quotient(left_high, left_low, resources.rising[r])
            resources.stale[r] = 0
            heap[size] = r
            size += 1
    heapify(heap, size, resources.key)
    return size


@compiled
def fill_up(resources: Resources, heap: Ints, size: int, level: int, full: Ints) -> tuple[int, int, int]:
    """Level of the next round, at most the given one; resources full there; resources left in the heap.

    The quotient left // rising of a resource never falls, so a key that is stale is a lower bound.
    """
    key, n = resources.key, 0
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
            full[n] = r
            n += 1
    return level, n, size


@compiled
def fill(
    members: Members, claims: Claims, resources: Resources, touched: Ints, rising: Ints, same: int
) -> None:
    """Progressive filling as in `maxmin.solve`, of the touched resources by those who rise.

    In each round the lowest of left // rising over the resources and of the cap over those who rise stops
    everybody it concerns, at once.
    """
    by_cap, by_key = members.heap[: len(rising)], resources.heap
    full, stopped = resources.full, members.stopped
    limit(members, claims, resources, rising, by_cap)
    empty(members, claims, resources, touched, rising, same)
    caps = len(by_cap)
    size = by_quotient(resources, touched, by_key)
    while caps:
        if members.target[by_cap[0]] != RISING:
            caps = pop(by_cap, caps, members.cap)
            continue
        level, n, size = fill_up(resources, by_key, size, members.cap[by_cap[0]], full)
        count = 0
        for i in range(n):
            c = resources.head[full[i]]
            while c >= 0:
                m = claims.member[c]
                if members.target[m] == RISING:
                    members.target[m] = level
                    stopped[count] = m
                    count += 1
                c = claims.after[c]
        while caps and members.cap[by_cap[0]] <= level:
            m = by_cap[0]
            if members.target[m] == RISING:
                members.target[m] = level
                stopped[count] = m
                count += 1
            caps = pop(by_cap, caps, members.cap)
        stop(members, claims, resources, stopped[:count], level)


@compiled
def move(now: int, members: Members, claims: Claims, resources: Resources, concerned: Ints) -> None:
    """Give members their new levels. What is left of a length changes only here."""
    for i in range(len(concerned)):
        m = concerned[i]
        before, level = members.level[m], members.target[m]
        if level == before:
            continue
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            high, low = times(claims.demand[c], level)
            high, low = plus(resources.used_high[r], resources.used_low[r], high, low)
            less_high, less_low = times(claims.demand[c], before)
            resources.used_high[r], resources.used_low[r] = minus(high, low, less_high, less_low)
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


@compiled
def level_anew(
    members: Members, claims: Claims, resources: Resources, changed: Ints, new: int, same: int, local: int
) -> int:
    """Set the targets of those whom a change can concern: so many, who are then listed.

    Members from `new` on have just joined. What changes takes no part in a round below the lowest level that
    it had or can have, `same`: levels below are as they were. A resource that has not changed, and whose
    users all keep their levels, is full at the level at which it was: its story depends on nothing else. So
    only changed resources are filled, while the others cap their users as before. If that changes the level
    of a user of others, those are touched too, and it is done again, until nobody else is concerned; or once
    and for all, if more than `local` resources are touched.
    """
    touched, rising = resources.list, members.list
    n, count, before = 0, 0, -1
    for i in range(len(changed)):
        if not resources.touched[changed[i]]:
            resources.touched[changed[i]] = 1
            touched[n] = changed[i]
            n += 1
    for m in range(new, len(members.level)):
        rising[count] = m
        count += 1
    n = touch(members, claims, resources, rising[:count], new, touched, n)
    while n > before:
        for i in range(count):
            members.target[rising[i]] = RISING
        if n > local:
            n, count = everything(members, resources, same, touched, rising, count)
        else:
            count = gather(members, claims, resources, same, touched[max(0, before) : n], rising, count)
        fill(members, claims, resources, touched[:n], rising[:count], same)
        before = n
        n = touch(members, claims, resources, rising[:count], new, touched, n)
    for i in range(n):
        resources.touched[touched[i]] = 0
    return count


@kept
def settle(
    now: int,
    member_rows: Table,
    claim_rows: Table,
    resource_rows: Table,
    gone: Ints,
    changed: Ints,
    new: int,
    linked: int,
    same: int,
    local: int,
) -> int:
    """Level members anew at a time: the earliest end, or -1 if the demands on a resource pass 2**62.

    gone: members that have ended. changed: resources that have other users or another room or state.
    new, linked: the first member and the first claim that have been added. same: levels below it are as they
    were, as far as rooms go. local: a change that reaches more resources is taken to reach all.
    """
    m, c, r = member_rows, claim_rows, resource_rows
    members = Members(m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], m[9], m[10], m[11], m[12])
    claims = Claims(c[0], c[1], c[2], c[3])
    resources = Resources(
        r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15]
    )
    same = min(same, unlink(members, claims, resources, gone))
    if not link(members, claims, resources, linked):
        return -1
    same = least_share(members, claims, resources, new, same)
    count = level_anew(members, claims, resources, changed, new, same, local)
    move(now, members, claims, resources, members.list[:count])
    earliest = FAR
    for end in members.end:
        earliest = min(earliest, end)
    return earliest
