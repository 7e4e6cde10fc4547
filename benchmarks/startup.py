"""What starting ranks costs: `launch` beside `torchrun`, the same program, in pairs that take turns.

    python benchmarks/startup.py [--pairs 3] [--ranks 4] [-- -m MODULE ARGUMENTS…]
    python benchmarks/startup.py --curve [FLAGS of mmm.examples.startup]

Without a program of your own it is one iteration of the main example on a small model. A program that then trains,
draws or writes does that at the same cost either way, which hides the difference.
CPU time is that of the whole process tree (os.wait4: a process's own and all it has waited for). The order within a
pair changes from pair to pair, so that neither always finds the file cache warm. Exit code 1 if the median ratio of
launch to torchrun misses a bound: 0.28 of the CPU time, 0.40 of the wall time.

--curve is ``mmm.examples.startup``: 1, 2, 4 and 8 ranks, forked, spawned, by torchrun and by mpiexec, drawn beside each
other. Exit code 1 if a further forked rank costs 10 % of one import, or more.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version

from mmm.errors import UserError
from mmm.examples import _startup_cost as measure

CPU_BOUND = 0.28
WALL_BOUND = 0.40
RANK_BOUND = 0.10
# One iteration of the main example, on a model so small that start-up is what is measured.
TARGET = [
    "-m",
    "mmm.examples.fsdp_tp",
    "--tpsize",
    "2",
    "--max_iters",
    "1",
    "--device",
    "cpu",
    "--preset",
    "debug",
    "--seq_length",
    "16",
    "--batch_size",
    "2",
    "--eval_batches",
    "1",
]


def machine() -> str:
    return (
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def pairs(count: int, ranks: int, target: list[str]) -> bool:
    """Print `count` pairs and their medians. Returns whether the bounds are met."""
    lines = {"launch": measure.command("forked", ranks, target), "torchrun": measure.command("torchrun", ranks, target)}
    for name, line in lines.items():
        print(f"{name:9s}{' '.join(line)}")
    titles = ("launch wall", 12), ("cpu", 7), ("torchrun wall", 14), ("cpu", 7), ("wall ratio", 11), ("cpu ratio", 10)
    print(f"\n{'pair':>6} " + " ".join(f"{title:>{width}}" for title, width in titles))
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(count):
            names = list(lines)[:: 1 if pair % 2 == 0 else -1]
            cost = {name: measure.run(lines[name], folder) for name in names}
            ours, theirs = cost["launch"], cost["torchrun"]
            ratios.append((ours.seconds / theirs.seconds, ours.cpu / theirs.cpu))
            print(
                f"{pair + 1:>6} {ours.seconds:>11.2f}s {ours.cpu:>6.2f}s {theirs.seconds:>13.2f}s "
                f"{theirs.cpu:>6.2f}s {ratios[-1][0]:>11.3f} {ratios[-1][1]:>10.3f}",
                flush=True,
            )
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    met = wall <= WALL_BOUND and cpu <= CPU_BOUND
    print(
        f"{'median':>6} {'':>44} {wall:>11.3f} {cpu:>10.3f}\n"
        f"bounds: wall ≤ {WALL_BOUND}, cpu ≤ {CPU_BOUND}: {'met' if met else 'MISSED'}"
    )
    return met


def curve(flags: list[str]) -> bool:
    """Run the example. Returns whether the bound is met."""
    from mmm.examples import startup
    from mmm.trainer.config.command_line import parse

    sys.argv[1:] = flags
    config = parse(startup.Config, startup.__doc__)
    by_ranks, imported = startup.train(config)
    if "forked" not in config.ways or len(by_ranks) < 2:
        sys.exit("no bound was checked: that takes --ways forked and two --ranks")
    share = startup.growth(by_ranks, "forked") / imported
    met = share < RANK_BOUND
    print(f"a further forked rank: {share:.1%} of one import; bound {RANK_BOUND:.0%}: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    if "--curve" in sys.argv[1:]:
        print(machine())
        return 0 if curve([word for word in sys.argv[1:] if word != "--curve"]) else 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--curve", action="store_true", help="run mmm.examples.startup, whose flags follow")
    parser.add_argument(
        "target",
        nargs="*",
        default=TARGET,
        metavar="WORD",
        help="after --: -m MODULE ARGS, or SCRIPT ARGS (a script by its full path)",
    )
    args = parser.parse_args()
    print(machine())
    return 0 if pairs(args.pairs, args.ranks, args.target) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
