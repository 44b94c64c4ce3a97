"""Streams, hosts, meetings and steps of programs written by hand."""

from __future__ import annotations

import msgspec
import pytest

from emulator.plan import plan
from emulator.plan.program import (
    COMPUTE,
    Collective,
    Fixed,
    Group,
    HostCopy,
    Load,
    Op,
    Program,
    RankClass,
    Template,
    Transfer,
    Work,
)
from emulator.report.audit import audit
from emulator.run import DeadlockError, run, run_audited
from emulator.run.executor import Executor
from emulator.run.trace import Trace
from emulator.spec.cluster import Cluster, Host
from emulator.spec.device import DEVICES, device
from emulator.spec.job import DataParallel, Job, Layout, Pipeline
from emulator.spec.model import Model

MODEL = Model(name="tiny", layers=2, hidden=64, ffn_hidden=128, heads=4, kv_heads=4, vocab=256)


def job(ranks: int = 1, launch: float = 0.0, **fields: object) -> Job:
    """A job that the hand-written programs belong to."""
    cluster = Cluster(device=device("h100-sxm"), nodes=1, host=Host(launch_seconds=launch))
    return Job(
        model=MODEL, cluster=cluster, seq_len=64, global_batch=ranks, layout=Layout(dp_shard=ranks), **fields
    )  # type: ignore[arg-type]


def op(name: str, work: Work, stream: str = COMPUTE, waits: tuple[int, ...] = ()) -> Op:
    return Op(name=name, stream=stream, work=work, waits=waits)


def program(the_job: Job, *ranks: list[Op], groups: tuple[Group, ...] = ()) -> Program:
    """One template a rank; groups by axis name; peers "next" and "prev" are the neighbouring ranks."""
    templates = tuple(Template(f"rank{r}", 0, tuple(ops), ()) for r, ops in enumerate(ranks))
    classes = tuple(
        RankClass(
            (r,),
            r,
            {group.axis: g for g, group in enumerate(groups) if r in group.ranks},
            {"next": (r + 1) % len(ranks), "prev": (r - 1) % len(ranks)},
        )
        for r in range(len(ranks))
    )
    return Program(the_job, templates, classes, groups)


def played(a_program: Program, steps: int = 1) -> Trace:
    """The trace, after its audit."""
    trace, recording = run_audited(a_program, steps)
    audit(trace, recording)
    return trace


def ends(trace: Trace) -> dict[str, int]:
    return {span.name: span.end_ps for span in trace.where()}


def test_a_stream_is_in_order_and_others_run_beside_it() -> None:
    trace = played(
        program(
            job(),
            [
                op("a", Fixed(10)),
                op("b", Fixed(20)),
                op("side", Fixed(5), "other", (0,)),
                op("join", Fixed(1), COMPUTE, (2,)),
                op("nothing", None, "other", (3,)),
            ],
        )
    )
    assert ends(trace) == {"a": 10, "b": 30, "side": 15, "join": 31, "nothing": 31}


def test_the_host_issues_ops_in_order_at_its_rate() -> None:
    """Launches of 6 us each bound short kernels; a long kernel hides them."""
    us = 10**6
    trace = played(
        program(job(launch=6e-6), [op("a", Fixed(1 * us)), op("b", Fixed(20 * us)), op("c", Fixed(1 * us))])
    )
    spans = {span.name: span for span in trace.where()}
    assert [spans[n].start_ps for n in "abc"] == [6 * us, 12 * us, 32 * us]
    assert [spans[n].issued_ps for n in "abc"] == [6 * us, 12 * us, 18 * us]
    assert [spans[n].ready_ps for n in "abc"] == [0, 7 * us, 32 * us]


def test_a_collective_begins_when_its_last_member_has_come() -> None:
    gather = Collective(kind="all_gather", group="dp", axis="dp", bytes=8 * 10**8)
    ranks = [[op("work", Fixed(10 * (r + 1))), op("gather", gather, "dp", (0,))] for r in range(8)]
    trace = played(program(job(8), *ranks, groups=(Group("dp", tuple(range(8))),)))
    spans = list(trace.where(name="gather"))
    assert [span.start_ps for span in spans] == sorted(10 * (r + 1) for r in range(8))
    assert {span.begin_ps for span in spans} == {80}
    assert len({span.end_ps for span in spans}) == 1
    assert spans[0].end_ps - 80 == spans[0].alone_ps


def test_a_group_of_one_takes_no_time() -> None:
    reduce = Collective(kind="all_reduce", group="dp", axis="dp", bytes=10**9)
    trace = played(
        program(job(), [op("w", Fixed(7)), op("r", reduce, "dp", (0,))], groups=(Group("dp", (0,)),))
    )
    assert ends(trace) == {"w": 7, "r": 7}


def test_send_and_receive_meet() -> None:
    def end(kind: str, peer: str) -> Transfer:
        return Transfer(kind=kind, peer=peer, axis="pp", bytes=1, tag="F0", duration_ps=3)  # type: ignore[arg-type]

    trace = played(
        program(
            job(2),
            [op("f", Fixed(10)), op("s", end("send", "next"), "pp.send_next", (0,))],
            [op("r", end("recv", "prev"), "pp.recv_prev"), op("f", Fixed(10), COMPUTE, (0,))],
        )
    )
    assert trace.where(rank=1, name="r").one().begin_ps == 10
    assert trace.end_ps == 23


def test_steps_of_a_rank_follow_each_other() -> None:
    trace = played(program(job(), [op("a", Fixed(10)), op("b", Fixed(4), "other")]), steps=3)
    assert [span.end_ps for span in trace.where(name="a")] == [10, 20, 30]
    assert [span.start_ps for span in trace.where(name="b")] == [0, 10, 20]


def test_a_rank_with_nothing_to_do_holds_nobody_up() -> None:
    assert played(program(job(2), [op("a", Fixed(10))], []), steps=2).end_ps == 20


def test_loading_the_next_batch_bounds_a_step() -> None:
    """The loader works beside the step; a step is over when its slower half is."""
    us = 10**6
    ops = [
        op("copy", HostCopy(bytes=1), "copy"),
        op("w", Fixed(us), COMPUTE, (0,)),
        op("l", Load(10**6), "loader"),
    ]
    trace = played(program(job(), ops), steps=2)
    loader_ps = 10**6 * 10**12 // int(job().cluster.host.loader_bytes_per_second)
    assert trace.where(step=0).end_ps == loader_ps
    assert trace.end_ps == 2 * loader_ps


def test_a_run_at_rest_with_ops_left_says_who_waits_for_what() -> None:
    def end(kind: str, peer: str, tag: str) -> Transfer:
        return Transfer(kind=kind, peer=peer, axis="pp", bytes=1, tag=tag, duration_ps=3)  # type: ignore[arg-type]

    crossed = program(
        job(2),
        [op("send0", end("send", "next", "F0"), "p2p"), op("w", Fixed(1), COMPUTE, (0,))],
        [op("recv1", end("recv", "prev", "F1"), "p2p")],
    )
    with pytest.raises(DeadlockError) as error:
        run(crossed)
    text = str(error.value)
    for part in ("rank 0 p2p: send0", "for rank 1", "rank 1 p2p: recv1", "rank 0 compute: w waits for send0"):
        assert part in text
    assert "\n" not in text


def test_a_member_that_never_comes_is_named() -> None:
    reduce = Collective(kind="all_reduce", group="dp", axis="dp", bytes=10**6)
    ranks = [[op("r", reduce, "dp")], [op("r", reduce, "dp")], [op("w", Fixed(5))]]
    with pytest.raises(DeadlockError, match="for rank 2"):
        run(program(job(3), *ranks, groups=(Group("dp", (0, 1, 2)),)))


def test_pruning_and_order_of_declaration_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resources that can never bind are dropped before the run; with all of them the trace is the same."""
    from emulator.run import lower as lowering

    gather = Collective(kind="all_gather", group="dp", axis="dp", bytes=10**8)
    ranks = [[op("work", Fixed(10**8)), op("gather", gather, "dp"), op("copy", HostCopy(10**7), "copy")]] * 4
    one = program(job(4), *ranks, groups=(Group("dp", (0, 1, 2, 3)),))
    pruned = run(one)
    monkeypatch.setattr("emulator.run.executor.lower", lambda p: lowering.lower(p, prune=False))
    full = run(one)
    assert pruned.to_bytes() == full.to_bytes()
    backwards = msgspec.structs.replace(one, classes=tuple(reversed(one.classes)))
    other = run(backwards)
    for rank in range(4):
        mine = [(s.name, s.start_ps, s.end_ps) for s in pruned.where(rank=rank)]
        assert mine == [(s.name, s.start_ps, s.end_ps) for s in other.where(rank=rank)]


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int]] = []
    ops = [op(f"k{i}", Fixed(1)) for i in range(20_000)]
    Executor(program(job(), ops), 1, progress=lambda *call: calls.append(call)).run()
    assert calls
    assert calls[-1] == (20_000, 20_000)


def crowded(name: str, schedule: str = "gpipe", sharding: str = "fsdp") -> Job:
    """Two stages of two ranks in one node, with messages large enough for all channels."""
    the_device = device(name)
    model = Model(
        name="wide", layers=4, hidden=8192, ffn_hidden=8192, heads=32, kv_heads=8, head_dim=128, vocab=1000
    )
    return Job(
        model=model,
        cluster=Cluster(device=the_device, nodes=1),
        seq_len=4096,
        global_batch=4,
        precision="bf16" if "bf16" in the_device.peak_flops else "fp32",
        layout=Layout(pp=2, dp_shard=2),
        pipeline=Pipeline(schedule),
        data_parallel=DataParallel(sharding=sharding),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", DEVICES)
def test_channels_leave_an_sm_free_on_any_device(name: str, sharding: str) -> None:
    """A K40 has fewer SMs than one collective has channels, a P100 fewer than a send and a receive."""
    the_program = plan(crowded(name, sharding=sharding))
    trace = played(the_program)
    assert trace.outcome.kind == "complete"
    for streams in Executor(the_program, 1).lowered.streams:
        held = sum(max(stream.hold) for stream in streams.values())
        assert held <= (device(name).sms - 1) * 10**6


def test_engines_of_their_own_hold_no_sms() -> None:
    """Beside a collective of a TPU a kernel has all cores."""
    for name, holds in (("tpu-v5p", False), ("trainium2", False), ("h100-sxm", True)):
        lowered = Executor(plan(crowded(name)), 1).lowered
        assert holds == any(any(stream.hold) for streams in lowered.streams for stream in streams.values())


def test_a_kernel_may_be_starved_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where collectives take every SM, a kernel stands still until one ends; the audit counts its work."""
    monkeypatch.setattr("emulator.run.lower._Lowering._fair_hold", lambda self, _: self.per_device[0])
    trace, recording = run_audited(plan(crowded("p100", "naive")))
    seen: dict[object, int] = {}
    starved = 0
    for _, activity, level in recording.levels:
        starved += seen.get(activity) == 0
        seen[activity] = level
    assert starved
    audit(trace, recording)
