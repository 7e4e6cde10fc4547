"""The reference that every layout is held against: plain PyTorch on one process. Imports nothing from parallel/."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from mmm.data import Tokens
from mmm.data.text.corpus import standard_library
from mmm.data.text.tokens import TextTokens
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.nn import weights

SEED = 5
GLOBAL_BATCH = 8
SEQ = 32
# The model that most layouts are compared on.
CONFIG = TransformerConfig(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=96, vocab_size=256)
RATE = {"sgd": 0.5, "adamw": 1e-2}


@lru_cache
def tokens(seq: int = SEQ) -> Tokens:
    return TextTokens(standard_library().train, seq, SEED)


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](model.parameters(), lr=RATE[name])


@lru_cache
def train(
    optimizer: str,
    dtype: torch.dtype,
    steps: int,
    config: TransformerConfig = CONFIG,
    global_batch: int = GLOBAL_BATCH,
    seq: int = SEQ,
):
    """Losses of each step, and the gradients of the first by name."""
    model = Transformer(config).to(dtype)
    weights.initialize(model, SEED)
    step_of = optimizer_of(optimizer, model)
    losses, first = [], {}
    for step in range(steps):
        batch = tokens(seq).batch(step, global_batch, 0, global_batch)
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        step_of.step()
        step_of.zero_grad()
        losses.append(loss.item())
    return losses, first
