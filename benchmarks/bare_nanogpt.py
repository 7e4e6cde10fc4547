"""The bare loop that benchmarks/shakespeare.py compares the trainer with: nanoGPT's character model of plays, at the
sizes that nanoGPT gives for a CPU, in plain PyTorch.

GPT-2's architecture without biases: learned positions, LayerNorm, GELU, the head tied to the embedding. The text by
characters, its last tenth for validation, random windows; AdamW, a cosine with warm-up, the gradient clipped to 1. As
there, 20 batches of each part are evaluated every 250 steps; at the end all of the validation text as well, without
being timed. Prints ``seconds`` of the loop and ``val_loss``.

Source of sizes and rates: github.com/karpathy/nanoGPT, README (training on a laptop), config/train_shakespeare_char.py.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--stamps", action="store_true", help="print the time of each step's end alone")
args = parser.parse_args()

LAYERS = 4
HEADS = 4
DIM = 128
BLOCK = 64
RATE = 1e-3
LEAST_RATE = 1e-4
WARMUP = 100  # steps
EVALUATION_EVERY = 250  # steps
EVALUATION_BATCHES = 20


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added to its input."""

    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(DIM, bias=False)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.norm_2 = nn.LayerNorm(DIM, bias=False)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, block, dim)
        return self.feed_forward(self.attention(x))

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, DIM // HEADS))  # (batch, block, 3, heads, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, block, head_dim) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """The model with its loss."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, DIM)
        self.positions = nn.Embedding(BLOCK, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(DIM, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            std = 0.02
            if name.endswith(("out.weight", "down.weight")):
                # 2 · LAYERS of these are added up.
                std /= math.sqrt(2 * LAYERS)
            nn.init.normal_(parameter, std=std)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (batch, block) each
        hidden = self.blocks(self.tokens(inputs) + self.positions.weight)  # (batch, block, dim)
        logits = F.linear(self.norm(hidden), self.tokens.weight)  # (batch, block, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def windows(tokens: Tensor, begins: list[int] | range) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (batch, block) each, that begin at these tokens."""
    inputs = torch.stack([tokens[begin : begin + BLOCK] for begin in begins])
    targets = torch.stack([tokens[begin + 1 : begin + 1 + BLOCK] for begin in begins])
    return inputs, targets


def random_windows(tokens: Tensor) -> tuple[Tensor, Tensor]:
    begins = torch.randint(len(tokens) - BLOCK, (args.batch,))
    return windows(tokens, begins.tolist())


def all_windows(tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every window once, 256 at a time."""
    begins = range(0, len(tokens) - BLOCK - 1, BLOCK)
    for first in range(0, len(begins), 256):
        yield windows(tokens, begins[first : first + 256])


@torch.no_grad()
def mean_loss(model: GPT, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """The mean over all windows of the batches."""
    total = 0.0
    count = 0
    for inputs, targets in batches:
        total += model(inputs, targets).item() * len(inputs)
        count += len(inputs)
    return total / count


def rate(step: int) -> float:
    """Linear warm-up, then a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    progress = min((step - WARMUP) / (args.steps - WARMUP), 1)
    return LEAST_RATE + 0.5 * (1 + math.cos(math.pi * progress)) * (RATE - LEAST_RATE)


torch.manual_seed(1337)
text = args.text.read_text()
token_of = {character: token for token, character in enumerate(sorted(set(text)))}
tokens = torch.tensor([token_of[character] for character in text])
split = int(0.9 * len(tokens))
train = tokens[:split]
validation = tokens[split:]

model = GPT(len(token_of))
matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99))

began = time.perf_counter()
for step in range(args.steps + 1):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    if step % EVALUATION_EVERY == 0:
        for part_of_text in (train, validation):
            mean_loss(model, (random_windows(part_of_text) for _ in range(EVALUATION_BATCHES)))
    if step == args.steps:
        break
    loss = model(*random_windows(train))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if args.stamps:
        print(time.time())
seconds = time.perf_counter() - began
if not args.stamps:
    print(f"seconds {seconds:.2f}")
    print(f"val_loss {mean_loss(model, all_windows(validation)):.4f}")
