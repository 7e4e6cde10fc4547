"""What starting ranks costs: `launch` beside `torchrun`, the same program, in pairs that take turns.

    python benchmarks/startup.py [--pairs 3] [--ranks 4] [-- -m MODULE ARGUMENTS…]

Without a program of your own it is one iteration of the main example on a small model. A program that then trains,
draws or writes does that at the same cost either way, which hides the difference.
CPU time is that of the whole process tree (os.wait4: a process's own and all it has waited for). The order within a
pair changes from pair to pair, so that neither always finds the file cache warm. Exit code 1 if the median ratio of
launch to torchrun misses a bound: 0.35 of the CPU time, 0.5 of the wall time.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

CPU_BOUND = 0.35
WALL_BOUND = 0.50
# One iteration of the main example, on a model so small that start-up is what is measured.
TARGET = ["-m", "mmm.examples.fsdp_tp", "--tpsize", "2", "--max_iters", "1", "--device", "cpu", "--preset", "debug",
          "--seq_length", "16", "--batch_size", "2", "--eval_batches", "1"]  # fmt: skip


@dataclass(frozen=True)
class Cost:
    wall: float       # s
    cpu: float        # s, user and system, of the whole tree


def measure(command: Sequence[str], folder: str) -> Cost:
    """Run `command` in `folder` and return what it cost. A run that fails ends the benchmark, with its output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed ({os.waitstatus_to_exitcode(status)}):\n{output.read()[-4000:]}")
    return Cost(wall, used.ru_utime + used.ru_stime)


def commands(ranks: int, target: list[str]) -> dict[str, list[str]]:
    folder = os.path.dirname(sys.executable)
    find = {name: shutil.which(name, path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}") or name
            for name in ("launch", "torchrun")}
    return {"launch": [find["launch"], "-n", str(ranks), "--device", "cpu", "python3", *target],
            "torchrun": [find["torchrun"], "--standalone", "--nproc-per-node", str(ranks), *target]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("target", nargs="*", default=TARGET, metavar="WORD",
                        help="after --: -m MODULE ARGS, or SCRIPT ARGS (a script by its full path)")
    args = parser.parse_args()
    lines = commands(args.ranks, args.target)
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
          f"Python {platform.python_version()}, torch {version('torch')}")
    for name, line in lines.items():
        print(f"{name:9s}{' '.join([name, *line[1:]])}")
    titles = ("launch wall", 12), ("cpu", 7), ("torchrun wall", 14), ("cpu", 7), ("wall ratio", 11), ("cpu ratio", 10)
    print(f"\n{'pair':>6} " + " ".join(f"{title:>{width}}" for title, width in titles))
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            names = list(lines)[:: 1 if pair % 2 == 0 else -1]
            cost = {name: measure(lines[name], folder) for name in names}
            ours, theirs = cost["launch"], cost["torchrun"]
            ratios.append((ours.wall / theirs.wall, ours.cpu / theirs.cpu))
            print(f"{pair + 1:>6} {ours.wall:>11.2f}s {ours.cpu:>6.2f}s {theirs.wall:>13.2f}s {theirs.cpu:>6.2f}s "
                  f"{ratios[-1][0]:>11.3f} {ratios[-1][1]:>10.3f}", flush=True)
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    met = wall <= WALL_BOUND and cpu <= CPU_BOUND
    print(f"{'median':>6} {'':>44} {wall:>11.3f} {cpu:>10.3f}\n"
          f"bounds: wall ≤ {WALL_BOUND}, cpu ≤ {CPU_BOUND}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
