"""What an asynchronous save costs the training loop, beside a blocking one of the same state.

    python benchmarks/save_cost.py [--parameters 16e6] [--tensors 100] [--pairs 5] [--ranks 2] [--steps 800]

Parameters and AdamW's state are sharded over the ranks. In turn a save is waited for at once (blocking), and one is
waited for after --steps products of matrices have been computed, as long as the write takes or longer (asynchronous).
Cost of the blocking one: until it is complete. Of the other: until the loop goes on, and what is left to wait for after
the steps. What the thread that writes takes of the cores that the steps compute on is printed by itself: seconds of the
steps beside a save, and without one. Figures are rank 0's medians, of pairs in one run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mmm.checkpoint.manifest import Manifest
from mmm.checkpoint.saver import Saver
from mmm.checkpoint.state import tensors_of

SIZE = 384  # of the matrices


def work(steps: int) -> float:
    """Seconds of the steps, which end together."""
    a, begin = torch.ones(SIZE, SIZE), time.perf_counter()
    for _ in range(steps):
        a = a @ a / SIZE
    dist.barrier()
    return time.perf_counter() - begin


def measure(rank: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given.ranks)
    mesh, size = init_device_mesh("cpu", (given.ranks,)), int(given.parameters) // given.tensors
    shards = [distribute_tensor(torch.randn(size), mesh, [Shard(0)]) for _ in range(given.tensors)]
    parameters = {f"p{number}": torch.nn.Parameter(shard) for number, shard in enumerate(shards)}
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    saver = Saver(Path(folder) / "checkpoints", dist.new_group(backend="gloo"), 1, sys.exit)
    step, found = 0, []
    for _ in range(given.pairs + 1):
        times = [work(given.steps)]
        for steps in (0, given.steps):
            step += 1
            dist.barrier()
            begin = time.perf_counter()
            state = {"model": parameters, "optimizer": tensors_of(optimizer, parameters)}
            saver.save(state, Manifest(step, {}, {}, {}, {}))
            begun = time.perf_counter() - begin
            beside = work(steps) if steps else 0.0
            begin = time.perf_counter()
            saver.wait()
            times += [begun, beside, time.perf_counter() - begin]
        found.append(times)
    if rank == 0:
        alone, begun, _, waited, begun_too, beside, rest = (median(column) for column in zip(*found[1:], strict=True))
        blocking, cost = begun + waited, begun_too + rest
        print(f"{given.parameters:.3g} parameters in {given.tensors} tensors, AdamW, {given.ranks} ranks")
        print(f"blocking {blocking:.3f} s; asynchronous {begun_too:.4f} s, and {rest:.4f} s of waiting after the steps")
        print(f"the loop pays {cost / blocking:.1%} of a blocking save (copy alone {begun_too / blocking:.1%})")
        print(f"{given.steps} steps beside a save {beside:.3f} s, without {alone:.3f} s")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=16e6)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    given = parser.parse_args()
    outputs = Path("outputs").absolute()  # on this disk: a /tmp may be in memory
    outputs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=outputs) as folder:
        torch.multiprocessing.spawn(measure, args=(given, folder), nprocs=given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
