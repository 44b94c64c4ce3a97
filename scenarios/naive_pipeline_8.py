"""A pipeline of eight stages with one microbatch in flight: seven of eight GPUs wait at every instant.

Expect a utilisation of 1 / p = 1 / 8 = 12.5 %, exactly, however many microbatches there are: only one rank
works at a time, so the step takes m p (F + B) = 4 x 8 x 3 s = 96 s and each rank works m (F + B) = 12 s of
it. The ceiling on MFU is 12.5 % before anything else goes wrong.
"""

from __future__ import annotations

from emulator import DataParallel, FixedTimes, Job, Layout, Pipeline, Result, clusters, models, simulate

job = Job(
    model=models.LLAMA3_8B,
    cluster=clusters.dgx_h100(nodes=1),
    layout=Layout(pp=8),
    pipeline=Pipeline("naive"),
    data_parallel=DataParallel(sharding="none"),
    fixed_times=FixedTimes(forward=1.0, backward=2.0),
    global_batch=4,
    micro_batch=1,
    seq_len=2048,
)


def expect(result: Result) -> None:
    """The step takes 96 s, every rank works 12 s of it, and never two ranks at once."""
    trace = result.trace
    assert trace.end_ps == 96 * 10**12, f"the step ends at {trace.end_ps} ps, not after 96 s"
    busy = [trace.where(rank=rank, stream="compute").busy_ps for rank in range(8)]
    assert busy == [trace.end_ps // 8] * 8, f"the ranks work {busy} ps, not an eighth of the step each"
    together = trace.where(stream="compute").busy_ps
    assert together == sum(busy), "two ranks work at the same time"


if __name__ == "__main__":
    played = simulate(job)
    expect(played)
    print(played.report)
