"""A dense decoder-only transformer: its tensors, its parameter count and the FLOPs it asks for."""

import difflib
import tomllib
from functools import lru_cache
from importlib import resources
from math import prod
from pathlib import Path
from typing import Literal, get_args

import msgspec

from emulator.spec import hf_config
from emulator.spec.checks import choice, finite, flag, listed, shown, whole
from emulator.spec.errors import JobError

FlopConvention = Literal[
    "causal", "full_attention", "6nd", "causal_with_embedding", "full_attention_with_embedding"
]
"""How the numerator of an MFU is counted; published tables differ in it.

causal: matrix products with weights, and attention with the mask's half (Megatron today; the default here).
full_attention: the same with attention counted as if nothing were masked (Narayanan'21, torchtitan).
6nd: six times all parameters, no attention.
*_with_embedding: the input embedding's lookup counted as if it were a matrix product.
"""

Activation = Literal["swiglu", "geglu", "gelu", "relu"]
Norm = Literal["rmsnorm", "layernorm"]

FLOP_CONVENTIONS: tuple[FlopConvention, ...] = get_args(FlopConvention)


class Parameter(msgspec.Struct, frozen=True):
    """One weight tensor."""

    name: str
    shape: tuple[int, ...]
    layer: int
    """Index of the transformer layer; -1 for the embedding, `layers` for final norm and head."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a dense decoder; raises JobError on construction when the shape cannot be.

    Parameter counts are exact to the last one.
    """

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 0
    """0 means hidden / heads."""
    vocab: int
    activation: Activation = "swiglu"
    """swiglu and geglu have a gate (three matrices), gelu and relu have none (two)."""
    norm: Norm = "rmsnorm"
    rotary: bool = True
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 for none."""
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    projection_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """A norm over each head of q and of k before the rotation, with one shared weight of head_dim each."""
    tied_embeddings: bool = False
    training_tokens: float = 0.0
    """Tokens of the published pre-training run, 0 if unknown; only `emulator estimate` reads it."""
    source: str = ""

    def __post_init__(self) -> None:
        """Check that the numbers make a model."""
        if not self.name.isprintable():
            raise JobError(f"model.name = {self.name!a} must be text on one line")
        for field in ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab"):
            whole(f"model.{field}", getattr(self, field))
        for field in ("head_dim", "learned_positions"):
            whole(f"model.{field}", getattr(self, field), least=0)
        finite("model.training_tokens", self.training_tokens)
        choice("model.activation", self.activation, get_args(Activation))
        choice("model.norm", self.norm, get_args(Norm))
        for field in (
            "rotary", "attention_bias", "projection_bias", "mlp_bias", "qk_norm", "tied_embeddings",
        ):  # fmt: skip
            flag(f"model.{field}", getattr(self, field))
        left = self.hidden % self.heads
        if self.head_dim == 0 and left:
            near = [n for n in (self.hidden - left, self.hidden - left + self.heads) if n]
            raise JobError(
                f"model.hidden: {self.hidden} / heads({self.heads}) leaves {left}; "
                f"use {listed(map(str, near))}, or give head_dim"
            )
        if self.heads % self.kv_heads:
            divisors = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise JobError(
                f"model.kv_heads: heads({self.heads}) / kv_heads({self.kv_heads}) leaves "
                f"{self.heads % self.kv_heads}; kv_heads must be {listed(divisors)}"
            )
        if self.rotary and self.head_width % 2:
            raise JobError(
                f"model.head_dim: {self.head_width} is odd, but rotary embeddings turn pairs of features; "
                f"use {self.head_width + 1}, or rotary = false"
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def q_width(self) -> int:
        """Features of q over all heads; also of the attention's output."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Features of k, and of v, over all key-value heads."""
        return self.kv_heads * self.head_width

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate and so three matrices."""
        return self.activation in {"swiglu", "geglu"}

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer."""
        return sum(t.count for t in tensors(self) if t.layer == 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of the learned positions."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and of the LM head; only the norm where the head is tied."""
        return sum(t.count for t in tensors(self) if t.layer == self.layers)

    @property
    def parameters(self) -> int:
        """All parameters, a tied matrix once."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.head_parameters

    @property
    def layer_matmul_parameters(self) -> int:
        """Elements of one layer's weight matrices: what each token is multiplied with."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def eager_hidden_copies(self) -> float:
        """Copies of a 16-bit hidden state that one layer holds at its peak when nothing is fused.

        Counted from the eager Hugging Face layer: a norm keeps its input in FP32 and its normalised output
        (3), each projection its input; the MLP's gate, activated gate, up, product and, at the peak in
        backward, the gradient of the product are five tensors of ffn_hidden. The fused kernels that are
        planned keep less: see `plan.blocks`.
        """
        q, kv = self.q_width / self.hidden, self.kv_width / self.hidden
        norms = 2 * 3 + (3 * (q + kv) if self.qk_norm else 0)
        inputs = 1 + 1 + q + 2 * kv + q  # of the projections, of the MLP; q, k, v; the attention's output
        return norms + inputs + (5 if self.gated else 3) * self.ffn_hidden / self.hidden

    def forward_flops_per_token(self, seq_len: int, convention: FlopConvention = "causal") -> int:
        """Matrix-product FLOPs of a forward pass per token, a multiply-add counted as two.

        As Megatron counts (training.py): 2 per weight-matrix element, head included, and for attention 4 s
        q_width per layer in full, half of it with a causal mask. Norms, activations, softmax and rotations
        are not counted.
        """
        whole("seq_len", seq_len)
        if convention == "6nd":
            return 2 * self.parameters
        flops = 2 * (self.layers * self.layer_matmul_parameters + self.hidden * self.vocab)
        attention = 2 if convention.startswith("causal") else 4
        flops += self.layers * attention * seq_len * self.q_width
        if convention.endswith("_with_embedding"):
            flops += 2 * self.hidden * self.vocab
        return flops

    def training_flops_per_token(self, seq_len: int, convention: FlopConvention = "causal") -> int:
        """FLOPs of forward and backward per token, backward counted as twice forward, nothing recomputed."""
        return 3 * self.forward_flops_per_token(seq_len, convention)

    def mfu(
        self,
        tokens_per_second_per_gpu: float,
        seq_len: int,
        peak_flops_per_second: float,
        convention: FlopConvention = "causal",
    ) -> float:
        """Model FLOPs utilisation as a fraction: the model's FLOP/s over the device's dense peak."""
        flops = self.training_flops_per_token(seq_len, convention)
        return tokens_per_second_per_gpu * flops / peak_flops_per_second


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's parameters begin with."""
    return f"model.layers.{layer}."


@lru_cache(maxsize=64)
def tensors(model: Model) -> tuple[Parameter, ...]:
    """Weight tensors in registration order: embedding, layers, final norm, head.

    Names and order are those of Hugging Face's Llama for every family (q, k, v and gate, up apart even where
    a family's checkpoint stores them as one matrix); shapes are (outputs, inputs). A tied head is not listed.
    """
    h = model.hidden
    out = [Parameter("model.embed_tokens.weight", (model.vocab, h), -1)]
    if model.learned_positions:
        out.append(Parameter("model.embed_positions.weight", (model.learned_positions, h), -1))
    for layer in range(model.layers):
        out += [Parameter(layer_prefix(layer) + name, shape, layer) for name, shape in layer_tensors(model)]
    out += [Parameter(f"model.{name}", shape, model.layers) for name, shape in _norm(model, "norm", h)]
    if not model.tied_embeddings:
        out.append(Parameter("lm_head.weight", (model.vocab, h), model.layers))
    return tuple(out)


def layer_tensors(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name (without the layer's prefix) and shape of each tensor of one layer, in registration order."""
    h, f, q, kv = model.hidden, model.ffn_hidden, model.q_width, model.kv_width
    out = [
        *_linear("self_attn.q_proj", q, h, model.attention_bias),
        *_linear("self_attn.k_proj", kv, h, model.attention_bias),
        *_linear("self_attn.v_proj", kv, h, model.attention_bias),
        *_linear("self_attn.o_proj", h, q, model.projection_bias),
    ]
    if model.qk_norm:
        out += _norm(model, "self_attn.q_norm", model.head_width)
        out += _norm(model, "self_attn.k_norm", model.head_width)
    if model.gated:
        out += _linear("mlp.gate_proj", f, h, model.mlp_bias)
    out += _linear("mlp.up_proj", f, h, model.mlp_bias)
    out += _linear("mlp.down_proj", h, f, model.mlp_bias)
    out += _norm(model, "input_layernorm", h)
    out += _norm(model, "post_attention_layernorm", h)
    return tuple(out)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    weight: list[tuple[str, tuple[int, ...]]] = [(f"{name}.weight", (outputs, inputs))]
    return [*weight, (f"{name}.bias", (outputs,))] if bias else weight


def _norm(model: Model, name: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
    weight: list[tuple[str, tuple[int, ...]]] = [(f"{name}.weight", (width,))]
    return [*weight, (f"{name}.bias", (width,))] if model.norm == "layernorm" else weight


def _catalogue() -> dict[str, Model]:
    text = resources.files("emulator.spec").joinpath("data/models.toml").read_text(encoding="utf-8")
    return {
        name: msgspec.convert({"name": name, **fields}, Model) for name, fields in tomllib.loads(text).items()
    }


MODELS: dict[str, Model] = _catalogue()
"""The catalogue by name."""

LLAMA2_7B = MODELS["llama2-7b"]
LLAMA2_13B = MODELS["llama2-13b"]
LLAMA2_70B = MODELS["llama2-70b"]
LLAMA3_8B = MODELS["llama3-8b"]
LLAMA3_70B = MODELS["llama3-70b"]
LLAMA3_405B = MODELS["llama3-405b"]
GPT3_175B = MODELS["gpt3-175b"]
MTNLG_530B = MODELS["mtnlg-530b"]
MEGATRON_1T = MODELS["megatron-1t"]


def model(name: str) -> Model:
    """Look up the catalogue's model of that name; JobError with the nearest names if there is none."""
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.4) or list(MODELS)
    raise JobError(
        f"model = {shown(name)} is not in the catalogue; did you mean {listed(close)}? "
        "(or give the path of a Hugging Face config.json)"
    )


def from_hf_config(path: str | Path) -> Model:
    """Read the model of a Hugging Face config.json; JobError if it is no dense decoder known here."""
    fields = hf_config.read(Path(path))
    try:
        return msgspec.convert(fields, Model)
    except msgspec.ValidationError as error:
        # Our own check, which msgspec wraps, says it better.
        raise JobError(f"{error.__cause__ or error} (in {path})") from None
