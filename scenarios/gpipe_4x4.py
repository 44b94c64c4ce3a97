"""GPipe with four stages and four microbatches: four sevenths of the time is work.

Expect a utilisation of m / (m + p - 1) = 4 / 7 = 57.1 % and a bubble of 3 / 7 = 42.9 % of the step,
exactly: in a teaching world a forward and a backward take 1 s each, transfers take none, and the step ends
after (m + p - 1)(F + B) = 7 x 2 s = 14 s. Each rank works m (F + B) = 8 s of it.
"""

from __future__ import annotations

from emulator import DataParallel, FixedTimes, Job, Layout, Pipeline, Result, clusters, models, simulate

job = Job(
    model=models.LLAMA3_8B,
    cluster=clusters.dgx_h100(nodes=1),
    layout=Layout(pp=4),
    pipeline=Pipeline("gpipe"),
    data_parallel=DataParallel(sharding="none"),
    fixed_times=FixedTimes(forward=1.0, backward=1.0),
    global_batch=4,
    micro_batch=1,
    seq_len=2048,
)


def expect(result: Result) -> None:
    """The step ends after 14 s, of which every rank works 8 s; the order of events is GPipe's."""
    trace = result.trace
    assert trace.end_ps == 14 * 10**12, f"the step ends at {trace.end_ps} ps, not after 14 s"
    for rank in range(4):
        busy = trace.where(rank=rank, stream="compute").busy_ps
        assert busy * 7 == trace.end_ps * 4, (
            f"rank {rank} works {busy / trace.end_ps:.4f} of the step, not 4/7"
        )
    last = [name for name in trace.where(rank=3, stream="compute").names if name[1] in "FB"]
    assert last == ["3F0", "3F1", "3F2", "3F3", "3B0", "3B1", "3B2", "3B3"], f"rank 3 did {last}"
    assert result.report.bubble.of_step == 3 / 7, f"bubble {result.report.bubble.of_step}, not 3/7"


if __name__ == "__main__":
    played = simulate(job)
    expect(played)
    print(played.report)
