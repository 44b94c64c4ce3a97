"""The ops of a Program: what each does, on which stream, after what, and the memory it touches."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["F", "B", "I", "W", "R", "O", "-"]
PHASES: tuple[Phase, ...] = ("F", "B", "I", "W", "R", "O", "-")
"""Forward, full backward, input gradient, weight gradient, recompute, optimizer, neither."""

COMPUTE = "compute"
"""Stream of the kernels."""


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one kernel on one device."""

    kind: Literal["gemm", "attention", "norm", "elementwise", "loss", "embedding", "optimizer", "copy"]
    flops: int = 0
    """FLOP that the mathematics asks for."""
    unit: Literal["tensor", "vector"] = "vector"
    precision: str = "bf16"
    hbm_bytes: int = 0
    """Bytes read from and written to HBM."""
    shape: tuple[int, ...] = ()
    """gemm: (batch, m, n, k). attention: (batch, heads, kv_heads, seq_q, seq_k, head_dim, causal)."""


class Fixed(msgspec.Struct, frozen=True):
    """Work of a teaching world: it takes this long, whatever the hardware."""

    duration_ps: int


class HostCopy(msgspec.Struct, frozen=True):
    """Bytes between host and device over a copy engine."""

    bytes: int
    direction: Literal["h2d", "d2h"] = "h2d"


class Load(msgspec.Struct, frozen=True):
    """Bytes of input that the host's loader prepares."""

    bytes: int


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part in a collective over one of its groups.

    `bytes` is S of nccl-tests: the buffer for all_reduce, broadcast and reduce; the total over all ranks for
    all_gather and reduce_scatter; one rank's send buffer for all_to_all.
    """

    kind: CollectiveKind
    group: str
    axis: str
    bytes: int
    root: int = 0
    """Index in the group of the owner, for broadcast and reduce."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a point-to-point transfer; the other end has the same tag."""

    kind: Literal["send", "recv"]
    peer: str
    """Name in the class's `peers`."""
    axis: str
    bytes: int
    tag: str
    duration_ps: int | None = None
    """Teaching worlds: the transfer takes this long."""


Work = Kernel | Fixed | HostCopy | Load | Collective | Transfer | None
"""What an op does; None takes no time (it only joins others, allocates or frees)."""


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One planned op. It may begin when its predecessor on the stream and all of `waits` have ended."""

    name: str
    stream: str
    work: Work
    waits: tuple[int, ...] = ()
    """Indices in the template of ops on other streams that must have ended."""
    phase: Phase = "-"
    stage: int = 0
    microbatch: int = -1
    layer: int = -1
    allocates: tuple[int, ...] = ()
    """Buffers that come to life when the op begins."""
    uses: tuple[int, ...] = ()
    """Buffers that must be alive throughout."""
    frees: tuple[int, ...] = ()
    """Buffers that die when the op ends."""


Term = Literal["weights", "gradients", "optimizer", "activations", "buffers", "reserved"]
TERMS: tuple[Term, ...] = ("weights", "gradients", "optimizer", "activations", "buffers", "reserved")
"""Terms of the memory report."""


class Buffer(msgspec.Struct, frozen=True):
    """Device memory with a name, a size and the term of the memory report it counts to."""

    name: str
    term: Term
    bytes: int
    persistent: bool = False
    """Alive before the step and after it: never allocated or freed by an op."""
