"""What starting ranks costs: `launch` beside `torchrun`, the same program, in pairs that take turns.

    python benchmarks/startup.py [--pairs 3] [--ranks 4] [-- -m MODULE ARGUMENTS…]
    python benchmarks/startup.py --curve [--ranks 1 2 4 8] [--ways forked spawned torchrun mpiexec] [--png FILE]

Without a program of your own it is one iteration of the main example on a small model. A program that then trains,
draws or writes does that at the same cost either way, which hides the difference.
CPU time is that of the whole process tree (os.wait4: a process's own and all it has waited for). The order within a
pair changes from pair to pair, so that neither always finds the file cache warm. Exit code 1 if the median ratio of
launch to torchrun misses a bound: 0.28 of the CPU time, 0.40 of the wall time.

--curve starts 1, 2, 4 and 8 ranks, forked, spawned, by torchrun and by mpiexec, and draws what each costs. PyTorch
takes seconds of CPU time to import, and N ranks that each import it take N times that; on a parallel file system they
also ask it for the same ten thousand files, at the same time. `launch` imports once, and forks the ranks from there::

      spawned, torchrun, mpiexec                     forked

      ├─ import ─┤ group │ rank 0                    ├─ import ─┼ group │ rank 0
      ├─ import ─┤ group │ rank 1                               ├ group │ rank 1
      ├─ import ─┤ group │ rank 2                               ├ group │ rank 2
      ├─ import ─┤ group │ rank 3                               ├ group │ rank 3

The program that is started (`startup_rank.py`) imports what the examples do, makes the process group, and leaves.
*seconds* run from the start of the command to when the last rank was there; *CPU* is all that the command and its
processes used, to their end. Every way is measured at each number of ranks in turn, so that what else the machine does
meets all of them alike. Exit code 1 if a further forked rank costs 10 % of one import, or more.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import startup_cost as measure
from startup_cost import Start

from mmm.errors import ConfigError, UserError
from mmm_lab.runs.curves import save_curves
from mmm_launch.errors import LaunchError

# Of launch to torchrun; and of a further forked rank to one import.
CPU_BOUND = 0.28
WALL_BOUND = 0.40
RANK_BOUND = 0.10
PROGRAM = [str(Path(__file__).with_name("startup_rank.py"))]
# One iteration of the main example, on a model so small that start-up is what is measured.
FLAGS = "--tpsize 2 --max_iters 1 --device cpu --preset debug --seq_length 16 --batch_size 2 --eval_batches 1"
TARGET = ["-m", "mmm.examples.fsdp_tp", *FLAGS.split()]
ByRanks = Mapping[int, Mapping[str, Start]]  # number of ranks: way: its cost


def machine() -> str:
    return (
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def pairs(count: int, ranks: int, target: list[str]) -> bool:
    """Print `count` pairs and their medians. Returns whether the bounds are met."""
    lines = {
        "launch": measure.command("forked", ranks, target),
        "torchrun": measure.command("torchrun", ranks, target),
    }
    for name, line in lines.items():
        print(f"{name:9s}{' '.join(line)}")
    print()
    titles = f"{'launch wall':>12} {'cpu':>7} {'torchrun wall':>14} {'cpu':>7} {'wall ratio':>11} {'cpu ratio':>10}"
    print(f"{'pair':>6} {titles}")
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(count):
            names = list(lines)
            # The other one comes first in every second pair.
            if pair % 2 == 1:
                names.reverse()
            cost = {name: measure.run(lines[name], folder) for name in names}
            ours = cost["launch"]
            theirs = cost["torchrun"]
            wall = ours.seconds / theirs.seconds
            cpu = ours.cpu / theirs.cpu
            ratios.append((wall, cpu))
            print(
                f"{pair + 1:>6} {ours.seconds:>11.2f}s {ours.cpu:>6.2f}s {theirs.seconds:>13.2f}s "
                f"{theirs.cpu:>6.2f}s {wall:>11.3f} {cpu:>10.3f}",
                flush=True,
            )
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    met = wall <= WALL_BOUND and cpu <= CPU_BOUND
    print(
        f"{'median':>6} {'':>44} {wall:>11.3f} {cpu:>10.3f}\n"
        f"bounds: wall ≤ {WALL_BOUND}, cpu ≤ {CPU_BOUND}: {'met' if met else 'MISSED'}"
    )
    return met


def sweep(
    rank_counts: Sequence[int], ways: Sequence[str], repeats: int, mpiexec: str, folder: str
) -> Iterator[tuple[int, dict[str, Start]]]:
    """For each number of ranks, what each way took: the medians of `repeats` starts."""
    for ranks in rank_counts:
        starts: dict[str, list[Start]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way in ways:
                start = measure.start(way, ranks, PROGRAM, mpiexec, folder)
                starts[way].append(start)
                print(f"{ranks} ranks, {way}: {start.seconds:.2f} s, {start.cpu:.2f} CPU-s", flush=True)
        medians = {}
        for way, repeated in starts.items():
            # Seconds and CPU-seconds may be those of two starts.
            seconds = statistics.median(start.seconds for start in repeated)
            cpu = statistics.median(start.cpu for start in repeated)
            medians[way] = Start(seconds, cpu)
        yield ranks, medians


def growth(by_ranks: ByRanks, way: str) -> float:
    """CPU-seconds that each further rank takes, from the fewest ranks to the most."""
    few = min(by_ranks)
    many = max(by_ranks)
    more = by_ranks[many][way].cpu - by_ranks[few][way].cpu
    return more / max(many - few, 1)


def table(by_ranks: ByRanks, ways: Sequence[str], imported: float) -> str:
    """A line for each number of ranks; then what a further rank takes."""
    lines = [
        "     " + "".join(f"{way:>18}" for way in ways),
        "ranks" + f"{'seconds':>10}{'CPU-s':>8}" * len(ways),
    ]
    for ranks, costs in by_ranks.items():
        cells = [f"{costs[way].seconds:>10.2f}{costs[way].cpu:>8.2f}" for way in ways]
        lines.append(f"{ranks:>5}" + "".join(cells))
    if len(by_ranks) > 1:
        lines.append(f"one import takes {imported:.2f} CPU-s. An additional rank takes (ratio to one import):")
        for way in ways:
            seconds = growth(by_ranks, way)
            lines.append(f"  {way:<9}{seconds:>6.2f} CPU-s, {seconds / imported:.1%}")
    return "\n".join(lines)


def usable_ways(ways: Sequence[str], mpiexec: str) -> list[str]:
    """The ways without mpiexec where none answers, which is printed.

    Raises:
        ConfigError: no other way is left.
    """
    flavour = measure.mpi_flavour(mpiexec) if "mpiexec" in ways else None
    if flavour:
        print(f"mpiexec is {flavour}'s")
    usable = [way for way in ways if way != "mpiexec" or flavour]
    if not usable:
        raise ConfigError(
            f"--ways mpiexec: there is no {mpiexec} here that answers; give --mpiexec the path of one, or other --ways"
        )
    if len(usable) < len(ways):
        print(f"mpiexec is left out: no {mpiexec} here that answers")
    return usable


def curve(args: argparse.Namespace) -> bool:
    """Measure and draw. Returns whether the bound is met.

    Raises:
        ConfigError: nothing is left to start. LaunchError: a start has failed.
    """
    if min(args.ranks) < 1 or args.repeats < 1:
        raise ConfigError(f"--ranks {args.ranks} --repeats {args.repeats}: each from 1")
    ways = usable_ways(args.ways, args.mpiexec)
    with tempfile.TemporaryDirectory() as folder:
        imported = measure.one_import(PROGRAM, args.repeats, folder)
        by_ranks = dict(sweep(args.ranks, ways, args.repeats, args.mpiexec, folder))
    print(f"\n{table(by_ranks, ways, imported)}")
    if args.png is not None:
        seconds = {way: [(ranks, costs[way].seconds) for ranks, costs in by_ranks.items()] for way in ways}
        print(f"picture: {save_curves(seconds, args.png)}")
    if "forked" not in ways or len(by_ranks) < 2:
        raise ConfigError("no bound was checked: that takes --ways forked and two --ranks")
    share = growth(by_ranks, "forked") / imported
    met = share < RANK_BOUND
    print(f"a further forked rank: {share:.1%} of one import; bound {RANK_BOUND:.0%}: {'met' if met else 'MISSED'}")
    return met


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--ranks", type=int, nargs="+", help="ranks (default 4; of --curve 1 2 4 8)")
    parser.add_argument("--curve", action="store_true", help="start-up against the number of ranks, by every way")
    parser.add_argument("--ways", nargs="+", choices=measure.WAYS, default=measure.WAYS, help="of --curve")
    parser.add_argument("--repeats", type=int, default=1, help="of --curve: starts of each; the median counts")
    parser.add_argument("--mpiexec", default="mpiexec", help="of --curve: which one, where there are several")
    parser.add_argument("--png", type=Path, metavar="FILE", help="of --curve: a picture of the seconds")
    parser.add_argument(
        "target",
        nargs="*",
        default=TARGET,
        metavar="WORD",
        help="after --: -m MODULE ARGS, or SCRIPT ARGS (a script by its full path)",
    )
    args = parser.parse_args(argv)
    print(machine())
    if args.curve:
        args.ranks = args.ranks or [1, 2, 4, 8]
        return 0 if curve(args) else 1
    return 0 if pairs(args.pairs, args.ranks[0] if args.ranks else 4, args.target) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, LaunchError) as error:
        sys.exit(f"error: {error}")
