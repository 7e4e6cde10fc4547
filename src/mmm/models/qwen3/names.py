"""The Qwen3 in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.models.keys import read_sizes, written_sizes
from mmm.models.llama.names import ROTATED, TENSORS
from mmm.models.names import HuggingFaceNames
from mmm.models.qwen3.model import Qwen3Config


def read(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Read the sizes from a config.json. See `HuggingFaceNames.read`."""
    # Their files may have a width for a window that is not used.
    return read_sizes(config, where, ("sliding_window",))


def write(config: Qwen3Config) -> dict[str, Any]:
    """Write the keys of a config.json. See `HuggingFaceNames.write`."""
    return {
        **written_sizes(config),
        "attention_bias": False,
        "use_sliding_window": False,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
    }


NAMES = HuggingFaceNames(
    model_types=("qwen3",),
    tensors={
        **TENSORS,
        "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
        "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    },
    rotated=(*ROTATED, "attention.q_norm.weight", "attention.k_norm.weight"),
    defaults={"qwen3": {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32_768}},
    read=read,
    write=write,
)
