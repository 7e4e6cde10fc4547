"""The sizes of language models elsewhere: which keys of a config.json mean what.

A key is read; or must have the value that this model has, because another one would change the computation; or says
nothing of the computation. What is none of these is passed over and named, as `transformers` passes over keys that it
does not know; unless its name has a word of the computation (`WORDS`): then it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from mmm.errors import CheckpointError
from mmm.outside import LONGEST_SHOWN, printable, short

MOST_NOTED = 40  # keys
READ = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "head_dim"),
    *("max_position_embeddings", "original_max_position_embeddings", "eos_token_id", "model_type"),
)
# Keys that must have one of these values; of a list, each of its elements. None, where it is not among them, is as if
# the key were not there.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "attention_out_bias", "use_bias"), (False,)),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "use_parallel_residual"), (False,)),
    **dict.fromkeys(("use_sliding_window", "use_bidirectional_attention", "rope_interleaved"), (False,)),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"), (0,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("sliding_window", "quantization_config", "compression_config", "transformers_weights"), ()),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "per_layer_config"), ()),
    "hidden_act": ("silu", "swish"),
    "layer_types": ("full_attention",),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
# Keys that say nothing of the logits, and that so many files have that nobody needs to be told.
HARMLESS = {
    *("architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range"),
    *("bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "_name_or_path", "name_or_path"),
    *("is_llama_config", "transformers.js_config", "return_dict", "output_hidden_states", "output_attentions"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix"),
    *("torchscript", "use_bfloat16", "chunk_size_feed_forward", "auto_map", "cross_attention_hidden_size"),
    *("tie_encoder_decoder", "bos_token", "eos_token", "max_window_layers"),
}
# By which an unknown key may change the computation, and by which it does not all the same: it then says which program
# computes it.
WORDS = {
    *("attention", "attn", "rope", "rotary", "position", "positional", "alibi", "window", "sliding", "swa", "causal"),
    *("bidirectional", "sink", "sinks", "norm", "norms", "layernorm", "rmsnorm", "scale", "scales", "scaling"),
    *("scalar", "multiplier", "mup", "cap", "softcap", "softcapping", "clip", "clamp", "expert", "experts", "moe"),
    *("router", "routed", "quant", "quantization", "quantize", "quantized", "compression", "act", "activation", "bias"),
    *("residual", "qk", "qkv", "kv", "layer", "layers", "mlp", "ffn", "dropout", "pdrop", "adapter", "lora", "sparse"),
}
PROGRAMS = {"implementation", "flash", "fused", "sdpa", "kernels"}
ROPE_KEYS: dict[str, tuple[str, ...]] = {  # what each rope_type takes, as models.rope has them
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
SIZES = {  # fields of a model's sizes, and their keys there, which a config must have
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}


def unknown_keys(config: Mapping[str, Any], where: object, own_keys: Collection[str] = ()) -> list[str]:
    """The keys of a config.json that are passed over.

    Args:
        where: the file, for messages.
        own_keys: that the model reads besides the usual ones.

    Raises:
        CheckpointError: a key changes the computation, or may, by its name.
    """
    passed_over = []
    for key, value in config.items():
        if key in READ or key in HARMLESS or key in own_keys:
            continue
        if key in NEUTRAL:
            _check_neutral(key, value, where)
        elif value not in (None, [], {}, "") and _changes(key):
            unknown = f"{printable(key)} ({short(value)})"
            raise CheckpointError(f"{where} has the unknown key {unknown}: it may change the computation")
        else:
            passed_over.append(printable(key))
    return passed_over


def _check_neutral(key: str, value: Any, where: object) -> None:
    """Raises CheckpointError where a key, or an element of its list, has none of its neutral values."""
    allowed = NEUTRAL[key]
    one_value = value
    if isinstance(value, list) and value and all(element == value[0] for element in value):
        one_value = value[0]
    if value is None or one_value in allowed:
        return
    if allowed:
        reason = f"which this model has not; {allowed[0]!r} is"
    else:
        reason = "and is not read"
    raise CheckpointError(f"{where}: {key} is {short(value)}, {reason}")


def _changes(key: str) -> bool:
    words = {word.lower() for word in re.split("[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])", key)}
    return bool(words & WORDS) and not words & PROGRAMS


def note_of(passed_over: Collection[str]) -> list[str]:
    """For people."""
    names = [name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…" for name in passed_over]
    more = [f"and {len(names) - MOST_NOTED} more"] if len(names) > MOST_NOTED else []
    text = ", ".join([*names[:MOST_NOTED], *more])
    return [f"passed over, without effect on the computation: {text}"] if names else []


def read_sizes(
    config: Mapping[str, Any], where: object, own_keys: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The usual sizes of a config.json of Hugging Face, ``head_dim`` among them, and the keys that are passed over.

    Args:
        where: its file, for messages.
        own_keys: that the model reads besides.

    Raises:
        CheckpointError: a key that is missing, or that changes the computation, or may.
    """
    missing = [key for key in SIZES.values() if key not in config]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    passed_over = unknown_keys(config, where, own_keys)
    sizes: dict[str, Any] = {field: config[key] for field, key in SIZES.items()}
    _check_values(config, where)
    sizes["n_kv_heads"] = config.get("num_key_value_heads") or sizes["n_heads"]
    sizes["head_dim"] = config.get("head_dim") or sizes["dim"] // sizes["n_heads"]
    sizes["rope_theta"], sizes["rope_scaling"], useless = _rotary(config, where)
    sizes["norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    sizes["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    return sizes, passed_over + useless


def written_sizes(config: Any) -> dict[str, Any]:
    """The reverse of `read_sizes`: keys of a config.json of the usual sizes, but for ``rope_scaling``."""
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


def _check_values(config: Mapping[str, Any], where: object) -> None:
    """Raises CheckpointError where a key that is read has a value of another type."""
    for key in (*SIZES.values(), "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"):
        value = config.get(key)
        if (value is not None or key in SIZES.values()) and (type(value) is not int or value < 1):
            raise CheckpointError(f"{where}: {key} is {short(value)}, which is no number of anything")
    for key, kind, name in (
        ("rope_parameters", Mapping, "a mapping"),
        ("rope_scaling", Mapping, "a mapping"),
        ("tie_word_embeddings", bool, "true or false"),
    ):
        if not isinstance(config.get(key), (kind, type(None))):
            raise CheckpointError(f"{where}: {key} is {short(config[key])}, and has to be {name}")
    thetas = [config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
    numbers = [("rope_theta", of["rope_theta"]) for of in thetas if of.get("rope_theta") is not None]
    for key, value in [*numbers, ("rms_norm_eps", config.get("rms_norm_eps", 1e-6))]:
        if type(value) not in (int, float):
            raise CheckpointError(f"{where}: {key} is {short(value)}, which is no number")
    tokens_of(config, "eos_token_id", where)


def tokens_of(about: Mapping[str, Any], key: str, where: object) -> tuple[int, ...]:
    """The tokens that a key says: one, a list of them, or none.

    Raises:
        CheckpointError: it says something else.
    """
    value = about.get(key)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise CheckpointError(f"{where}: {key} is {short(value)}, which is no token, and no list of tokens")
    return tuple(tokens)


def _rotary(config: Mapping[str, Any], where: object) -> tuple[float, dict[str, Any] | None, list[str]]:
    """``rope_theta``, ``rope_scaling`` where a config says one, and what of it is passed over: keys that its rope_type
    does not take. Both are said by keys of their own, or in ``rope_parameters``."""
    rope, scaling = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    thetas = {of["rope_theta"] for of in (rope, scaling, config) if of.get("rope_theta") is not None}
    passed_over = []
    for name, each in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if "type" in each and each.setdefault("rope_type", each["type"]) == each["type"]:  # its name in older configs
            del each["type"]
        each.pop("rope_theta", None)
        if each.get("partial_rotary_factor") in (*NEUTRAL["partial_rotary_factor"], None):
            each.pop("partial_rotary_factor", None)
        kind = each.get("rope_type")
        length = config.get("original_max_position_embeddings")
        if kind == "llama3" and length not in (None, each.setdefault("original_max_position_embeddings", length)):
            raise CheckpointError(f"{where}: original_max_position_embeddings is {length}, and another in {name}")
        for key in [key for key in each if key not in ("type", "rope_type", "partial_rotary_factor")]:
            if kind in ROPE_KEYS and key not in ROPE_KEYS[kind]:
                del each[key]
                passed_over.append(f"{name}.{key}")
    if len(thetas) > 1 or (rope and scaling and rope != scaling):
        raise CheckpointError(f"{where}: rope_parameters says something else than rope_theta and rope_scaling")
    scaling = rope or scaling
    if scaling in ({}, {"rope_type": "default"}):
        scaling = {}
    return float(max(thetas, default=10_000.0)), scaling or None, passed_over
