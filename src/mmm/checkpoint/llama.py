"""The Llama family elsewhere: what its tensors and the keys of its config are called, and the order of its heads' rows.

Rotary positions rotate pairs of a head's elements. In this package, as in Meta's and in GGUF's files, element 2i goes
with 2i + 1; in Hugging Face's, element i goes with i + head_dim / 2. So the rows of wq and wk have another order there
(head_dim 8)::

    here    0 1 2 3 4 5 6 7
    there   0 4 1 5 2 6 3 7     row of the same head that it is there
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmm.checkpoint.weights import TensorEntry
from mmm.errors import CheckpointError


class Names(NamedTuple):
    hugging_face: str
    gguf: str


# By the name in this package; * stands for a layer's number.
NAMES = {
    "tok_embeddings.weight": Names("model.embed_tokens.weight", "token_embd.weight"),
    "layers.*.attention_norm.weight": Names("model.layers.*.input_layernorm.weight", "blk.*.attn_norm.weight"),
    "layers.*.attention.wq.weight": Names("model.layers.*.self_attn.q_proj.weight", "blk.*.attn_q.weight"),
    "layers.*.attention.wk.weight": Names("model.layers.*.self_attn.k_proj.weight", "blk.*.attn_k.weight"),
    "layers.*.attention.wv.weight": Names("model.layers.*.self_attn.v_proj.weight", "blk.*.attn_v.weight"),
    "layers.*.attention.wo.weight": Names("model.layers.*.self_attn.o_proj.weight", "blk.*.attn_output.weight"),
    "layers.*.ffn_norm.weight": Names("model.layers.*.post_attention_layernorm.weight", "blk.*.ffn_norm.weight"),
    "layers.*.feed_forward.w1.weight": Names("model.layers.*.mlp.gate_proj.weight", "blk.*.ffn_gate.weight"),
    "layers.*.feed_forward.w2.weight": Names("model.layers.*.mlp.down_proj.weight", "blk.*.ffn_down.weight"),
    "layers.*.feed_forward.w3.weight": Names("model.layers.*.mlp.up_proj.weight", "blk.*.ffn_up.weight"),
    "norm.weight": Names("model.norm.weight", "output_norm.weight"),
    "output.weight": Names("lm_head.weight", "output.weight"),
}
ROTATED = ("attention.wq.weight", "attention.wk.weight")

# Keys of config.json that decide the computation: those that are read, and those that must have one of these values.
READ = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "head_dim"),
    *("max_position_embeddings", "eos_token_id", "model_type"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "attention_dropout": (0,),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}
# Keys that say nothing of the logits.
HARMLESS = {
    *("architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range"),
    *("bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "_name_or_path", "name_or_path"),
    *("is_llama_config", "transformers.js_config", "return_dict", "output_hidden_states", "output_attentions"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix"),
    *("torchscript", "use_bfloat16", "chunk_size_feed_forward", "auto_map", "_attn_implementation"),
    *("_attn_implementation_autoset", "cross_attention_hidden_size", "tie_encoder_decoder", "bos_token", "eos_token"),
}
SIZES = {  # fields of TransformerConfig, and their keys there, which a config must have
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}


def sizes_of(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` from a config.json of Hugging Face.

    Args:
        where: its file, for messages.

    Raises:
        CheckpointError: another kind of model; a key that is unknown, missing, or has a value that changes the
            computation.
    """
    if (kind := config.get("model_type")) != "llama":
        raise CheckpointError(f"{where}: model_type is {kind!r}; llama is the one that is known")
    if missing := [key for key in SIZES.values() if key not in config]:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    for key, value in config.items():
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                raise CheckpointError(f"{where}: {key} is {value!r}, which this model has not; {NEUTRAL[key][0]!r} is")
        elif key not in READ and key not in HARMLESS:
            raise CheckpointError(f"{where} has the unknown key {key} ({value!r}): it may change the computation")
    sizes: dict[str, Any] = {field: config[key] for field, key in SIZES.items()}
    _check_values(config, where)
    heads, dim = sizes["n_heads"], sizes["dim"]
    sizes["n_kv_heads"] = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or dim // heads
    if head_dim * heads != dim:
        raise CheckpointError(f"{where}: head_dim {head_dim} · {heads} heads is not hidden_size {dim}")
    sizes["rope_theta"], sizes["rope_scaling"] = _rotary(config, where)
    sizes["norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    sizes["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    return sizes


def _check_values(config: Mapping[str, Any], where: object) -> None:
    """Raises CheckpointError where a key that is read has a value of another type."""
    for key in (*SIZES.values(), "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = config.get(key)
        if (value is not None or key in SIZES.values()) and (type(value) is not int or value < 1):
            raise CheckpointError(f"{where}: {key} is {value!r}, which is no number of anything")
    for key, kind, name in (
        ("rope_parameters", Mapping, "a mapping"),
        ("rope_scaling", Mapping, "a mapping"),
        ("tie_word_embeddings", bool, "true or false"),
    ):
        if not isinstance(config.get(key), (kind, type(None))):
            raise CheckpointError(f"{where}: {key} is {config[key]!r}, and has to be {name}")
    numbers = [("rope_theta", of.get("rope_theta") or 1) for of in (config, config.get("rope_parameters") or {})]
    for key, value in [*numbers, ("rms_norm_eps", config.get("rms_norm_eps", 1e-6))]:
        if type(value) not in (int, float):
            raise CheckpointError(f"{where}: {key} is {value!r}, which is no number")
    eos = config.get("eos_token_id")
    if any(type(token) is not int for token in (eos if isinstance(eos, list) else [] if eos is None else [eos])):
        raise CheckpointError(f"{where}: eos_token_id is {eos!r}, which is no token, and no list of tokens")


def _rotary(config: Mapping[str, Any], where: object) -> tuple[float, dict[str, Any] | None]:
    """``rope_theta``, and ``rope_scaling`` where a config says one: by keys of their own, or in ``rope_parameters``."""
    rope, scaling = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    thetas = {theta for theta in (rope.pop("rope_theta", None), config.get("rope_theta")) if theta}
    for each in (rope, scaling):
        if "type" in each and each.setdefault("rope_type", each["type"]) == each["type"]:  # its name in older configs
            del each["type"]
    if rope.get("partial_rotary_factor", 1) in NEUTRAL["partial_rotary_factor"]:
        rope.pop("partial_rotary_factor", None)
    if len(thetas) > 1 or (rope and scaling and rope != scaling):
        raise CheckpointError(f"{where}: rope_parameters says something else than rope_theta and rope_scaling")
    scaling = rope or scaling
    return float(max(thetas, default=10_000.0)), None if scaling in ({}, {"rope_type": "default"}) else scaling


def config_of(sizes: Mapping[str, Any], block: int | None, eos: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """A config.json for `transformers`, from fields of ``TransformerConfig``: the reverse of `sizes_of`.

    Raises:
        CheckpointError: the model has experts.
    """
    if sizes.get("n_experts"):
        raise CheckpointError(f"n_experts is {sizes['n_experts']}: a Llama has no experts, and so nothing to export to")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: hidden_dim(sizes) if field == "ffn_dim" else sizes[field] for field, key in SIZES.items()},
        "num_key_value_heads": sizes["n_kv_heads"],
        "head_dim": sizes["dim"] // sizes["n_heads"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": sizes["norm_eps"],
        "rope_theta": sizes["rope_theta"],
        "rope_scaling": sizes["rope_scaling"],
        "tie_word_embeddings": sizes["tie_word_embeddings"],
        "max_position_embeddings": block or 2048,
        "bos_token_id": None,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "torch_dtype": dtype,
    }


def rope_divisors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> Tensor:
    """What each frequency of the rotary positions is divided by, as llama.cpp writes it into a file: (head_dim / 2).

    Args:
        scaling: ``rope_scaling`` of a config.json, linear or llama3.
    """
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling["rope_type"] == "linear":
        return torch.full_like(wavelengths, scaling["factor"])
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    kept = kept.clamp(0, 1)
    return 1 / (kept + (1 - kept) / scaling["factor"])


def hidden_dim(sizes: Mapping[str, Any]) -> int:
    """Width of the feed-forward layer: as ``TransformerConfig.hidden_dim``."""
    if sizes["ffn_dim"] is not None:
        return sizes["ffn_dim"]
    multiple = sizes["multiple_of"]
    return math.ceil(int(8 * sizes["dim"] / 3) / multiple) * multiple


def shapes_of(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of these sizes, by their names in this package; a tied weight once."""
    dim, hidden, vocabulary = sizes["dim"], hidden_dim(sizes), sizes["vocab_size"]
    kv = dim // sizes["n_heads"] * sizes["n_kv_heads"]
    shapes = {
        "tok_embeddings": (vocabulary, dim),
        "output": (vocabulary, dim),
        "wq": (dim, dim),
        "wk": (kv, dim),
        "wv": (kv, dim),
        "wo": (dim, dim),
        "w1": (hidden, dim),
        "w2": (dim, hidden),
        "w3": (hidden, dim),
    }
    found: dict[str, tuple[int, ...]] = {}
    for name in NAMES:
        numbers = range(sizes["n_layers"]) if "*" in name else [0]
        for number in numbers:
            found[name.replace("*", str(number))] = shapes.get(name.split(".")[-2], (dim,))
    if sizes["tie_word_embeddings"]:
        del found["output.weight"]
    return found


def name_elsewhere(name: str, kind: str) -> str:
    """
    Args:
        name: of a tensor in this package. kind: a field of `Names`.
    """
    number = re.search(r"\.(\d+)\.", name)
    general = name if number is None else name.replace(number[0], ".*.", 1)
    return getattr(NAMES[general], kind).replace("*", number[1] if number else "*")


def check_entries(
    there: Mapping[str, TensorEntry], sizes: Mapping[str, Any], kind: str, where: object
) -> dict[str, TensorEntry]:
    """The tensors of a model, by their names in this package.

    Args:
        there: what a file has, by names of its own.

    Raises:
        CheckpointError: one is missing, is of another shape, or is of no use.
    """
    found: dict[str, TensorEntry] = {}
    names = {name_elsewhere(name, kind): name for name in shapes_of({**sizes, "tie_word_embeddings": False})}
    for name, shape in shapes_of(sizes).items():
        other = name_elsewhere(name, kind)
        if other not in there:
            raise CheckpointError(f"{where} lacks the tensor {other}")
        if there[other].shape != shape:
            shapes = [("×".join(map(str, each)) or "scalar") for each in (there[other].shape, shape)]
            raise CheckpointError(f"{where}: {other} is {shapes[0]}, and the sizes of the model make it {shapes[1]}")
        if not there[other].dtype.is_floating_point:
            raise CheckpointError(f"{where}: {other} is of dtype {there[other].dtype}, which is no floating-point one")
        found[name] = there[other]
    useless = [name for name in there if name not in names and not name.endswith("rotary_emb.inv_freq")]
    if useless:
        raise CheckpointError(f"{where} has the unknown tensor {useless[0]}: it may change the computation")
    return found


def is_rotated(name: str) -> bool:
    """Whether a tensor's rows have another order in Hugging Face's files."""
    return name.endswith(ROTATED)


def to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of full heads in the order of Hugging Face's files.

    Args:
        rows: (heads · head_dim, …), in the order here.
    """
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """The reverse of `to_halves`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
