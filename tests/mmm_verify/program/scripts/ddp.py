"""A script as torchrun starts it: DistributedDataParallel, a DistributedSampler, AdamW, clipping, a DataLoader."""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BUGS = ("none", "outside", "times", "padding", "seed", "no_sampler")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.factor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", choices=BUGS, default="none")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--batch", type=int, help="of a rank")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    n_samples = 64
    if args.bug == "padding":
        n_samples = 10
        args.batch = 10
    data = TensorDataset(torch.randn(n_samples, 16), torch.randint(4, (n_samples,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    scale = Scale()
    model = DistributedDataParallel(model)
    if args.bug != "outside":
        scale = DistributedDataParallel(scale)
    sampler = DistributedSampler(data, seed=rank if args.bug == "seed" else 0)
    if args.bug == "no_sampler":
        sampler = None
    batch = args.batch or args.global_batch // world_size
    loader = DataLoader(data, batch, sampler=sampler, num_workers=args.workers)
    optimizer = torch.optim.AdamW([*model.parameters(), *scale.parameters()], lr=1e-2)
    for epoch in range(4):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(scale(model(x)), y)
            if args.bug == "times":
                loss = loss * world_size
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            print(f"rank {rank}: loss {loss.item():.4f}")
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
