"""Llama 3 8B, read from its Hugging Face config.json, on 64 H100s with FSDP: the job of `make run`.

Expect an MFU between 40 and 60 % (causal attention counted half). Each GPU trains one sequence of 8,192
tokens at 51.5 GFLOP a token, 422 TFLOP; matrix products that hold 0.728 of 989 TFLOP/s would need 0.59 s,
an MFU of 73 %, and attention (which reaches less), norms, activations and the loss take the rest.
torchtitan reports 33 to 39 % on a slower part (500 W, 2.4 TB/s) with its activations partly recomputed.

Communication hides: FSDP moves 63/64 (2 x 8.030e9 + 2 x 7.505e9 + 4 x 8.030e9) = 62.2 GB a GPU (weights
twice in bf16, the last unit once; gradients once in FP32). A ring through all servers runs at what NVLink
delivers, 450 GB/s x 0.824, since the eight NICs of a server together carry a little more: 168 ms at best,
less than a third of the 0.59 s. Exposed are only the first unshards and the last reduction, of the
embedding, 2.1 GB in FP32: some 10 ms, less than 3 % of the step.

Memory fits without recompute: 16 bytes of state a parameter over 64 ranks are 2 GB a GPU, and activations
of one sequence about 40 GB.
"""

from __future__ import annotations

from pathlib import Path

from emulator import DataParallel, Job, Layout, Result, clusters, models, simulate

job = Job(
    model=models.from_hf_config(Path(__file__).parent / "data" / "llama3_8b_config.json"),
    cluster=clusters.dgx_h100(nodes=8),
    layout=Layout(dp_shard=64),
    data_parallel=DataParallel(sharding="fsdp"),
    global_batch=64,
    micro_batch=1,
    seq_len=8192,
    precision="bf16",
)


def expect(result: Result) -> None:
    """MFU 40 to 60 %, 62.2 GB a GPU exactly, under 3 % of the step exposed, and it fits."""
    report = result.report
    assert report.mfu is not None, "no MFU"
    assert 0.40 < report.mfu < 0.60, f"MFU {report.mfu:.1%}, not 40 to 60 %"
    assert report.step_seconds is not None, "no step"
    traffic = report.communication["dp"]
    elements = job.model.parameters
    kept = job.model.vocab * job.model.hidden + job.model.hidden
    expected = 63 * (2 * elements + 2 * (elements - kept) + 4 * elements) / 64
    assert traffic.bytes_per_gpu == expected, f"{traffic.bytes_per_gpu} bytes a GPU, not {expected}"
    exposed = traffic.exposed_seconds / report.step_seconds
    assert exposed < 0.03, f"{exposed:.1%} of the step waits for communication, not less than 3 %"
    assert report.memory.fits, "it does not fit"


if __name__ == "__main__":
    result = simulate(job)
    expect(result)
    print(result.report)
    result.save_timeline("out/llama3_8b_fsdp64.png")
    result.save_trace("out/llama3_8b_fsdp64.json.gz")
