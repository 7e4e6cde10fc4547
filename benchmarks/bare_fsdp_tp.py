"""The bare loop that benchmarks/step_overhead.py compares the example with: FSDP2 × tensor parallel in plain PyTorch.

The same model, plan, layout, batch and optimizer as ``mmm.examples.fsdp_tp``, written out with PyTorch's own calls; no
log, no record, no clock, no check of the loss. Rank 0 prints the time stamp of every step, in seconds.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from mmm.data import RandomTokens
from mmm.examples.fsdp_tp import tensor_parallel_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.nn import weights

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
model = Transformer(TransformerConfig(n_layers=args.layers))
weights.initialize(model, 0)
if args.tp > 1:
    parallelize_module(model, mesh["tp"], tensor_parallel_plan())
# The units of the example: embeddings, each block, and the norm with the head.
fully_shard(model.tok_embeddings, mesh=mesh["dp"])
for block in model.layers.values():
    fully_shard(block, mesh=mesh["dp"])
fully_shard([model.norm, model.output], mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
tokens = RandomTokens(256, args.seq, 0)
global_batch = args.batch * mesh["dp"].size()
first = args.batch * mesh["dp"].get_local_rank()
for step in range(args.steps):
    batch = tokens.batch(step, global_batch, first, args.batch)
    with loss_parallel():
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # A step's end, as the log of the example stamps it.
    if dist.get_rank() == 0:
        print(time.time(), flush=True)
dist.destroy_process_group()
