"""Collectives: what each rank holds before and after, and how fast they are.

    launch python3 -m mmm.examples.collectives
    launch -n 4 --device cpu python3 -m mmm.examples.collectives --break absent

Every way of parallel training is made of these seven, and of sends. First each collective moves a few numbers, and a
table shows what is where: rank r begins with r0, r1, …, one number for each rank, and sums are over ranks. Then larger
buffers are timed.

S is the size of the whole buffer in bytes. On N ranks, whose links carry B bytes/s each way, no collective is faster
than factor · S / B::

      all-reduce                     2 (N-1)/N     each byte leaves every rank once to be summed, and comes back once
      all-gather, reduce-scatter       (N-1)/N     S: all shards together; the rank already has 1/N of it
      all-to-all, scatter              (N-1)/N     S: all that a rank (scatter: rank 0) begins with, its own shard too
      broadcast, reduce                   1        all S have to leave rank 0, or to get there

So factor · S / seconds is the bandwidth that the links were used at, whatever N is. NCCL's tests call it bus bandwidth.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, sleep
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.errors import ConfigError
from mmm.examples import _support as example
from mmm.layout import Layout
from mmm.parallel.collective_bytes import factor
from mmm.run import options
from mmm.runtime.device import synchronize
from mmm.runtime.hang import HangWatch
from mmm.runtime.process_group import all_gather, gather_floats, reduce_scatter
from mmm.runtime.ranks import whoami


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions):
    """Collectives, shown and timed; nothing is trained."""

    BREAKS: ClassVar = {
        "absent": "The last rank never calls the first all-reduce, like a rank that is the only one to validate, to "
        "save or to leave the loop. The others wait for it, and print nothing, until the time for a collective (here "
        "3 s) is over.",
    }
    sizes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
    """Sizes S of the whole buffer, in bytes. Each is rounded to 4-byte numbers that the ranks can share equally."""
    repeats: int = 5
    """How often each collective is timed. The median counts."""
    LEFT_OUT: ClassVar = ("dtype", "seed", "batch_size", "global_batch_size", "log_every", "plots", "tracker")
    run: options.RunFlags = options.RunFlags()


class Collective(NamedTuple):
    """A collective, and who holds what.

    Attributes:
        call: takes (before, after). `before` is what a rank has, and the result goes into `after`, which at first holds
            what the rank has.
        begins: what each rank begins with: "full" (S bytes) or "shard" (S / N bytes).
        ends: what each rank ends with, "full" or "shard".
        rank0_only: "begins" or "ends" if only rank 0 has that, else empty.
    """

    call: Callable[[Tensor, Tensor], object]
    begins: str = "full"
    ends: str = "full"
    rank0_only: str = ""


def scatter(before: Tensor, after: Tensor) -> None:
    shards = None
    # Only rank 0 has something to give away; the others pass None.
    if dist.get_rank() == 0:
        shards = list(before.chunk(dist.get_world_size()))
    dist.scatter(after, shards, src=0)


# The first three work in place, on `after`.
COLLECTIVES = {
    "all_reduce": Collective(lambda _, after: dist.all_reduce(after)),
    "reduce": Collective(
        lambda _, after: dist.reduce(after, dst=0),
        rank0_only="ends",
    ),
    "broadcast": Collective(
        lambda _, after: dist.broadcast(after, src=0),
        rank0_only="begins",
    ),
    "all_gather": Collective(
        lambda before, after: all_gather(after, before),
        begins="shard",
    ),
    "scatter": Collective(
        scatter,
        ends="shard",
        rank0_only="begins",
    ),
    "reduce_scatter": Collective(
        lambda before, after: reduce_scatter(after, before),
        ends="shard",
    ),
    "all_to_all": Collective(lambda before, after: dist.all_to_all_single(after, before)),
}


def buffers(collective: Collective, shard_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make (before, after) of this rank, float32. Rank r begins with 10 r, 10 r + 1, …

    Args:
        shard_size: number of elements in a shard. The full buffer has N times as many.
    """
    numbers_of_rank = torch.arange(shard_size * dist.get_world_size(), dtype=torch.float32, device=device)
    full = numbers_of_rank + 10 * dist.get_rank()
    shard = full[:shard_size]
    before = shard if collective.begins == "shard" else full
    after = shard if collective.ends == "shard" else full
    return before.clone(), after.clone()


def show(collective: Collective, device: torch.device) -> tuple[list[int], list[int]]:
    """The numbers that this rank has before and after; an empty list for none. A collective."""
    before, after = buffers(collective, 1, device)
    collective.call(before, after)
    sides = {"begins": before.int().tolist(), "ends": after.int().tolist()}
    # The other ranks pass a buffer too, but what is in it plays no part.
    if collective.rank0_only and dist.get_rank() != 0:
        sides[collective.rank0_only] = []
    return sides["begins"], sides["ends"]


def picture(name: str, by_rank: Sequence[tuple[list[int], list[int]]]) -> str:
    """Draw a collective as text, a line per rank, with what the rank has before and after."""
    width = 3 * len(by_rank)
    lines = [f"{name.replace('_', '-'):16} {'before':<{width}}     after"]
    for rank, (before, after) in enumerate(by_rank):
        lines.append(f"  rank {rank:<9} {in_a_row(before):<{width}}  →  {in_a_row(after)}")
    return "\n".join(lines)


def in_a_row(values: list[int]) -> str:
    return " ".join(f"{value:2d}" for value in values) or "-"


def seconds(
    collective: Collective,
    shard_size: int,
    repeats: int,
    device: torch.device,
) -> float:
    """Time a collective, with shards of `shard_size` elements. A collective of all ranks.

    Returns:
        The seconds of one call: the median of the repeats, on the slowest rank.
    """
    before, after = buffers(collective, shard_size, device)
    timings = []
    for _ in range(repeats + 1):
        # All ranks start together, and with an idle device.
        dist.barrier()
        synchronize(device)
        begin = perf_counter()
        collective.call(before, after)
        # Kernels run on after the call has returned: wait for them.
        synchronize(device)
        timings.append(perf_counter() - begin)
    # The first call does not count: the backend opens its connections in it.
    median_seconds = median(timings[1:])
    return max(row[0] for row in gather_floats([median_seconds], device))


def train(config: Config) -> None:
    smallest = min(config.sizes, default=0)
    if smallest < 4 or config.repeats < 1:
        raise ConfigError(f"--repeats {config.repeats} --sizes {smallest}: repeats begin at 1, and sizes at 4 bytes")
    ranks = whoami().world_size
    if config.break_ and ranks == 1:
        raise ConfigError("--break absent on 1 rank: nobody waits for it; start with `launch -n 4`")
    if config.break_:
        timeout = min(config.run.timeout, 3.0)
        config = replace(config, run=replace(config.run, timeout=timeout))
    # The watch says which rank did not come, when a collective takes longer than the timeout.
    started = example.start_run("collectives", config, Layout().fit(ranks))
    with started as run, HangWatch(run.rank, run.options.timeout, run.clock):
        if config.break_ and run.rank.rank == ranks - 1:
            sleep(10 * config.run.timeout)
        for name, collective in COLLECTIVES.items():
            by_rank: list[Any] = [None] * ranks
            dist.all_gather_object(by_rank, show(collective, run.device))
            run.log.info("%s", picture(name, by_rank))
        if ranks == 1:
            run.note("one rank: nothing moves, so there is no bandwidth; start with `launch -n 4`")
        for size in config.sizes:
            # A float32 has 4 bytes.
            shard_size = max(size // 4 // ranks, 1)
            run.add_row(time_all(run, shard_size, config.repeats))


def time_all(run: example.Run, shard_size: int, repeats: int) -> dict[str, float]:
    """Time every collective on shards of `shard_size` elements, and log a table. A collective of all ranks.

    Returns:
        A row of the record: the bytes of the whole buffer, and the seconds and GB/s of each collective.
    """
    ranks = run.rank.world_size
    total_bytes = 4 * shard_size * ranks
    row = {"bytes": float(total_bytes)}
    lines = ["collective          S, bytes  factor     seconds      GB/s"]
    for name, collective in COLLECTIVES.items():
        duration = seconds(collective, shard_size, repeats, run.device)
        # GB: 10⁹ bytes
        gbps = factor(name, ranks) * total_bytes / duration / 1e9
        row[f"{name}_seconds"] = duration
        row[f"{name}_gbps"] = gbps
        lines.append(f"{name:16}{total_bytes:12,}{factor(name, ranks):8.2f}{duration:12.6f}{gbps:10.3f}")
    run.log.info("GB/s: factor · S / seconds, 10⁹ bytes\n%s", "\n".join(lines))
    return row


if __name__ == "__main__":
    example.main(train, Config, __doc__)
