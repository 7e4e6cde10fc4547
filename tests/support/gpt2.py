"""A tiny GPT-2 on disk, written by hand: what `transformers` writes, and what it computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support.llamas import CONFIG

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "n_ctx": 40,
    "vocab_size": CONFIG["vocab_size"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-4,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "eos_token_id": 66,
    "torch_dtype": "float32",
}
# The matrices of a layer, (in, out), in units of the width.
MATRICES = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights by the names of Hugging Face's files, with the prefix that newer ones have."""
    generator = torch.Generator().manual_seed(0)
    dim = GPT2["n_embd"]

    def some(*shape: int) -> Tensor:
        values = 0.3 * torch.randn(*shape, generator=generator)
        return values.to(dtype)

    weights = {
        "wte.weight": some(GPT2["vocab_size"], dim),
        "wpe.weight": some(GPT2["n_positions"], dim),
    }
    norms = ["ln_f"]
    for i in range(GPT2["n_layer"]):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        for name, (rows, columns) in MATRICES.items():
            weights[f"h.{i}.{name}.weight"] = some(rows * dim, columns * dim)
            weights[f"h.{i}.{name}.bias"] = some(columns * dim)
    for name in norms:
        weights[f"{name}.weight"] = 1 + some(dim)
        weights[f"{name}.bias"] = some(dim)
    return {f"transformer.{name}": tensor for name, tensor in weights.items()}


def logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """What `transformers` computes, in float64, without dropout.

    Args:
        tokens: (batch, seq).
    """
    w = {name.removeprefix("transformer."): tensor.double() for name, tensor in weights.items()}
    seq = tokens.shape[1]
    # (queries, keys): added to the scores, so that no query sees a later key.
    above = torch.full((seq, seq), -torch.inf, dtype=torch.float64).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x / (variance + GPT2["layer_norm_epsilon"]).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(qkv: Tensor) -> Tensor:
        # All queries come first, then all keys.
        projected = qkv.chunk(3, -1)
        # (batch, heads, seq, head_dim) each.
        q, k, v = (channels.unflatten(-1, (GPT2["n_head"], -1)).transpose(1, 2) for channels in projected)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weight = (scores + above).softmax(-1)
        return (weight @ v).transpose(1, 2).flatten(2)

    def gelu(x: Tensor) -> Tensor:
        """`gelu_new`: with a tanh, which is close to the normal distribution's."""
        inner = x + 0.044715 * x**3
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * inner))

    x = w["wte.weight"][tokens] + w["wpe.weight"][:seq]
    for i in range(GPT2["n_layer"]):
        normed = norm(x, f"h.{i}.ln_1")
        qkv = product(normed, f"h.{i}.attn.c_attn")
        x = x + product(attention(qkv), f"h.{i}.attn.c_proj")
        normed = norm(x, f"h.{i}.ln_2")
        hidden = product(normed, f"h.{i}.mlp.c_fc")
        x = x + product(gelu(hidden), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T
