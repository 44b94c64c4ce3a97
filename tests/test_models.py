"""Models: exact parameter counts, FLOP conventions, Hugging Face configs, and what is refused."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.spec.errors import JobError
from emulator.spec.model import (
    FLOP_CONVENTIONS,
    MODELS,
    Model,
    from_hf_config,
    layer_prefix,
    layer_tensors,
    model,
    tensors,
)

LLAMA3_8B_CONFIG = Path(__file__).parents[1] / "scenarios" / "data" / "llama3_8b_config.json"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_parameters_are_exact_to_the_last_one(name: str, count: int) -> None:
    """Released configurations; the sum over tensors says the same."""
    assert model(name).parameters == count
    assert sum(t.count for t in tensors(model(name))) == count


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-175b", 174.6), ("mtnlg-530b", 529.6), ("megatron-1t", 1008.0)]
)
def test_gpt_family_parameters(name: str, billions: float) -> None:
    """Papers give these to a tenth of a billion."""
    assert round(model(name).parameters / 1e9, 1) == billions


def test_gpt_layer_is_twelve_h_squared_and_thirteen_h() -> None:
    """Megatron (arXiv 2104.04473): P = 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)), and a final norm of 2h."""
    m = model("megatron-1t")
    h = m.hidden
    assert m.layer_parameters == 12 * h * h + 13 * h
    assert m.parameters == m.layers * m.layer_parameters + (m.vocab + m.learned_positions) * h + 2 * h


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up(name: str) -> None:
    m = model(name)
    assert m.parameters == m.embedding_parameters + m.layers * m.layer_parameters + m.head_parameters
    assert m.source
    assert m.training_tokens > 0


def test_registration_order() -> None:
    """Embedding, then layers, then final norm and head; names as Hugging Face has them."""
    m = model("llama3-8b")
    all_of = tensors(m)
    assert all_of[0].name == "model.embed_tokens.weight"
    assert [t.name for t in all_of[-2:]] == ["model.norm.weight", "lm_head.weight"]
    assert [layer for layer, _ in groupby(all_of, key=lambda t: t.layer)] == list(range(-1, m.layers + 1))
    assert [t.name for t in all_of if t.layer == 3] == [layer_prefix(3) + n for n, _ in layer_tensors(m)]
    assert all_of[2].shape == (1024, 4096)
    assert len({t.name for t in all_of}) == len(all_of) == 1 + 32 * 9 + 2


@pytest.mark.parametrize(
    ("name", "seq_len", "flops"),
    [
        ("llama3-8b", 8192, 5.15e10),
        ("llama3-70b", 8192, 4.49e11),
        ("llama3-405b", 8192, 2.524e12),
        ("llama2-7b", 4096, 4.29e10),
        ("llama2-70b", 4096, 4.28e11),
    ],
)
def test_training_flops_per_token(name: str, seq_len: int, flops: float) -> None:
    """Causal, nothing recomputed."""
    digits = len(f"{flops:g}".split("e")[0].replace(".", "")) - 1
    assert f"{model(name).training_flops_per_token(seq_len):.{digits}e}" == f"{flops:.{digits}e}"


def test_six_n_of_405b() -> None:
    """6N alone is 2.435e12, and 16.78M tokens take 6.46 s at 400 TFLOP/s on 16,384 GPUs."""
    m = model("llama3-405b")
    assert m.training_flops_per_token(8192, "6nd") == 6 * m.parameters
    assert round(2048 * 8192 * m.training_flops_per_token(8192) / (16_384 * 400e12), 2) == 6.46


def test_mfu_conventions_of_one_run() -> None:
    """Both figures printed for torchtitan's 5,762 tokens/s count the input embedding as a matrix product."""
    m = model("llama3-8b")
    mfu = {c: round(100 * m.mfu(5762, 8192, 989e12, c), 1) for c in FLOP_CONVENTIONS}
    assert mfu["full_attention_with_embedding"] == 35.6
    assert mfu["causal_with_embedding"] == 31.8
    assert mfu["full_attention"] == 33.7
    assert mfu["causal"] == 30.0
    assert mfu["6nd"] == 28.1


def test_narayanan_formula() -> None:
    """96 B s L h^2 (1 + s/6h + V/16Lh) counts the mask in full and four passes."""
    m = model("gpt3-175b")
    s, layers, h = 2048, m.layers, m.hidden
    paper = 96 * s * layers * h * h * (1 + s / (6 * h) + m.vocab / (16 * layers * h))
    ours = s * m.forward_flops_per_token(s, "full_attention")
    # The paper's head term is 6 B s h V in all: three passes of it, four of the layers.
    assert 4 * ours - 2 * s * h * m.vocab == pytest.approx(paper, rel=1e-12)


@given(
    name=st.sampled_from(sorted(MODELS)),
    seq_len=st.integers(1, 10**6),
)
def test_conventions_are_ordered(name: str, seq_len: int) -> None:
    """Full attention counts exactly one more causal attention; the embedding exactly one more head."""
    m = model(name)
    f = {c: m.forward_flops_per_token(seq_len, c) for c in FLOP_CONVENTIONS}
    assert f["full_attention"] - f["causal"] == 2 * m.layers * seq_len * m.q_width
    assert f["causal_with_embedding"] - f["causal"] == 2 * m.hidden * m.vocab
    assert m.training_flops_per_token(seq_len) == 3 * f["causal"]


# Measured by stas00 on eager layers.
EAGER = [
    (28.0, {"hidden": 4096, "ffn_hidden": 14336, "heads": 32, "kv_heads": 8}),
    (24.0, {"hidden": 960, "ffn_hidden": 2560, "heads": 15, "kv_heads": 5}),
    (
        29.8,
        {"hidden": 4096, "ffn_hidden": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "qk_norm": True},
    ),
    (
        38.0,
        {"hidden": 2560, "ffn_hidden": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "qk_norm": True},
    ),
    (48.0, {"hidden": 2048, "ffn_hidden": 16384, "heads": 8, "kv_heads": 1, "head_dim": 256}),
]


@pytest.mark.parametrize(("measured", "shape"), EAGER)
def test_hidden_state_copies_follow_from_the_shape(measured: float, shape: dict[str, Any]) -> None:
    """stas00/ml-engineering: Llama-3.1-8B, SmolLM2-360M, Qwen3-8B and 4B, gemma-2b, within 5 %."""
    assert Model(name="m", layers=1, vocab=1, **shape).eager_hidden_copies == pytest.approx(
        measured, rel=0.05
    )


def write(folder: Path, **config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_the_shipped_config_is_llama3_8b() -> None:
    read, known = from_hf_config(LLAMA3_8B_CONFIG), model("llama3-8b")
    assert [(t.name, t.shape) for t in tensors(read)] == [(t.name, t.shape) for t in tensors(known)]
    assert read.name == "llama3_8b"


def decoder(
    kind: str, h: int, layers: int, heads: tuple[int, int], f: int, v: int, **more: object
) -> dict[str, object]:
    """Fields that the Llama-like families share."""
    return {
        "model_type": kind,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": f,
        "vocab_size": v,
        "hidden_act": "silu",
        **more,
    }


LLAMA = decoder("llama", 2048, 16, (32, 8), 8192, 128256)
TIED = {"tie_word_embeddings": True}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 32768}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
OPT = {
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}

# Counts that the publishers' checkpoints have.
PUBLISHED = {
    "Llama 3.2 1B": (1_235_814_400, {**LLAMA, "head_dim": 64, **TIED}),
    "Mistral 7B": (7_241_732_096, decoder("mistral", 4096, 32, (32, 8), 14336, 32000, sliding_window=None)),
    "Qwen2.5 0.5B": (494_032_768, decoder("qwen2", 896, 24, (14, 2), 4864, 151936, **TIED, **NO_WINDOW)),
    "Qwen3 0.6B": (596_049_920, decoder("qwen3", 1024, 28, (16, 8), 3072, 151936, **TIED)),
    "Gemma 2B": (2_506_172_416, {**decoder("gemma", 2048, 18, (8, 1), 16384, 256000), "hidden_act": "gelu"}),
    "GPT-2": (124_439_808, GPT2),
    "OPT 125M": (125_239_296, OPT),
}


@pytest.mark.parametrize("which", PUBLISHED)
def test_configs_give_the_published_counts(tmp_path: Path, which: str) -> None:
    count, config = PUBLISHED[which]
    assert from_hf_config(write(tmp_path, **config)).parameters == count


def without(key: str) -> dict[str, object]:
    return {k: v for k, v in LLAMA.items() if k != key}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LLAMA, "model_type": "mixtral", "num_local_experts": 8}, "num_local_experts = 8"),
        ({**LLAMA, "model_type": "t5", "is_encoder_decoder": True}, "has an encoder"),
        ({**LLAMA, "model_type": "mamba"}, "'mamba' is not one of llama"),
        ({"hidden_size": 5}, "model_type None"),
        ({**LLAMA, "model_type": ["llama"]}, "is not one of llama"),
        (without("intermediate_size"), "intermediate_size is missing"),
        ({**LLAMA, "hidden_size": "big"}, "hidden_size = 'big' must be a whole number"),
        ({**LLAMA, "hidden_size": True}, "hidden_size = True must be a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "model.layers = 0 must be at least 1"),
        ({**LLAMA, "num_key_value_heads": 5}, "heads(32) / kv_heads(5) leaves 2"),
        ({**LLAMA, "hidden_act": "tanh"}, "hidden_act = 'tanh' is not one of silu"),
        ({**OPT, "word_embed_proj_dim": 512}, "word_embed_proj_dim = 512 differs"),
        ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before = false"),
        ({**LLAMA, "mlp_bias": "no"}, "mlp_bias = 'no' must be true or false"),
        (
            {**LLAMA, "sliding_window": 4096, "max_position_embeddings": 32768},
            "sliding_window = 4096 is shorter",
        ),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, object], says: str) -> None:
    """One line that names the field, the value and the file."""
    with pytest.raises(JobError) as refused:
        from_hf_config(write(tmp_path, **config))
    message = str(refused.value)
    assert says in message
    assert str(tmp_path) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "line 1 is not JSON"), (b"[]", "no JSON object"), (b"\xff\xfe{", "not a text")],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(JobError, match=says):
        from_hf_config(path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read .*No such file"):
        from_hf_config(tmp_path / "config.json")


def test_unknown_name_lists_close_ones() -> None:
    with pytest.raises(JobError, match=r'"llama3-7b" is not in the catalogue; did you mean .*llama3-70b'):
        model("llama3-7b")


SHAPE: dict[str, Any] = {
    "name": "m", "layers": 2, "hidden": 64, "ffn_hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "model.layers = 0 must be at least 1"),
        ({"vocab": 1.5}, "model.vocab = 1.5 must be a whole number"),
        ({"hidden": 66}, r"model.hidden: 66 / heads\(4\) leaves 2; use 64 or 68"),
        ({"hidden": 3}, r"leaves 3; use 4,"),
        ({"kv_heads": 3}, r"leaves 1; kv_heads must be 1, 2 or 4"),
        ({"head_dim": 15}, "15 is odd"),
        ({"head_dim": -2}, "model.head_dim = -2"),
        ({"activation": "tanh"}, "model.activation"),
        ({"training_tokens": float("nan")}, "model.training_tokens"),
        ({"rotary": "yes"}, "model.rotary"),
    ],
)
def test_shapes_that_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        Model(**{**SHAPE, **change})


@given(
    heads=st.integers(1, 16),
    groups=st.integers(1, 4),
    head_dim=st.integers(1, 64).map(lambda n: 2 * n),
    flags=st.tuples(*[st.booleans()] * 5),
    activation=st.sampled_from(["swiglu", "geglu", "gelu", "relu"]),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
)
def test_matrices_and_vectors_make_up_a_layer(
    heads: int, groups: int, head_dim: int, flags: tuple[bool, ...], activation: Any, norm: Any
) -> None:
    """Whatever the shape, a layer's matrices are what FLOPs count, and the rest is biases and norms."""
    qkv, out, mlp, qk, tied = flags
    m = Model(
        name="m", layers=3, hidden=48, ffn_hidden=96, heads=heads * groups, kv_heads=heads, head_dim=head_dim,
        vocab=50, activation=activation, norm=norm, attention_bias=qkv, projection_bias=out, mlp_bias=mlp,
        qk_norm=qk, tied_embeddings=tied,
    )  # fmt: skip
    of_layer = [t for t in tensors(m) if t.layer == 1]
    assert sum(t.count for t in of_layer if len(t.shape) == 2) == m.layer_matmul_parameters
    assert m.parameters == sum(t.count for t in tensors(m))
    assert any(t.name == "lm_head.weight" for t in tensors(m)) is not tied
