"""The bare loop that benchmarks/step_overhead.py compares the vision trainers with: FSDP2 in plain PyTorch.

The same model, data, batch and optimizer as ``mmm.trainer.vit`` or ``mmm.trainer.fsdp``, with PyTorch's own calls; no
log, no record, no clock, no check of the loss. Rank 0 prints the time stamp of every step, in seconds.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from mmm.data.datasets import load_images
from mmm.data.image_batches import ImageBatches
from mmm.models import weights
from mmm.models.cnn import CNN, CNNConfig
from mmm.models.vit import PRESETS, ViT

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("cnn", "vit"), required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
cnn = args.model == "cnn"
data = load_images("digits") if cnn else load_images("fake", image_size=32, channels=3)
model = CNN(CNNConfig()) if cnn else ViT(PRESETS["debug"])
weights.initialize(model, 0)
for unit in [model.fc1] if cnn else [model.embedding, *model.layers.values()]:
    fully_shard(unit)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = ImageBatches(data.train, args.batch * ranks, 0)
for step in range(args.steps):
    batch = batches.batch(step, rank * args.batch, args.batch)
    loss = F.cross_entropy(model(batch.images), batch.labels)
    loss.backward()
    if not cnn:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(time.time(), flush=True)
dist.destroy_process_group()
