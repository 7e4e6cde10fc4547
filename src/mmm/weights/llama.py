"""The Llama family elsewhere: what its tensors are called, and the order of its heads' rows.

Rotary positions rotate pairs of a head's elements. In this package, as in Meta's and in GGUF's files, element 2i goes
with 2i + 1; in Hugging Face's, element i goes with i + head_dim / 2. So the rows of wq and wk have another order there
(head_dim 8)::

    here    0 1 2 3 4 5 6 7
    there   0 4 1 5 2 6 3 7     row of the same head that it is there
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmm.errors import CheckpointError
from mmm.outside import printable
from mmm.weights.weights import TensorEntry


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


def hf_name(name: str) -> str:
    """What Hugging Face's files call a tensor, by its name in this package."""
    layer, names = _names_of(name)
    return names.hugging_face.replace("*", layer)


def gguf_name(name: str) -> str:
    """What GGUF files call a tensor, by its name in this package."""
    layer, names = _names_of(name)
    return names.gguf.replace("*", layer)


def _names_of(name: str) -> tuple[str, Names]:
    """The number of its layer, empty where it has none, and its row of `NAMES`."""
    layer = re.search(r"\.(\d+)\.", name)
    return ("", NAMES[name]) if layer is None else (layer[1], NAMES[name.replace(layer[0], ".*.", 1)])


def check_entries(
    there: Mapping[str, TensorEntry], sizes: Mapping[str, Any], name_in_file: Callable[[str], str], where: object
) -> dict[str, TensorEntry]:
    """The tensors of a model, by their names in this package.

    Args:
        there: what a file has, by names of its own.
        name_in_file: `hf_name` or `gguf_name`.

    Raises:
        CheckpointError: one is missing, is of another shape, or is of no use.
    """
    if sizes["n_layers"] > len(there):
        raise CheckpointError(f"{where} has {len(there)} tensors, which are too few for {sizes['n_layers']} layers")
    found: dict[str, TensorEntry] = {}
    names = {name_in_file(name): name for name in shapes_of({**sizes, "tie_word_embeddings": False})}
    for name, shape in shapes_of(sizes).items():
        other = name_in_file(name)
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
        raise CheckpointError(f"{where} has the unknown tensor {printable(useless[0])}: it may change the computation")
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
