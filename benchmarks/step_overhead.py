"""What the log, the record and the checks of a program cost a step, against a bare PyTorch loop.

    python benchmarks/step_overhead.py [--program fsdp_tp|vit|cnn] [--pairs 5] [--ranks 2]

Runs the program and ``benchmarks/bare_*.py`` in turn, whole commands, and compares the time from one step's end to the
next's: the program's from the time stamps of its log, so that everything it does is in it. (The CNN logs one row an
epoch: its steps are those of the row.) Exit code 1 where the median ratio of the pairs is above 1.03, or a step is
shorter than 0.1 s.
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


def run(launch: list[str], *words: object) -> str:
    return subprocess.run([*launch, "python3", *map(str, words)], check=True, capture_output=True, text=True).stdout


def stamps(log: str) -> list[float]:
    """Seconds, one a step; the last step, which validates, is left out."""
    found = re.findall(r"\[([^\]]+)\]\[INFO\]\[\w+:\d+\] - iter=", log)
    return [datetime.fromisoformat(stamp).timestamp() for stamp in found][:-1]


def fsdp_tp(launch: list[str], ranks: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the main example on tp 2, and of its bare loop."""
    flags = "--tpsize 2 --batch_size 8 --dataset random --vocab_size 256 --eval_batches 1 --no-plots"
    log = run(launch, "-m", "mmm.examples.fsdp_tp", *flags.split(), "--max_iters", steps, "--outdir", folder)
    bare = run(launch, HERE / "bare_fsdp_tp.py", "--tp", 2, "--batch", 8, "--steps", steps)
    return seconds_a_step(stamps(log)), seconds_a_step([float(line) for line in bare.split()][:-1])


def vit(launch: list[str], ranks: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the ViT trainer, and of its bare loop."""
    flags = "--preset debug --dataset fake --batch_size 128 --no-plots --warmup 0"
    log = run(launch, "-m", "mmm.trainer.vit", *flags.split(), "--max_iters", steps, "--outdir", folder)
    bare = run(launch, HERE / "bare_vision.py", "--model", "vit", "--batch", 128, "--steps", steps)
    return seconds_a_step(stamps(log)), seconds_a_step([float(line) for line in bare.split()][:-1])


def cnn(launch: list[str], ranks: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the CNN trainer, and of its bare loop: the mean over the second epoch, for both."""
    flags = "--dataset digits --no-dropout --batch_size 64 --no-plots --epochs 2"
    epoch = 1437 // (64 * ranks)
    log = run(launch, "-m", "mmm.trainer.fsdp", *flags.split(), "--outdir", folder)
    bare = run(launch, HERE / "bare_vision.py", "--model", "cnn", "--batch", 64, "--steps", 2 * epoch)
    times = [float(line) for line in bare.split()]
    return float(re.findall(r" dt=(\S+)", log)[1]) / epoch, (times[-1] - times[epoch - 1]) / epoch


PROGRAMS = {"fsdp_tp": fsdp_tp, "vit": vit, "cnn": cnn}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, default="fsdp_tp")
    for name, default in {"pairs": 5, "ranks": 2, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    launch = [sys.executable, "-m", "mmm.launch", "-n", str(args.ranks), "--device", "cpu"]
    print(
        f"{args.program}: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, {args.ranks} ranks; seconds a step"
    )
    ratios, bares = [], []
    for pair in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            ours, bare = PROGRAMS[args.program](launch, args.ranks, args.steps, f"{folder}/run")
        ratios.append(ours / bare)
        bares.append(bare)
        print(f"pair {pair}: program {ours:.4f}  bare {bare:.4f}  ratio {ratios[-1]:.3f}", flush=True)
    middle = statistics.median(ratios)
    print(f"median ratio {middle:.3f} (bound {BOUND}), median bare step {statistics.median(bares):.3f} s")
    return int(middle > BOUND or statistics.median(bares) < SHORTEST)


if __name__ == "__main__":
    sys.exit(main())
