"""Compares a step of a Transformer under tensor parallelism with DTensor activations, and with plain tensors.

``python3 benchmarks/local_tensors.py`` trains both in the same processes, a few steps of each in turn, and prints the
CPU seconds of all ranks for a step: medians over pairs, and the ratio.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.parallel import loss_parallel

from mmm.examples.fsdp_tp import tensor_parallel_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout, build_mesh, cross_entropy, materialize, parallelize
from mmm.runtime.device import Precision

FP32 = Precision("fp32", torch.float32, torch.float32)
CPU = torch.device("cpu")
BATCH = 4
TOKENS = 64
VOCABULARY = 256
STEPS = 3


def config_of(dim: int) -> TransformerConfig:
    heads = max(4, dim // 64)
    return TransformerConfig(dim=dim, n_layers=2, n_heads=heads, n_kv_heads=heads // 2, vocab_size=VOCABULARY)


def measure(rank: int, layout: Layout, dim: int, pairs: int, folder: str) -> None:
    """One rank: writes (kind, pair) seconds of all ranks into the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=layout.ranks)
    mesh = build_mesh(layout, "cpu", 300)
    plain = transformer_plan(config_of(dim))
    plans = [replace(plain, tensor=tensor_parallel_plan()), plain]
    kinds = []
    for plan in plans:
        with torch.device("meta"):
            model = Transformer(config_of(dim))
        model = parallelize(model, mesh, plan, FP32)
        materialize(model, CPU, 0)
        kinds.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    seconds = torch.zeros(2, pairs + 1, dtype=torch.float64)
    for pair in range(pairs + 1):
        # The first of a pair changes, so that neither has the better place.
        for kind in (pair % 2, 1 - pair % 2):
            dist.barrier()
            start = time.process_time()
            for _ in range(STEPS):
                step(*kinds[kind], tokens)
            dist.barrier()
            seconds[kind, pair] = (time.process_time() - start) / STEPS
    dist.all_reduce(seconds)
    if rank == 0:
        # Without the first pair, which is warm-up.
        torch.save(seconds[:, 1:], f"{folder}/seconds")
    dist.barrier()
    dist.destroy_process_group()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    targets = tokens[:, 1:]
    with loss_parallel():
        loss = cross_entropy(model(tokens[:, :-1]), targets, targets.numel())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of measurements (default: 6)")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 256, 512, 1024], help="widths of the model")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for layout in (Layout(dp_shard=1, tp=2), Layout(dp_shard=2, tp=2)):
        for dim in options.dims:
            with tempfile.TemporaryDirectory() as folder:
                arguments = (layout, dim, options.pairs, folder)
                mp.start_processes(measure, arguments, nprocs=layout.ranks, start_method="fork")
                dtensor, plain = torch.load(f"{folder}/seconds")
            ratio = (plain / dtensor).median().item()
            print(
                f"{layout} dim {dim}: DTensor {dtensor.median():.3f} s, plain {plain.median():.3f} s, ratio {ratio:.2f}"
            )
