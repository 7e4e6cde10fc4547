"""What the log, the record and the checks of an example cost a step, against a bare PyTorch loop.

    python benchmarks/step_overhead.py [--pairs 5] [--ranks 2] [--tp 2]

Runs ``mmm.examples.fsdp_tp`` and ``benchmarks/bare_fsdp_tp.py`` in turn, whole commands, and compares the median time
from one step's end to the next's (the example's from the time stamps of its log, so that everything it does is in it).
Exit code 1 where the median ratio of the pairs is above 1.03, or a step is shorter than 0.1 s.
"""

import argparse
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import torch

HERE = Path(__file__).parent
BOUND, SHORTEST = 1.03, 0.1


def seconds_a_step(stamps: list[float]) -> float:
    """Median time between stamps, the first three steps left out: they warm up."""
    return statistics.median(b - a for a, b in itertools.pairwise(stamps[3:]))


def example(args: argparse.Namespace, launch: list[str]) -> float:
    flags = {"--tpsize": args.tp, "--n_layers": args.layers, "--batch_size": args.batch, "--seq_length": args.seq,
             "--max_iters": args.steps, "--dataset": "random", "--eval_batches": 1, "--vocab_size": 256}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "python3", "-m", "mmm.examples.fsdp_tp", "--outdir", f"{folder}/run"]
        command += [str(word) for pair in flags.items() for word in pair]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stamps = re.findall(r"\[([^\]]+)\]\[INFO\]\[\w+:\d+\] - iter=", out)
    times = [datetime.fromisoformat(stamp).timestamp() for stamp in stamps]
    return seconds_a_step(times[:-1])  # the last step validates


def bare(args: argparse.Namespace, launch: list[str]) -> float:
    flags = {"--tp": args.tp, "--layers": args.layers, "--batch": args.batch, "--seq": args.seq, "--steps": args.steps}
    command = [*launch, "python3", str(HERE / "bare_fsdp_tp.py")]
    command += [str(word) for pair in flags.items() for word in pair]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return seconds_a_step([float(line) for line in out.split()][:-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"pairs": 5, "ranks": 2, "tp": 2, "layers": 4, "batch": 8, "seq": 128, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    launch = [sys.executable, "-m", "mmm.launch", "-n", str(args.ranks), "--device", "cpu"]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{args.ranks} ranks, tp {args.tp}; seconds a step")  # fmt: skip
    ratios, bares = [], []
    for pair in range(args.pairs):
        with_record, without = example(args, launch), bare(args, launch)
        ratios.append(with_record / without)
        bares.append(without)
        print(f"pair {pair}: example {with_record:.4f}  bare {without:.4f}  ratio {ratios[-1]:.3f}", flush=True)
    middle = statistics.median(ratios)
    print(f"median ratio {middle:.3f} (bound {BOUND}), median bare step {statistics.median(bares):.3f} s")
    return int(middle > BOUND or statistics.median(bares) < SHORTEST)


if __name__ == "__main__":
    sys.exit(main())
