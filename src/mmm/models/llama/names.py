"""The Llama family in Hugging Face's files: Llama, Mistral (its window) and Qwen2 (biases of queries, keys, values)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.errors import CheckpointError
from mmm.models.keys import read_sizes, written_sizes
from mmm.models.llama.model import TransformerConfig
from mmm.models.names import HuggingFaceNames

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
ROTATED = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")


def read(config: Mapping[str, Any], where: object) -> tuple[dict[str, Any], list[str]]:
    """As `HuggingFaceNames.read`."""
    kind = config["model_type"]
    # A Qwen2's says how wide a window would be, and another key that there is none.
    own_keys = () if kind == "llama" else ("sliding_window",)
    sizes, passed_over = read_sizes(config, where, own_keys)
    head_dim = sizes.pop("head_dim")
    if head_dim * sizes["n_heads"] != sizes["dim"]:
        sizes["head_width"] = head_dim
    sizes["qkv_bias"] = kind == "qwen2"
    sizes["window"] = config.get("sliding_window") if kind == "mistral" else None
    return sizes, passed_over


def write(config: TransformerConfig) -> dict[str, Any]:
    """As `HuggingFaceNames.write`."""
    if config.n_experts:
        raise CheckpointError(f"n_experts is {config.n_experts}: a Llama has no experts, and so nothing to export to")
    keys = written_sizes(config)
    if config.qkv_bias and config.window is not None:
        raise CheckpointError(f"qkv_bias with window {config.window}: neither a Qwen2 nor a Mistral has both")
    if config.qkv_bias:
        return {**keys, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    if config.window is not None:
        window = {"sliding_window": config.window}
        return {**keys, **window, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    biases = {"attention_bias": False, "mlp_bias": False}
    return {**keys, **biases, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


NAMES = HuggingFaceNames(
    model_types=("llama", "mistral", "qwen2"),
    tensors={**TENSORS, **BIASES},
    rotated=ROTATED,
    read=read,
    write=write,
)
