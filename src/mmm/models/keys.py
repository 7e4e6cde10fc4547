"""The sizes of language models in Hugging Face's files: which keys of a config.json mean what.

Some keys are read. Some must have the value that this model has, because another one would change the computation.
The others are passed over, as `transformers` passes over keys that it does not know, unless the name of a key has a
word of the computation (`WORDS`): such a key is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from mmm.errors import CheckpointError
from mmm.nn.rope import ROPE_KEYS
from mmm.outside import printable, short

READ = {
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    # Rotary positions.
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "tie_word_embeddings",
    "eos_token_id",
    "model_type",
}
# Keys that must have one of these values. If the value is a list, each of its elements must. None always counts as if
# the key were not there.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Biases that a Llama does not have.
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "attention_out_bias": (False,),
    "use_bias": (False,),
    # Another architecture of the block or of attention.
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "hidden_act": ("silu", "swish"),
    "layer_types": ("full_attention",),
    "sliding_window": (),
    "per_layer_config": (),
    # Encoders.
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    # Dropout.
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "embd_pdrop": (0,),
    "resid_pdrop": (0,),
    "attn_pdrop": (0,),
    # Experts: noise and a second loss in training, and layers without them.
    "router_jitter_noise": (0,),
    "output_router_logits": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    # GPT-2's attention.
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    # Factors and limits of activations.
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    # Weights that are stored in another way.
    "quantization_config": (),
    "compression_config": (),
    "transformers_weights": (),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
}
# Keys that no decoder uses, although their names have such a word.
UNUSED = {"cross_attention_hidden_size", "max_window_layers", "router_aux_loss_coef"}
# An unknown key with one of these words in its name may change the computation.
WORDS = {
    # Attention and positions.
    "attention",
    "attn",
    "qk",
    "qkv",
    "kv",
    "rope",
    "rotary",
    "position",
    "positional",
    "alibi",
    "window",
    "sliding",
    "swa",
    "causal",
    "bidirectional",
    "sink",
    "sinks",
    # Norms, factors and limits.
    "norm",
    "norms",
    "layernorm",
    "rmsnorm",
    "scale",
    "scales",
    "scaling",
    "scalar",
    "multiplier",
    "mup",
    "cap",
    "softcap",
    "softcapping",
    "clip",
    "clamp",
    # Layers and what is in them.
    "layer",
    "layers",
    "residual",
    "mlp",
    "ffn",
    "act",
    "activation",
    "bias",
    "dropout",
    "pdrop",
    "expert",
    "experts",
    "moe",
    "router",
    "routed",
    # Weights that are stored in another way.
    "quant",
    "quantization",
    "quantize",
    "quantized",
    "compression",
    "sparse",
    "adapter",
    "lora",
}
# With one of these words it does not: it only says which program computes the same thing.
PROGRAMS = {"implementation", "flash", "fused", "sdpa", "kernels"}
# Fields of a model's sizes, and the keys of a config.json that must be there for them.
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}


def check_keys(config: Mapping[str, Any], where: object, own_keys: Collection[str] = ()) -> None:
    """Check that no key of a config.json changes the computation.

    Args:
        where: the file, for error messages.
        own_keys: keys that the model reads besides the usual ones.

    Raises:
        CheckpointError: a key changes the computation, or its name says that it may.
    """
    known = READ | UNUSED | set(own_keys)
    for key, value in config.items():
        if key in known:
            continue
        if key in NEUTRAL:
            _check_neutral(key, value, where)
        elif value not in (None, [], {}, "") and _changes(key):
            unknown = f"{printable(key)} ({short(value)})"
            raise CheckpointError(f"{where} has the unknown key {unknown}: it may change the computation")


def _check_neutral(key: str, value: Any, where: object) -> None:
    """Raises CheckpointError if a key, or an element of its list, does not have a neutral value."""
    allowed = NEUTRAL[key]
    # A list of equal elements, one for each layer, counts as its element.
    one_value = value
    if isinstance(value, list) and value and all(element == value[0] for element in value):
        one_value = value[0]
    if value is None or one_value in allowed:
        return
    if allowed:
        reason = f"but this model has {allowed[0]!r}"
    else:
        reason = "which this model does not have"
    raise CheckpointError(f"{where}: {key} is {short(value)}, {reason}")


def _changes(key: str) -> bool:
    """Whether the name of an unknown key says that it may change the computation."""
    # Words end at underscores and dots, and where camelCase has a capital letter.
    tokens = {word.lower() for word in re.split("[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])", key)}
    return bool(tokens & WORDS) and not tokens & PROGRAMS


def read_sizes(
    config: Mapping[str, Any],
    where: object,
    own_keys: Collection[str] = (),
    theta: float = 10_000.0,
) -> dict[str, Any]:
    """Read the usual sizes from a config.json of Hugging Face.

    Args:
        where: the file, for error messages.
        own_keys: keys that the model reads besides the usual ones.
        theta: ``rope_theta`` of a config that does not have it.

    Returns:
        The fields of the model's sizes, ``head_dim`` among them.

    Raises:
        CheckpointError: a key is missing, or changes the computation, or may change it.
    """
    check_keys(config, where, own_keys)
    sizes = read_counts(config, where, SIZES)
    _check_values(config, where)
    sizes["n_kv_heads"] = config.get("num_key_value_heads") or sizes["n_heads"]
    sizes["head_dim"] = config.get("head_dim") or sizes["dim"] // sizes["n_heads"]
    sizes["rope_theta"], sizes["rope_scaling"] = _rotary(config, where, theta)
    sizes["norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    sizes["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    return sizes


def written_sizes(config: Any) -> dict[str, Any]:
    """The reverse of `read_sizes`: the keys of a config.json for the usual sizes, except ``rope_scaling``."""
    return {
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "intermediate_size": config.hidden_dim,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def read_counts(config: Mapping[str, Any], where: object, keys: Mapping[str, str]) -> dict[str, Any]:
    """Read whole numbers that must be there.

    Args:
        keys: field of a model's sizes → key of a config.json.

    Raises:
        CheckpointError: a key is missing, or its value is not a whole number.
    """
    missing = [key for key in keys.values() if key not in config]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    for key in keys.values():
        _check_count(key, config[key], where)
    return {field: config[key] for field, key in keys.items()}


def _check_count(key: str, value: Any, where: object) -> None:
    # Not isinstance, which takes True for an int.
    if type(value) is not int or not 1 <= value < 1 << 63:
        raise CheckpointError(f"{where}: {key} is {short(value)}, which is not a whole number of 1 to 63 bits")


def check_number(key: str, value: Any, where: object) -> None:
    """Raises CheckpointError if the value of a key is not a number."""
    # An int may be too large for a float.
    if type(value) not in (int, float) or not abs(value) < 1 << 63:
        raise CheckpointError(f"{where}: {key} is {short(value)}, which is not a number of at most 63 bits")


def _check_values(config: Mapping[str, Any], where: object) -> None:
    """Raises CheckpointError if a key that is read has a value of the wrong type."""
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"):
        value = config.get(key)
        if value is not None:
            _check_count(key, value, where)
    for key, kind, name in (
        ("rope_parameters", Mapping, "a mapping"),
        ("rope_scaling", Mapping, "a mapping"),
        ("tie_word_embeddings", bool, "true or false"),
    ):
        if not isinstance(config.get(key), (kind, type(None))):
            raise CheckpointError(f"{where}: {key} is {short(config[key])}, and has to be {name}")
    floats = [("rope_theta", theta) for theta in _thetas(config)]
    floats.append(("rms_norm_eps", config.get("rms_norm_eps", 1e-6)))
    for key, value in floats:
        check_number(key, value, where)
    tokens_of(config, "eos_token_id", where)


def _thetas(config: Mapping[str, Any]) -> list[Any]:
    """Every value that a config gives to ``rope_theta``, in one of three places."""
    thetas = []
    for section in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        if section and section.get("rope_theta") is not None:
            thetas.append(section["rope_theta"])
    return thetas


def tokens_of(about: Mapping[str, Any], key: str, where: object) -> tuple[int, ...]:
    """The tokens that a key names: one, a list of them, or none.

    Raises:
        CheckpointError: the value is neither a token nor a list of tokens.
    """
    value = about.get(key)
    if value is None:
        return ()
    tokens = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in tokens):
        raise CheckpointError(f"{where}: {key} is {short(value)}, which is neither a token nor a list of tokens")
    return tuple(tokens)


def _rotary(config: Mapping[str, Any], where: object, default: float) -> tuple[float, dict[str, Any] | None]:
    """Read how rotary positions are made. Older files have keys of their own for it, newer ones ``rope_parameters``.

    Args:
        default: ``rope_theta``, where the config has none.

    Returns:
        ``rope_theta``; and ``rope_scaling``, without keys that its rope_type does not take, or None.
    """
    sections = {
        "rope_parameters": dict(config.get("rope_parameters") or {}),
        "rope_scaling": dict(config.get("rope_scaling") or {}),
    }
    thetas = set(_thetas(config))
    length = config.get("original_max_position_embeddings")
    for name, section in sections.items():
        # Older files call rope_type "type". A file that has both, with different values, keeps both.
        if "type" in section and section.setdefault("rope_type", section["type"]) == section["type"]:
            del section["type"]
        section.pop("rope_theta", None)
        if section.get("partial_rotary_factor") in (*NEUTRAL["partial_rotary_factor"], None):
            section.pop("partial_rotary_factor", None)
        kind = section.get("rope_type")
        if kind == "llama3":
            own_length = section.setdefault("original_max_position_embeddings", length)
            if length not in (None, own_length):
                raise CheckpointError(f"{where}: original_max_position_embeddings is {length}, and another in {name}")
        # RopeScaling refuses any other value, also one that cannot be looked up, such as a list.
        if not isinstance(kind, str) or kind not in ROPE_KEYS:
            continue
        read = (*ROPE_KEYS[kind], "type", "rope_type", "partial_rotary_factor")
        sections[name] = {key: value for key, value in section.items() if key in read}

    parameters = sections["rope_parameters"]
    scaling = sections["rope_scaling"]
    if len(thetas) > 1 or (parameters and scaling and parameters != scaling):
        raise CheckpointError(f"{where}: rope_parameters says something else than rope_theta and rope_scaling")
    scaling = parameters or scaling
    theta = float(max(thetas, default=default))
    if scaling in ({}, {"rope_type": "default"}):
        return theta, None
    return theta, scaling
