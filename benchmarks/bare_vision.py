"""The bare loop that benchmarks/step_overhead.py compares the vision trainers with: FSDP2 × tensor parallel in PyTorch.

The same model, plan, data, batch and optimizer as ``mmm.trainer.vit`` or ``mmm.trainer.cnn``, with PyTorch's own
calls; no log, no record, no clock, no check of the loss. Rank 0 prints the time stamp of every step, in seconds.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmm.data.images.batches import BatchOrder
from mmm.data.images.datasets import load_images
from mmm.models.cnn.model import CNN, CNNConfig
from mmm.models.cnn.plan import cnn_plan
from mmm.models.vit.model import PRESETS, ViT
from mmm.models.vit.plan import vit_plan
from mmm.nn import weights
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("cnn", "vit"), required=True)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
dp = mesh["dp"].size()
dp_coordinate = mesh["dp"].get_local_rank()
model: nn.Module
if args.model == "cnn":
    data = load_images("digits")
    model = CNN(CNNConfig())
    plan = cnn_plan()
    units = [model.fc1]
else:
    data = load_images("fake", image_size=32, channels=3)
    model = ViT(PRESETS["debug"])
    plan = vit_plan()
    units = [model.embedding, *model.layers.values()]
weights.initialize(model, 0)
if args.tp > 1:
    apply_tensor_parallel(model, mesh["tp"], plan)
for unit in units:
    fully_shard(unit, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = BatchOrder(data.train, args.batch * dp, 0)
for step in range(args.steps):
    batch = batches.batch(step, dp_coordinate * args.batch, args.batch)
    loss = F.cross_entropy(model(batch.inputs), batch.targets)
    loss.backward()
    # The trainer of the CNN clips only where it is told to.
    if args.model == "vit":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(time.time(), flush=True)
dist.destroy_process_group()
