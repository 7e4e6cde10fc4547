"""The Llama family elsewhere: what its tensors are called, and the order of its heads' rows.

Rotary positions rotate pairs of a head's elements. In this package, as in Meta's files, element 2i goes
with 2i + 1; in Hugging Face's, element i goes with i + head_dim / 2. So the rows of wq and wk have another order there
(head_dim 8)::

    here    0 1 2 3 4 5 6 7
    there   0 4 1 5 2 6 3 7     row of the same head that it is there
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.outside import printable
from mmm.weights.no_weights import prefix_problem
from mmm.weights.weights import shapes_of

# By the name in this package; * stands for a layer's number.
NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROTATED = ("attention.wq.weight", "attention.wk.weight")


def hf_name(name: str) -> str:
    """What Hugging Face's files call a tensor, by its name in this package."""
    layer = re.search(r"\.(\d+)\.", name)
    if layer is None:
        return NAMES[name]
    return NAMES[name.replace(layer[0], ".*.", 1)].replace("*", layer[1])


def check_entries(there: Mapping[str, TensorEntry], sizes: Mapping[str, Any], where: object) -> dict[str, TensorEntry]:
    """The tensors of a model, by their names in this package.

    Args:
        there: what the files have, by Hugging Face's names.

    Raises:
        CheckpointError: one is missing, is of another shape, or is of no use.
    """
    if sizes["n_layers"] > len(there):
        raise CheckpointError(f"{where} has {len(there)} tensors, which are too few for {sizes['n_layers']} layers")
    found: dict[str, TensorEntry] = {}
    shapes = shapes_of(sizes)
    known = {*map(hf_name, shapes), NAMES["output.weight"]}
    for name, shape in shapes.items():
        other = hf_name(name)
        if other not in there:
            raise CheckpointError(f"{where} lacks the tensor {other}{prefix_problem(list(there), other)}")
        if there[other].shape != shape:
            stored, expected = (("×".join(map(str, each)) or "scalar") for each in (there[other].shape, shape))
            raise CheckpointError(f"{where}: {other} is {stored}, and the sizes of the model make it {expected}")
        if not there[other].dtype.is_floating_point:
            raise CheckpointError(f"{where}: {other} is of dtype {there[other].dtype}, which is no floating-point one")
        found[name] = there[other]
    useless = [name for name in there if name not in known and not name.endswith("rotary_emb.inv_freq")]
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
