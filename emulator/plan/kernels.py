"""What a block is, and the pencil that draws one: kernels with the tensors they read and write."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from emulator.plan.program import Kernel
from emulator.spec.model import Model

BlockPhase = Literal["F", "I", "W", "B"]
"""Forward; on the way to the input's gradient; a weight gradient alone; both in one kernel."""


class BlockOp(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of a block, with the block's tensors that it reads and writes."""

    name: str
    kernel: Kernel
    phase: BlockPhase
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    """Parameters whose gradient of this microbatch is complete when the op ends."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of one unit (embedding, layer or head) on one microbatch, in the order of issue.

    `x` is the block's input, `y` its output, `dy` the gradient that comes in and `dx` the one that goes out.
    Every other tensor is written once, before it is read, and may be freed after its last reader. Weights and
    their gradients are not tensors here: their traffic is in the kernels' bytes.
    """

    name: str
    forward: tuple[BlockOp, ...]
    backward: tuple[BlockOp, ...]
    tensors: dict[str, int]
    """Bytes of every tensor that is read or written."""

    @property
    def saved(self) -> dict[str, int]:
        """Bytes of each tensor that lives on into backward: x or written in forward, and read in backward."""
        held = {"x"}.union(*(op.writes for op in self.forward))
        read = {name for op in self.backward for name in op.reads}
        return {name: size for name, size in self.tensors.items() if name in held and name in read}

    @property
    def saved_bytes(self) -> int:
        """Bytes held from forward to backward when nothing is recomputed."""
        return sum(self.saved.values())


class Linear(msgspec.Struct, frozen=True):
    """One projection: y = x W^T (+ bias), with W of shape (outputs, inputs)."""

    name: str
    parameter: str
    inputs: int
    outputs: int
    bias: bool = False
    complete: bool = True
    """False where the weight is shared and its gradient is not complete here."""


# Arithmetic operations per element, as the formula is written; exp, erf, sqrt and a division count one each.
ADD_FLOPS = 1
ROPE_FLOPS = 3  # x cos + rotated(x) sin
RMSNORM_FLOPS = 4  # square, sum, times 1/rms, times weight
RMSNORM_BACKWARD_FLOPS = 9  # x/rms; dy w; times x/rms, summed; times that mean, subtracted, /rms; dw: two
LAYERNORM_FLOPS = 7  # sum, minus mean, square, sum, times 1/std, weight, bias
LAYERNORM_BACKWARD_FLOPS = 13  # as rmsnorm's, and x minus mean, sum of dy w, its subtraction, bias gradient
SILU_MUL_FLOPS = 5  # g / (1 + exp(-g)) u: negate, exp, add, divide, times u
SILU_MUL_BACKWARD_FLOPS = 11  # s = sigmoid(g) 4; silu = g s 1; du = dp silu 1; dg = dp u (s + silu (1 - s)) 5
GELU_FLOPS = 5  # x/2 (1 + erf(x / sqrt 2)): scale, erf, add, halve, times x
GELU_BACKWARD_FLOPS = 11  # erf part again 4; density exp(-x^2/2)/sqrt(2 pi) 4; times x, sum, times dp
RELU_FLOPS = 1


class Sketch:
    """Collects the ops and tensors of one block.

    `tokens` = micro_batch x seq_len rows; an activation of `width` features is tokens x width elements of
    `element` bytes. fp32 and tf32 store 4 bytes, the 16-bit formats 2. fp8 keeps 16-bit tensors, of which
    every matrix product reads 8-bit copies that a cast writes first (scaled per tensor on the fly, as torchao
    does).
    """

    def __init__(self, model: Model, micro_batch: int, seq_len: int, precision: str) -> None:
        self.model = model
        self.batch, self.seq_len = micro_batch, seq_len
        self.tokens = micro_batch * seq_len
        self.precision = precision
        self.element = 4 if precision in {"fp32", "tf32"} else 2
        self.tensors: dict[str, int] = {}
        self.forward: list[BlockOp] = []
        self.backward: list[BlockOp] = []
        self._casts: dict[tuple[bool, str], str] = {}

    @property
    def stored(self) -> str:
        """Precision in which activations are stored."""
        if self.element == 4:
            return "fp32"
        return "bf16" if self.precision == "fp8" else self.precision

    def activation(self, name: str, width: int) -> str:
        """Declare a tensor of tokens x width elements."""
        self.tensors[name] = self.tokens * width * self.element
        return name

    def statistic(self, name: str, per_token: int) -> str:
        """Declare a tensor of FP32 numbers, so many per token."""
        self.tensors[name] = self.tokens * per_token * 4
        return name

    def emit(self, op: BlockOp) -> None:
        """Append an op to forward or backward by its phase."""
        (self.forward if op.phase == "F" else self.backward).append(op)

    def stream(
        self,
        name: str,
        phase: BlockPhase,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        flops: int,
        *,
        kind: Literal["norm", "elementwise", "loss"] = "elementwise",
        extra_bytes: int = 0,
        gradients: tuple[str, ...] = (),
    ) -> None:
        """Emit a kernel that passes once over its tensors: bytes of all it reads and writes, and extra."""
        moved = sum(self.tensors[t] for t in reads + writes) + extra_bytes
        kernel = Kernel(kind=kind, flops=flops, unit="vector", precision=self.stored, hbm_bytes=moved)
        self.emit(
            BlockOp(name=name, kernel=kernel, phase=phase, reads=reads, writes=writes, gradients=gradients)
        )

    def linear(self, lin: Linear, x: str, y: str) -> None:
        """Emit y = x W^T; a bias is added as the product is written and costs its own bytes only."""
        self.activation(y, lin.outputs)
        a, w = self._cast(x, "F"), self._cast_weight(lin, "F")
        bias = lin.outputs * self.element if lin.bias else 0
        self._gemm(lin.name, "F", (self.tokens, lin.outputs, lin.inputs), (a, *w), (y,), extra_bytes=bias)

    def linear_backward(self, lin: Linear, dy: str, x: str, dx: str) -> None:
        """Emit dx = dy W, dW = dy^T x and, with a bias, the sum of dy over tokens."""
        self.activation(dx, lin.inputs)
        d, w = self._cast(dy, "I"), self._cast_weight(lin, "I")
        self._gemm(f"{lin.name}_I", "I", (self.tokens, lin.inputs, lin.outputs), (d, *w), (dx,))
        a = self._cast(x, "W")
        done = (f"{lin.parameter}.weight",) if lin.complete else ()
        self._gemm(f"{lin.name}_W", "W", (lin.outputs, lin.inputs, self.tokens), (d, a), (), gradients=done)
        if lin.bias:
            self.stream(
                f"{lin.name}_bias_W",
                "W",
                (dy,),
                (),
                self.tokens * lin.outputs,
                extra_bytes=lin.outputs * self.element,
                gradients=(f"{lin.parameter}.bias",),
            )

    def _gemm(
        self,
        name: str,
        phase: BlockPhase,
        mnk: tuple[int, int, int],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        *,
        extra_bytes: int = 0,
        gradients: tuple[str, ...] = (),
    ) -> None:
        """Emit 2 m n k FLOPs; each operand is read once, the product written once (L2 serves the tiles)."""
        m, n, k = mnk
        operand = 1 if self.precision == "fp8" else self.element
        kernel = Kernel(
            kind="gemm",
            flops=2 * prod(mnk),
            unit="vector" if self.precision == "fp32" else "tensor",
            precision=self.precision,
            hbm_bytes=(m * k + k * n) * operand + m * n * self.element + extra_bytes,
            shape=(1, *mnk),
        )
        self.emit(
            BlockOp(name=name, kernel=kernel, phase=phase, reads=reads, writes=writes, gradients=gradients)
        )

    def _cast(self, tensor: str, phase: BlockPhase) -> str:
        """Name the 8-bit copy that a matrix product reads; the tensor itself unless precision is fp8.

        A copy is made once in forward and once in backward (in the other layout, which FP8 products need), so
        that forward's need not live on. Bytes: one pass finds the largest magnitude, one converts: 2 + 2 + 1.
        """
        if self.precision != "fp8":
            return tensor
        key = (phase == "F", tensor)
        if key not in self._casts:
            copy = f"{tensor}_fp8" if phase == "F" else f"{tensor}_fp8_backward"
            size = self.tensors[tensor]
            self.tensors[copy] = size // 2
            self.stream(f"cast_{copy}", phase, (tensor,), (copy,), size, extra_bytes=size)
            self._casts[key] = copy
        return self._casts[key]

    def _cast_weight(self, lin: Linear, phase: BlockPhase) -> tuple[str, ...]:
        """As `_cast`, for a weight, anew in each direction; nothing unless precision is fp8."""
        if self.precision != "fp8":
            return ()
        count = lin.inputs * lin.outputs
        copy = f"{lin.name}_weight_fp8" if phase == "F" else f"{lin.name}_weight_fp8_backward"
        self.tensors[copy] = count
        self.stream(f"cast_{copy}", phase, (), (copy,), 2 * count, extra_bytes=4 * count)
        return (copy,)

    def norm(self, name: str, x: str, y: str, *, width: int, groups: int = 1) -> None:
        """Emit a norm over `width` features, `groups` times a token; FP32 statistics stay for backward."""
        layernorm = self.model.norm == "layernorm"
        self.activation(y, width * groups)
        stats = self.statistic(f"{name}_stats", groups * (2 if layernorm else 1))
        flops = self.tokens * width * groups * (LAYERNORM_FLOPS if layernorm else RMSNORM_FLOPS)
        weights = width * self.element * (2 if layernorm else 1)
        self.stream(name, "F", (x,), (y, stats), flops, kind="norm", extra_bytes=weights)

    def norm_backward(
        self, name: str, parameter: str, dy: str, x: str, dx: str, *, width: int, groups: int = 1
    ) -> None:
        """Emit a norm's input and weight gradients, one kernel: reads the weight, writes its gradient."""
        layernorm = self.model.norm == "layernorm"
        self.activation(dx, width * groups)
        per_element = LAYERNORM_BACKWARD_FLOPS if layernorm else RMSNORM_BACKWARD_FLOPS
        done = (f"{parameter}.weight", f"{parameter}.bias") if layernorm else (f"{parameter}.weight",)
        self.stream(
            f"{name}_backward",
            "B",
            (dy, x, f"{name}_stats"),
            (dx,),
            self.tokens * width * groups * per_element,
            kind="norm",
            extra_bytes=width * self.element * (1 + len(done)),
            gradients=done,
        )

    def add(self, name: str, phase: BlockPhase, a: str, b: str, out: str) -> None:
        """Emit out = a + b."""
        self.tensors[out] = self.tensors[a]
        self.stream(name, phase, (a, b), (out,), self.tensors[a] // self.element * ADD_FLOPS)

    def block(self, name: str) -> Block:
        """Return what was drawn."""
        return Block(
            name=name, forward=tuple(self.forward), backward=tuple(self.backward), tensors=self.tensors
        )
