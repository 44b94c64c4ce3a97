"""Llama 3 8B on the eight H100s of one server with FSDP: three layers in play in every moment of backward.

Expect, for every layer l that has both neighbours, that while l is differentiated the weights of l-1 are
being unsharded and the gradients of l+1 reduced. It holds because a layer's communication is shorter than
its compute: 218.1e6 parameters are 436 MB in bf16, of which 7/8 arrive over NVLink at 450 GB/s x 0.824 in
1.0 ms at best, and 872 MB in FP32, reduced in 2.1 ms at best; its backward is 4 x 218.1e6 x 4096 = 3.6
TFLOP of matrix products, 4.5 ms at the 794 TFLOP/s that long ones reach, and attention and the
memory-bound kernels on top.

Weights cross the network twice and gradients once, the three model sizes of FSDP, less one crossing of the
last unit (norm and head, 525.3e6), which stays unsharded from forward to backward: 7/8 (2 x 8.030e9 + 2 x
7.505e9 + 4 x 8.030e9) bytes, 4 for the gradients because they travel in FP32, are 55.3 GB a GPU, exactly.
State is 16 bytes a parameter over 8 ranks: 16.1 GB each.
"""

from __future__ import annotations

from emulator import DataParallel, Job, Layout, Result, clusters, models, simulate

job = Job(
    model=models.LLAMA3_8B,
    cluster=clusters.dgx_h100(nodes=1),
    layout=Layout(dp_shard=8),
    data_parallel=DataParallel(sharding="fsdp"),
    global_batch=8,
    micro_batch=1,
    seq_len=4096,
)


def expect(result: Result) -> None:
    """Three layers in play; bytes exact; state over 8; at most 10 % of communication exposed."""
    trace = result.trace
    for layer in range(1, job.model.layers - 1):
        backward = trace.where(rank=0, stream="compute", layer=layer, phase="I")
        start, end = backward.start_ps, backward.end_ps
        unshard = trace.where(rank=0, name=f"l{layer - 1}.unshard.B.mb0").one()
        reduce = trace.where(rank=0, name=f"l{layer + 1}.reduce.mb0").one()
        for span in (unshard, reduce):
            inside = min(end, span.end_ps) - max(start, span.begin_ps)
            assert inside > 0, f"{span.name} does not overlap the backward of layer {layer}"
    traffic = result.report.communication["dp"]
    elements = job.model.parameters
    kept = job.model.vocab * job.model.hidden + job.model.hidden
    expected = 7 * (2 * elements + 2 * (elements - kept) + 4 * elements) // 8
    assert traffic.bytes_per_gpu == expected, f"{traffic.bytes_per_gpu} bytes a GPU, not {expected}"
    share = traffic.exposed_seconds / traffic.seconds
    assert share < 0.10, f"{share:.1%} of the communication is exposed, not less than 10 %"
    stage = result.report.memory.stages[0]
    state = stage.weights + stage.gradients + stage.optimizer
    assert abs(state - 16 * elements / 8) < 1e-3 * state, f"state of {state} bytes, not 16 x {elements} / 8"


if __name__ == "__main__":
    played = simulate(job)
    expect(played)
    print(played.report)
