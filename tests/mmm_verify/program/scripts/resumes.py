"""Trains with all that a checkpoint keeps. `mistakes` names what this script leaves out of it, or reads wrongly."""

import argparse
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("mistakes", nargs="*")
parser.add_argument("--load", type=Path)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--with", dest="parts", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randn(64, 4)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4))
if "dropout" in args.parts:
    model.append(nn.Dropout(0.2))
if "fsdp" in args.parts:
    model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)))
momentum = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = momentum if "sgd" in args.parts else torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3, enabled="scaler" in args.parts)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "average" in args.parts else None
shadow = {name: p.detach().clone() for name, p in model.named_parameters()} if "shadow" in args.parts else {}
stateful = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "average": average}
step = begun = 0
path = args.load or Path(f"last-{rank if 'fsdp' in args.parts else 0}.pt")
if args.load or path.exists():
    state = torch.load(path, weights_only=False)
    for name, holder in stateful.items():
        if holder is not None and name not in args.mistakes:
            holder.load_state_dict(state[name])
    if "shadow" not in args.mistakes:
        shadow = state["shadow"]
    step = begun = state["step"] + ("beyond" in args.mistakes) - ("again" in args.mistakes)
    if "random" not in args.mistakes:
        torch.set_rng_state(state["random"][rank])
if "fsdp" not in args.parts:
    model = DistributedDataParallel(model)
while step < args.steps:
    place = step - begun if "sampler" in args.mistakes else step
    order = torch.randperm(64, generator=torch.Generator().manual_seed(place // 4))
    rows = order[place % 4 * 16 :][:16].chunk(world_size)[rank]
    if "unseeded" in args.mistakes:
        rows = torch.tensor(random.sample(range(64), 16 // world_size))
    if "idle" in args.parts:
        torch.rand(1)
    scaler.scale(F.mse_loss(model(x[rows]), y[rows])).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()
    if average is not None:
        average.update_parameters(getattr(model, "module", model))
    for name, p in getattr(model, "module", model).named_parameters():
        if shadow:
            shadow[name].lerp_(p.detach(), 0.1)
    step += 1
    generators = [None] * world_size
    dist.all_gather_object(generators, torch.get_rng_state())
    if step % args.every == 0 and path.name.startswith(f"last-{rank}"):
        state = {name: holder.state_dict() for name, holder in stateful.items() if holder is not None}
        if "half" in args.mistakes:
            state["model"] = {name: value.bfloat16() for name, value in state["model"].items()}
        if "rounding" in args.mistakes:
            state["model"]["3.weight"] = torch.nextafter(state["model"]["3.weight"], torch.tensor(1.0))
        if "buffers" in args.mistakes:
            state["model"] |= {"1.running_mean": torch.zeros(8), "1.running_var": torch.ones(8)}
        torch.save({**state, "step": step, "random": generators, "shadow": shadow}, path)
    dist.barrier()
