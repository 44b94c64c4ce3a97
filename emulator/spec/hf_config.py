"""Reads the config.json of a Hugging Face checkpoint into the fields of a Model."""

import json
from pathlib import Path

from emulator.spec.errors import JobError

Fields = dict[str, object]

_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "opt")
_ACTIVATIONS = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu",
}  # fmt: skip
"""Gated families name the function of the gate."""
_UNGATED = {
    "gelu": "gelu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "relu": "relu",
}  # fmt: skip
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def read(path: Path) -> Fields:
    """Fields of `spec.model.Model` from a config.json.

    Raises JobError where the file cannot be read or describes something other than a dense decoder of a
    family whose layer is known exactly.
    """
    config = _load(path)
    kind = config.get("model_type")
    where = f"model: {path}"
    if config.get("is_encoder_decoder"):
        raise JobError(f"{where}: model_type {kind!r} has an encoder; only decoder-only models are emulated")
    experts = [key for key in _EXPERT_KEYS if config.get(key)]
    if experts:
        raise JobError(
            f"{where}: {experts[0]} = {config[experts[0]]} makes it a mixture of experts; only dense "
            "models are emulated so far"
        )
    if kind not in _DECODERS:
        raise JobError(
            f"{where}: model_type {kind!r} is not one of {', '.join(_DECODERS)}; a [model] table in the job "
            "takes any dense shape"
        )
    reader = {"gpt2": _gpt2, "opt": _opt}.get(kind, _llama_like)
    name = config.get("_name_or_path")
    stem = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return {
        "name": name if isinstance(name, str) and name else stem.removesuffix("_config"),
        "source": str(path),
        **reader(config, where),
    }


def _load(path: Path) -> Fields:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise JobError(f"model: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise JobError(f"model: {path} is not a text file") from None
    except json.JSONDecodeError as error:
        raise JobError(f"model: {path} line {error.lineno} is not JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise JobError(f"model: {path} has a value that is nested too deep or has too many digits") from None
    if not isinstance(config, dict):
        raise JobError(f"model: {path} holds no JSON object, but a config.json is one")
    return config


def _integer(config: Fields, key: str, where: str, default: int | None = None) -> int:
    """Read a whole number; a missing or null one takes the default if there is one."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise JobError(f"{where}: {key} is missing; a {config['model_type']} config has it")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise JobError(f"{where}: {key} = {value!r} must be a whole number")
    return value


def _flag(config: Fields, key: str, where: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise JobError(f"{where}: {key} = {value!r} must be true or false")
    return value


def _activation(config: Fields, key: str, where: str, default: str, known: dict[str, str]) -> str:
    value = config.get(key, default) or default
    if not isinstance(value, str) or value not in known:
        raise JobError(f"{where}: {key} = {value!r} is not one of {', '.join(known)}")
    return known[value]


def _llama_like(config: Fields, where: str) -> Fields:
    """Llama and the families that share its layer: RMSNorm, rotary, gated MLP, grouped key-value heads."""
    kind = config["model_type"]
    _refuse_window(config, where)
    heads = _integer(config, "num_attention_heads", where)
    # Llama's and Qwen3's flag puts a bias on all four projections; Qwen2 always has one on q, k and v alone.
    bias = _flag(config, "attention_bias", where, default=False)
    # Gemma's activation is in hidden_activation in newer files; the old field's "gelu" means the same there.
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    default_act = "gelu_pytorch_tanh" if kind == "gemma" else "silu"
    return {
        "layers": _integer(config, "num_hidden_layers", where),
        "hidden": _integer(config, "hidden_size", where),
        "ffn_hidden": _integer(config, "intermediate_size", where),
        "heads": heads,
        "kv_heads": _integer(config, "num_key_value_heads", where, default=heads),
        # The classes' own defaults where the file leaves it out.
        "head_dim": _integer(
            config, "head_dim", where, default={"qwen3": 128, "gemma": 256}.get(str(kind), 0)
        ),
        "vocab": _integer(config, "vocab_size", where),
        "activation": _activation(config, key, where, default_act, _ACTIVATIONS),
        "attention_bias": bias or kind == "qwen2",
        "projection_bias": bias and kind != "qwen2",
        "mlp_bias": _flag(config, "mlp_bias", where, default=False),
        "qk_norm": kind == "qwen3",
        "tied_embeddings": _flag(config, "tie_word_embeddings", where, default=kind == "gemma"),
    }


def _refuse_window(config: Fields, where: str) -> None:
    """Windowed attention costs less than the causal attention that is planned."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return
    size = _integer(config, "sliding_window", where)
    longest = _integer(config, "max_position_embeddings", where)
    if size < longest:
        raise JobError(
            f"{where}: sliding_window = {size} is shorter than max_position_embeddings = {longest}; windowed "
            "attention is not emulated: set sliding_window to null for full causal attention, which is the "
            f"same up to seq_len = {size}"
        )


def _gpt2(config: Fields, where: str) -> Fields:
    """GPT-2: LayerNorm, learned positions, biases everywhere, head tied to the embedding."""
    hidden = _integer(config, "n_embd", where)
    heads = _integer(config, "n_head", where)
    return {
        "layers": _integer(config, "n_layer", where),
        "hidden": hidden,
        "ffn_hidden": _integer(config, "n_inner", where, default=4 * hidden),
        "heads": heads,
        "kv_heads": heads,
        "vocab": _integer(config, "vocab_size", where),
        "activation": _activation(config, "activation_function", where, "gelu_new", _UNGATED),
        "learned_positions": _integer(config, "n_positions", where),
        "tied_embeddings": _flag(config, "tie_word_embeddings", where, default=True),
        **_GPT_LAYER,
    }


def _opt(config: Fields, where: str) -> Fields:
    """OPT: as GPT-2 with ReLU, and two more position rows than positions."""
    hidden = _integer(config, "hidden_size", where)
    heads = _integer(config, "num_attention_heads", where)
    projected = _integer(config, "word_embed_proj_dim", where, default=hidden)
    if projected != hidden:
        raise JobError(
            f"{where}: word_embed_proj_dim = {projected} differs from hidden_size = {hidden}; an embedding "
            "of another width is not emulated"
        )
    for key in ("do_layer_norm_before", "enable_bias"):
        if not _flag(config, key, where, default=True):
            raise JobError(f"{where}: {key} = false is a layer that is not emulated; only true is")
    return {
        "layers": _integer(config, "num_hidden_layers", where),
        "hidden": hidden,
        "ffn_hidden": _integer(config, "ffn_dim", where),
        "heads": heads,
        "kv_heads": heads,
        "vocab": _integer(config, "vocab_size", where),
        "activation": _activation(config, "activation_function", where, "relu", _UNGATED),
        "learned_positions": _integer(config, "max_position_embeddings", where) + 2,
        "tied_embeddings": _flag(config, "tie_word_embeddings", where, default=True),
        **_GPT_LAYER,
    }


_GPT_LAYER: Fields = {
    "norm": "layernorm",
    "rotary": False,
    "attention_bias": True,
    "projection_bias": True,
    "mlp_bias": True,
}
