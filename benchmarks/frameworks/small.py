"""A small model of plain PyTorch, which the frameworks make parallel, with its batch and its optimizer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 32
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width), in and out
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))


def make_batch() -> tuple[Tensor, Tensor]:
    # (samples, tokens)
    return torch.randint(VOCABULARY, (8, 12)), torch.randint(VOCABULARY, (8, 12))


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
