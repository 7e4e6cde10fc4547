"""The Llama family in Hugging Face's files: Llama, Mistral (with a window), Qwen2 (with biases of q, k and v), and
Mixtral (with experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.errors import CheckpointError
from mmm.models.keys import read_counts, read_sizes, written_sizes
from mmm.models.llama.model import TransformerConfig
from mmm.models.names import HuggingFaceNames

# Our name → their name. Only a Qwen2 has the biases.
TENSORS = {
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
BIASES = {
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
}
EXPERTS = {
    "layers.*.moe.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.moe.experts.w1": "model.layers.*.block_sparse_moe.experts.#.w1.weight",
    "layers.*.moe.experts.w2": "model.layers.*.block_sparse_moe.experts.#.w2.weight",
    "layers.*.moe.experts.w3": "model.layers.*.block_sparse_moe.experts.#.w3.weight",
}
# Rotary positions rotate the rows of these (see mmm.models.names).
ROTATED = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")
# Fields of a Mixtral's sizes, besides the usual ones.
MIXTURE = {"n_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
# MistralConfig, MixtralConfig and Qwen2Config have these numbers of heads, whatever num_attention_heads is.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
        "eos_token_id": 2,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
}


def read(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Read the sizes from a config.json. See `HuggingFaceNames.read`."""
    model_type = config["model_type"]
    own_keys: tuple[str, ...] = ()
    theta = 10_000.0
    # The config of a Qwen2 has a width for the window too, and says with use_sliding_window that there is none.
    if model_type != "llama":
        own_keys = ("sliding_window",)
    if model_type == "mixtral":
        own_keys = ("sliding_window", *MIXTURE.values())
        theta = 1_000_000.0
    sizes = read_sizes(config, where, own_keys, theta)
    head_dim = sizes.pop("head_dim")
    if head_dim * sizes["n_heads"] != sizes["dim"]:
        sizes["head_width"] = head_dim
    sizes["qkv_bias"] = model_type == "qwen2"
    sizes["window"] = None
    # transformers takes a Mistral with layer_types for a Ministral, which has no window in a layer of full attention.
    # Other layers are refused.
    if model_type == "mistral" and not config.get("layer_types"):
        sizes["window"] = config["sliding_window"]
    if model_type == "mixtral":
        sizes |= read_counts(config, where, MIXTURE)
        sizes["window"] = config.get("sliding_window")
        sizes["softmax_router"] = True
    return sizes


def write(config: TransformerConfig) -> dict[str, Any]:
    """Write the keys of a config.json. See `HuggingFaceNames.write`."""
    if config.qkv_bias and (config.window is not None or config.n_experts):
        raise CheckpointError("qkv_bias with a window or experts: no model of theirs has both")
    keys = written_sizes(config)
    if config.n_experts:
        if not config.softmax_router:
            raise CheckpointError(
                f"n_experts is {config.n_experts}, and their scores are sigmoids: those of a Mixtral are a softmax, so "
                "this model cannot be exported"
            )
        return {
            **keys,
            **{key: getattr(config, field) for field, key in MIXTURE.items()},
            "intermediate_size": config.expert_hidden_dim,
            "sliding_window": config.window,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
        }
    if config.qkv_bias:
        return {
            **keys,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,
        }
    if config.window is not None:
        return {
            **keys,
            "sliding_window": config.window,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
        }
    return {
        **keys,
        "attention_bias": False,
        "mlp_bias": False,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }


NAMES = HuggingFaceNames(
    model_types=("llama", "mistral", "qwen2", "mixtral"),
    tensors={**TENSORS, **BIASES, **EXPERTS},
    rotated=ROTATED,
    defaults=DEFAULTS,
    read=read,
    write=write,
)
