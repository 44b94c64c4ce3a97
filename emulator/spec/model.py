"""A dense decoder-only transformer."""

from typing import Literal

import msgspec


class Parameter(msgspec.Struct, frozen=True):
    """One weight tensor."""

    name: str
    shape: tuple[int, ...]
    layer: int
    """Index of the transformer layer; -1 for the embedding, `layers` for final norm and head."""

    @property
    def count(self) -> int:
        """Number of elements."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a dense decoder. Parameter counts are exact to the last one."""

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 0
    """0 means hidden / heads."""
    vocab: int
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    rotary: bool = True
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 for none."""
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    projection_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    tied_embeddings: bool = False
    source: str = ""
