"""Collectives: what each rank holds before and after, and how fast they are.

    launch python3 -m mmm.examples.collectives
    launch -n 4 --device cpu python3 -m mmm.examples.collectives --break absent

Every way of training is made of these seven, and of sends. First each moves a few numbers (rank r begins with r0, r1,
…, one for each rank; sums are over ranks), and a table shows what is where; then larger buffers are timed.

S: the bytes of the whole buffer. On N ranks with links of B bytes/s each way, none is faster than factor · S / B::

      all-reduce                     2 (N-1)/N     each byte leaves every rank once to be summed, and comes back once
      all-gather, reduce-scatter       (N-1)/N     S: what all parts make together; the rank has 1/N of it already
      all-to-all, scatter              (N-1)/N     S: all that a rank (scatter: rank 0) begins with, its own part too
      broadcast, reduce                   1        all S have to leave rank 0, or to get there

so factor · S / seconds is the bandwidth that the links were used at, whatever N; NCCL's tests call it bus bandwidth.
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
        "absent": "the last rank never comes to the first all-reduce, as one that alone validates, saves or has left "
        "the loop. The others wait for it, without a word, until the time for a collective (here 3 s) is over.",
    }
    sizes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
    """Bytes of the whole buffer, S; rounded to 4-byte numbers that the ranks divide."""
    repeats: int = 5
    LEFT_OUT: ClassVar = ("dtype", "seed", "batch_size", "global_batch_size", "log_every", "plots")
    run: options.Run = options.Run()


class Collective(NamedTuple):
    """`call` takes (before, after) = (b, a): what a rank has, and where to put what it gets (at first its own)."""

    call: Callable[[Tensor, Tensor], object]
    begins: str = "full"  # how much each has: full (S bytes) or shard (1/N)
    ends: str = "full"
    alone: str = ""  # the side that only rank 0 has


def scatter(before: Tensor, after: Tensor) -> None:
    dist.scatter(after, list(before.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None, src=0)


HEAD = f"{'collective':16}{'S, bytes':>12}{'factor':>8}{'seconds':>12}{'GB/s':>10}"
COLLECTIVES = {
    "all_reduce": Collective(lambda _, a: dist.all_reduce(a)),
    "reduce": Collective(lambda _, a: dist.reduce(a, dst=0), alone="ends"),
    "broadcast": Collective(lambda _, a: dist.broadcast(a, src=0), alone="begins"),
    "all_gather": Collective(lambda b, a: all_gather(a, b), begins="shard"),
    "scatter": Collective(scatter, ends="shard", alone="begins"),
    "reduce_scatter": Collective(lambda b, a: reduce_scatter(a, b), ends="shard"),
    "all_to_all": Collective(lambda b, a: dist.all_to_all_single(a, b)),
}


def buffers(collective: Collective, shard_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(before, after) of this rank, float32; a shard has `shard_size` numbers. Rank r begins with 10 r, 10 r + 1, …"""
    full = torch.arange(shard_size * dist.get_world_size(), dtype=torch.float32, device=device) + 10 * dist.get_rank()
    shard = full[:shard_size]
    before = shard if collective.begins == "shard" else full
    after = shard if collective.ends == "shard" else full
    return before.clone(), after.clone()


def show(collective: Collective, device: torch.device) -> tuple[list[int], list[int]]:
    """What this rank has before and after, in numbers; [] for nothing. A collective."""
    before, after = buffers(collective, 1, device)
    collective.call(before, after)
    sides = {"begins": before.int().tolist(), "ends": after.int().tolist()}
    if collective.alone and dist.get_rank() != 0:
        sides[collective.alone] = []
    return sides["begins"], sides["ends"]


def drawn(name: str, by_rank: Sequence[tuple[list[int], list[int]]]) -> str:
    """A line a rank: what it has before and after."""
    width = 3 * len(by_rank)
    lines = [f"{name.replace('_', '-'):16} {'before':<{width}}     after"]
    for rank, (before, after) in enumerate(by_rank):
        lines.append(f"  rank {rank:<9} {in_a_row(before):<{width}}  →  {in_a_row(after)}")
    return "\n".join(lines)


def in_a_row(values: list[int]) -> str:
    return " ".join(f"{value:2d}" for value in values) or "-"


def seconds(collective: Collective, shard_size: int, repeats: int, device: torch.device) -> float:
    """Seconds of one call, with shards of `shard_size` numbers: the median of the repeats, on the slowest rank."""
    before, after = buffers(collective, shard_size, device)
    taken = []
    for _ in range(repeats + 1):  # the first does not count
        dist.barrier()
        synchronize(device)
        begin = perf_counter()
        collective.call(before, after)
        synchronize(device)
        taken.append(perf_counter() - begin)
    return max(row[0] for row in gather_floats([median(taken[1:])], device))


def train(config: Config) -> None:
    smallest = min(config.sizes, default=0)
    if smallest < 4 or config.repeats < 1:
        raise ConfigError(f"--repeats {config.repeats} --sizes {smallest}: repeats begin at 1, and sizes at 4 bytes")
    ranks = whoami().world_size
    if config.break_ and ranks == 1:
        raise ConfigError("--break absent on 1 rank: nobody waits for it; start with `launch -n 4`")
    if config.break_:
        config = replace(config, run=replace(config.run, timeout=min(config.run.timeout, 3.0)))
    started = example.start_run("collectives", config, Layout().fit(ranks))
    with started as run, HangWatch(run.rank, run.options.timeout, run.clock):  # which says who has not come
        if config.break_ and run.rank.rank == ranks - 1:
            sleep(10 * config.run.timeout)
        for name, collective in COLLECTIVES.items():
            by_rank: list[Any] = [None] * ranks
            dist.all_gather_object(by_rank, show(collective, run.device))
            run.log.info("%s", drawn(name, by_rank))
        if ranks == 1:
            run.note("one rank: nothing moves, so there is no bandwidth; start with `launch -n 4`")
        for size in config.sizes:
            shard_size = max(size // 4 // ranks, 1)  # numbers of 4 bytes
            run.add_row(time_all(run, shard_size, config.repeats))


def time_all(run: example.Run, shard_size: int, repeats: int) -> dict[str, float]:
    """Time each collective on shards of `shard_size` numbers, log a table; what the record gets. A collective."""
    ranks = run.rank.world_size
    size = 4 * shard_size * ranks  # bytes of the whole buffer
    row = {"bytes": float(size)}
    lines = [HEAD]
    for name, collective in COLLECTIVES.items():
        took = seconds(collective, shard_size, repeats, run.device)
        gbps = factor(name, ranks) * size / took / 1e9
        row[f"{name}_seconds"] = took
        row[f"{name}_gbps"] = gbps
        lines.append(f"{name:16}{size:12,}{factor(name, ranks):8.2f}{took:12.6f}{gbps:10.3f}")
    run.log.info("GB/s: factor · S / seconds, 10⁹ bytes\n%s", "\n".join(lines))
    return row


if __name__ == "__main__":
    example.main(train, Config, __doc__)
