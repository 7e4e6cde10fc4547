"""The Qwen3 in Hugging Face's files, with experts (Qwen3-MoE) or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.errors import CheckpointError
from mmm.models.keys import read_counts, read_sizes, written_sizes
from mmm.models.llama.names import ROTATED, TENSORS
from mmm.models.names import HuggingFaceNames
from mmm.models.qwen3.model import Qwen3Config
from mmm.outside import short

# Fields of a Qwen3-MoE's sizes, besides the usual ones.
MIXTURE = {"n_experts": "num_experts", "top_k": "num_experts_per_tok", "expert_dim": "moe_intermediate_size"}


def read(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Read the sizes from a config.json. See `HuggingFaceNames.read`."""
    # Their files may have a width for a window that is not used.
    if config["model_type"] == "qwen3":
        return read_sizes(config, where, ("sliding_window",))
    # Version 5 of transformers writes it by the name that a Mixtral has for it.
    named = {"num_experts": config.get("num_local_experts", 128), **config}
    own_keys = ("sliding_window", "num_local_experts", "norm_topk_prob", *MIXTURE.values())
    sizes = read_sizes(named, where, own_keys) | read_counts(named, where, MIXTURE)
    sizes["norm_topk"] = config["norm_topk_prob"]
    if type(sizes["norm_topk"]) is not bool:
        raise CheckpointError(f"{where}: norm_topk_prob is {short(sizes['norm_topk'])}, and has to be true or false")
    return sizes


def write(config: Qwen3Config) -> dict[str, Any]:
    """Write the keys of a config.json. See `HuggingFaceNames.write`."""
    keys = {**written_sizes(config), "attention_bias": False, "use_sliding_window": False}
    if not config.n_experts:
        return {**keys, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {
        **keys,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_hidden_dim,
        "norm_topk_prob": config.norm_topk,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
    }


NAMES = HuggingFaceNames(
    model_types=("qwen3", "qwen3_moe"),
    tensors={
        **TENSORS,
        "layers.*.moe.router.weight": "model.layers.*.mlp.gate.weight",
        "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.#.gate_proj.weight",
        "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.#.down_proj.weight",
        "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.#.up_proj.weight",
        "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
        "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    },
    rotated=(*ROTATED, "attention.q_norm.weight", "attention.k_norm.weight"),
    defaults={
        "qwen3": {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32_768},
        "qwen3_moe": {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "max_position_embeddings": 32_768,
        },
    },
    read=read,
    write=write,
)
