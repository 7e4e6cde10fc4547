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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--stamps", action="store_true", help="print the time of each step's end alone")
args = parser.parse_args()

LAYERS, HEADS, DIM, BLOCK, BATCH = 4, 4, 128, 64, args.batch
RATE, LEAST_RATE, WARMUP, EVERY, BATCHES = 1e-3, 1e-4, 100, 250, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM, bias=False), nn.LayerNorm(DIM, bias=False)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):  # (batch, block, dim)
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).split(DIM, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, DIM), nn.Embedding(BLOCK, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(DIM, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, x, y):  # (batch, block) each
        hidden = self.blocks(self.tokens(x) + self.positions.weight)
        return F.cross_entropy(F.linear(self.norm(hidden), self.tokens.weight).flatten(0, 1), y.flatten())


torch.manual_seed(1337)
text = args.text.read_text()
number = {character: n for n, character in enumerate(sorted(set(text)))}
tokens = torch.tensor([number[character] for character in text])
train, validation = tokens[: int(0.9 * len(tokens))], tokens[int(0.9 * len(tokens)) :]


def windows(of, begins):
    return tuple(torch.stack([of[i + shift : i + shift + BLOCK] for i in begins]) for shift in (0, 1))


def batch(of):
    return windows(of, torch.randint(len(of) - BLOCK, (BATCH,)).tolist())


model = GPT(len(number))
matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99))


@torch.no_grad()
def evaluate(of, begins=None):
    batches = [batch(of) for _ in range(BATCHES)] if begins is None else [windows(of, some) for some in begins]
    losses = [model(*each).item() * len(each[0]) for each in batches]
    return sum(losses) / sum(len(x) for x, _ in batches)


begin = time.perf_counter()
for step in range(args.steps + 1):
    progress = (step - WARMUP) / (args.steps - WARMUP)
    cosine = LEAST_RATE + 0.5 * (1 + math.cos(math.pi * min(progress, 1))) * (RATE - LEAST_RATE)
    for group in optimizer.param_groups:
        group["lr"] = RATE * (step + 1) / (WARMUP + 1) if step < WARMUP else cosine
    if step % EVERY == 0:
        evaluate(train)
        evaluate(validation)
    if step == args.steps:
        break
    loss = model(*batch(train))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if args.stamps:
        print(time.time())
seconds = time.perf_counter() - begin
if args.stamps:
    raise SystemExit
every_window = range(0, len(validation) - BLOCK - 1, BLOCK)
print(f"seconds {seconds:.2f}")
print(f"val_loss {evaluate(validation, [every_window[i : i + 256] for i in range(0, len(every_window), 256)]):.4f}")
