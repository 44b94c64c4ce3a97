"""Bytes of state: what a rank holds before a step, through it and after it.

Bytes per parameter (ZeRO, arXiv 1910.02054, section 3.1), Adam:

* replicated, 16-bit precision: weight 2, gradient 2, FP32 master, m and v 12; in sum 16;
* replicated, FP32: 4, 4, m and v 8; in sum 16;
* fully sharded (FSDP2): FP32 shard 4, its gradient 4, m and v 8; in sum 16, over the data-parallel degree.
"""

from __future__ import annotations

import msgspec

from emulator.plan.unit import stored_bytes
from emulator.spec.job import Job

FULL = 4
"""Bytes of an FP32 element: masters, moments, and the state that FSDP2 shards."""

RESERVED_BYTES = 1343 * 2**20
"""What a process holds on the device before it allocates anything: context and kernels.

1,343 MiB measured after one tiny tensor (Hugging Face transformers, "Model training anatomy", which says 1 to
2 GB). Communicators' own buffers and the allocator's fragmentation are not in it.
"""


class StateBytes(msgspec.Struct, frozen=True):
    """Bytes per parameter of each term of the state."""

    weights: int
    gradients: int
    master: int
    """FP32 copy of the weights beside them; 0 where the weights are FP32 themselves."""
    moments: int
    """Each of Adam's two."""

    @property
    def optimizer(self) -> int:
        """Master and both moments."""
        return self.master + 2 * self.moments


def is_sharded(job: Job) -> bool:
    """Whether the state is cut over the data-parallel ranks: fsdp over more than one of them."""
    return job.data_parallel.sharding == "fsdp" and job.layout.dp > 1


def state_bytes(job: Job) -> StateBytes:
    """Bytes per parameter of the state that a rank keeps for what it owns."""
    stored = FULL if is_sharded(job) else stored_bytes(job.precision)
    return StateBytes(stored, stored, 0 if stored == FULL else FULL, FULL)
