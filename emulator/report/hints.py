"""Short sentences for the reader of a report: what costs the most, and which knob moves it."""

from __future__ import annotations

from typing import NamedTuple

from emulator.report.account import Account
from emulator.report.memory import Memory, gib
from emulator.spec.job import Job
from emulator.spec.units import counted

WORTH_SAYING = 0.05
"""A cause with a smaller share of the step gets no hint."""

MOST_CAUSES = 3
"""Causes named in one report, largest first."""

GOOD_MFU = 0.30
EXCELLENT_MFU = 0.40
"""CS231n 2025, lecture 11: above 30 % is good, above 40 % excellent, well below 30 % badly wrong."""
BROKEN_MFU = 0.20
"""Our reading of "well below 30 %": a third below."""


def mfu_verdict(mfu: float) -> str:
    """Judge an MFU in a word or two."""
    if mfu > EXCELLENT_MFU:
        return "excellent (over 40 %)"
    if mfu > GOOD_MFU:
        return "good (over 30 %)"
    return "below good (30 %)" if mfu >= BROKEN_MFU else "well below 30 %: something is broken"


class Busiest(NamedTuple):
    """The stage whose compute stream works longest, and how long."""

    stage: int
    ps: int


def hints(
    job: Job, times: Account | None, memory: Memory, mfu: float | None, busiest: Busiest | None = None
) -> list[str]:
    """Say what costs the most and what would change it; memory that does not fit comes first.

    `busiest` tells a bubble that microbatches shrink from one that waits for a slower stage.
    """
    found = []
    if memory.over is not None:
        found.append(
            f"Stage {memory.over.stage} is {gib(memory.over.bytes)} over a GPU's memory, and its "
            f"{memory.over.term} broke it; {_memory_knob(job, memory.over.term)}."
        )
    parts = {"straggler": "device", "nic": "NIC"}
    for fault in job.faults:
        found.append(
            f"The {parts[fault.kind]} of rank {fault.rank} runs at {float(fault.left):.0%} of its speed, and "
            "whoever shares a group or a pipeline with it waits for it."
        )
    device = job.cluster.device
    if job.precision == "fp32" and "bf16" in device.peak_flops and job.fixed_times is None:
        ratio = device.peak_flops["bf16"] / device.peak("fp32")
        found.append(
            f'precision = "fp32" runs matrix products on the FP32 units; bf16 has {ratio:.1f} times the peak.'
        )
    if times is not None and times.step_ps:
        shares = {cause: ps / times.step_ps for cause, ps in times.causes().items()}
        large = sorted(
            (c for c in shares if shares[c] >= WORTH_SAYING and c != "compute"), key=lambda c: -shares[c]
        )
        for cause in large[:MOST_CAUSES]:
            knob = _bubble_knob(job, times, busiest) if cause == "bubble" else _knob(job, cause)
            found.append(f"{_cost(cause, shares[cause])}; {knob}.")
    if mfu is not None:
        found.append(f"MFU {mfu:.1%} is {mfu_verdict(mfu)}.")
    return found


def _cost(cause: str, share: float) -> str:
    what = {
        "recompute": "Recomputing activations",
        "optimizer": "The optimizer",
        "bubble": "The pipeline bubble",
        "contention": "Contention of kernels with what runs beside them",
        "launch": "Waiting for the host to issue kernels",
        "loader": "Waiting for input",
        "fault": "The fault",
    }.get(cause, f"Waiting for {cause.removeprefix('exposed ')} communication")
    return f"{what} takes {share:.1%} of the step"


def _knob(job: Job, cause: str) -> str:
    data, layout = job.data_parallel, job.layout
    if cause == "exposed dp":
        return _data_parallel_knob(job)
    return {
        "recompute": f'recompute = "{job.recompute}" trades this for memory',
        "optimizer": "more data-parallel ranks would share it"
        if data.sharding == "fsdp"
        else 'data_parallel.sharding = "fsdp" would divide it among the ranks',
        "contention": "collectives hold SMs and draw on HBM while they overlap compute; fewer bytes "
        "would disturb it less",
        "launch": "a larger micro_batch makes each kernel longer, and so hides the host "
        f"(cluster.host.launch_seconds = {job.cluster.host.launch_seconds:g})",
        "loader": f"cluster.host.loader_bytes_per_second = {job.cluster.host.loader_bytes_per_second:g} "
        "is too slow",
        "fault": "this is the rank whose device is slow",
        "exposed pp": f"fewer stages (layout.pp = {layout.pp}) or a faster network would shorten it",
    }.get(cause, f"a smaller layout.{cause.removeprefix('exposed ')} or a faster network would shorten it")


def _bubble_knob(job: Job, times: Account, busiest: Busiest | None) -> str:
    if job.pipeline.schedule == "naive" and job.microbatches > 1:
        return (
            "naive keeps one microbatch in flight, however many there are; "
            f'pipeline.schedule = "gpipe" would keep all {job.microbatches}'
        )
    own = times.compute + times.recompute + times.optimizer + times.contention
    # More than half of the wait is for the busiest stage to do what this rank has less of.
    if busiest is not None and 2 * (busiest.ps - own) > times.bubble:
        return (
            f"it waits for stage {busiest.stage}, whose kernels take {busiest.ps / times.step_ps:.1%} of "
            f"the step against {own / times.step_ps:.1%} on this rank: fewer layers there "
            f"(layout.stage_layers) or fewer stages (layout.pp = {job.layout.pp}) would even that out"
        )
    return (
        f"it shrinks with more microbatches (now {job.microbatches}: raise global_batch or lower "
        f"micro_batch) and with fewer stages (layout.pp = {job.layout.pp})"
    )


def _data_parallel_knob(job: Job) -> str:
    data = job.data_parallel
    if data.sharding == "none":
        return 'data_parallel.sharding = "ddp" would overlap it with backward'
    if data.sharding == "fsdp" and data.reshard_after_forward:
        return (
            "a larger micro_batch gives it more compute to hide behind, and "
            "data_parallel.reshard_after_forward = false saves one of the two gathers of the weights"
        )
    return "a larger micro_batch gives it more compute to hide behind"


def _memory_knob(job: Job, term: str) -> str:
    if term in ("weights", "gradients", "optimizer"):
        if job.data_parallel.sharding != "fsdp":
            return 'data_parallel.sharding = "fsdp" divides this state among the ranks'
        return "more data-parallel ranks (layout.dp_shard) or stages (layout.pp) divide this state further"
    if term == "activations":
        smaller = (
            f"a smaller micro_batch (now {job.micro_batch})"
            if job.micro_batch > 1
            else f"a shorter seq_len (now {job.seq_len})"
        )
        held = job.microbatches if job.pipeline.schedule == "gpipe" and job.layout.pp > 1 else 1
        # GPipe keeps every microbatch until its backward, so their number counts as their size does.
        if held == 1:
            return f"{smaller} needs fewer activations"
        held_text = counted(held, "microbatch", "microbatches")
        return f"{smaller} or a smaller global_batch (now {held_text} in flight) needs fewer activations"
    if term == "buffers":
        return "fewer layers unsharded at once (data_parallel.prefetch, reshard_after_forward) need less"
    return "use a GPU with more memory"
