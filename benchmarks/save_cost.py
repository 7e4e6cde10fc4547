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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mmm.checkpoint.manifest import Manifest
from mmm.checkpoint.saver import Saver
from mmm.checkpoint.state import tensors_of

MATRIX_SIZE = 384


class Save(NamedTuple):
    """Seconds of one save.

    Attributes:
        starting: until the loop goes on; a copy of the state has been made by then.
        steps: of the steps computed beside the write. 0 if there are none.
        waiting: after the steps, until the checkpoint is complete.
    """

    starting: float
    steps: float
    waiting: float


def compute(steps: int) -> float:
    """Seconds of the steps, which end together on all ranks."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE)
    began = time.perf_counter()
    for _ in range(steps):
        matrix = matrix @ matrix / MATRIX_SIZE
    dist.barrier()
    return time.perf_counter() - began


def sharded_parameters(args: argparse.Namespace) -> dict[str, torch.nn.Parameter]:
    """Parameters of equal size, each sharded over all ranks, by name."""
    mesh = init_device_mesh("cpu", (args.ranks,))
    size = int(args.parameters) // args.tensors
    parameters = {}
    for index in range(args.tensors):
        shard = distribute_tensor(torch.randn(size), mesh, [Shard(0)])
        parameters[f"p{index}"] = torch.nn.Parameter(shard)
    return parameters


def optimizer_with_state(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW after one step: before it has no moments to save."""
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    return optimizer


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank. Rank 0 prints the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    parameters = sharded_parameters(args)
    optimizer = optimizer_with_state(parameters)
    saver = Saver(Path(folder) / "checkpoints", dist.new_group(backend="gloo"), 1, sys.exit)

    def save(step: int, steps_beside: int) -> Save:
        dist.barrier()
        began = time.perf_counter()
        state = {"model": parameters, "optimizer": tensors_of(optimizer, parameters)}
        saver.save(state, Manifest(step, {}, {}, {}, {}))
        starting = time.perf_counter() - began
        steps = 0.0
        if steps_beside:
            steps = compute(steps_beside)
        began = time.perf_counter()
        saver.wait()
        return Save(starting, steps, time.perf_counter() - began)

    alone: list[float] = []
    blocking: list[Save] = []
    asynchronous: list[Save] = []
    for pair in range(args.pairs + 1):
        alone.append(compute(args.steps))
        blocking.append(save(2 * pair + 1, steps_beside=0))
        asynchronous.append(save(2 * pair + 2, steps_beside=args.steps))
    if rank == 0:
        print(f"{args.parameters:.3g} parameters in {args.tensors} tensors, AdamW, {args.ranks} ranks")
        # The first pair is warm-up.
        report(args.steps, median(alone[1:]), medians(blocking[1:]), medians(asynchronous[1:]))
    dist.destroy_process_group()


def medians(saves: list[Save]) -> Save:
    return Save(*(median(column) for column in zip(*saves, strict=True)))


def report(steps: int, alone: float, blocking: Save, asynchronous: Save) -> None:
    """Print what the loop pays for either way of saving."""
    cost_of_blocking = blocking.starting + blocking.waiting
    cost = asynchronous.starting + asynchronous.waiting
    copy = asynchronous.starting / cost_of_blocking
    print(f"blocking {cost_of_blocking:.3f} s; asynchronous {asynchronous.starting:.4f} s, ", end="")
    print(f"and {asynchronous.waiting:.4f} s of waiting after the steps")
    print(f"the loop pays {cost / cost_of_blocking:.1%} of a blocking save (copy alone {copy:.1%})")
    print(f"{steps} steps beside a save {asynchronous.steps:.3f} s, without {alone:.3f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=16e6)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    # On this disk: a /tmp may be in memory.
    outputs = Path("outputs").absolute()
    outputs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=outputs) as folder:
        torch.multiprocessing.spawn(measure, args=(args, folder), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
