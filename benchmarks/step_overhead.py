"""What the log, the record and the checks of a program cost a step, against a bare PyTorch loop.

    python benchmarks/step_overhead.py [--program fsdp_tp|vit|cnn|gpt] [--layout 1|dp2tp2] [--pairs 3] [--steps 20]

Runs the program and ``benchmarks/bare_*.py`` in turn, whole commands in float32, and compares the time from one step's
end to the next's: the program's from the time stamps of its log, so that everything it does is in it. (The CNN logs one
row an epoch: its steps are those of the row. The GPT's loop is nanoGPT's, on one rank.) Without --program and
--layout, all on both. Exit code 1 where a median ratio of the pairs is above 1.02, or a step is shorter than 0.1 s.
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

import h5py
import torch

HERE = Path(__file__).parent
BOUND, SHORTEST = 1.02, 0.1
LAYOUTS = {"1": (1, 1), "dp2tp2": (4, 2)}  # ranks, and how many of them are tp


def seconds_a_step(stamps: list[float]) -> float:
    """Median time between stamps, the first three steps left out: they warm up."""
    return statistics.median(b - a for a, b in itertools.pairwise(stamps[3:]))


def run(launch: list[str], *words: object) -> str:
    return subprocess.run([*launch, "python3", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout


def stamps(log: str) -> list[float]:
    """Seconds, one a step; the last step, which validates, is left out."""
    found = re.findall(r"\[([^\]]+)\]\[INFO\]\[\w+:\d+\] - iter=", log)
    return [datetime.fromisoformat(stamp).timestamp() for stamp in found][:-1]


def fsdp_tp(launch: list[str], ranks: int, tp: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the main example, and of its bare loop."""
    flags = f"--tpsize {tp} --batch_size 8 --vocab_size 256 --eval_batches 1 --no-plots --dtype fp32"
    log = run(launch, "-m", "mmm.examples.fsdp_tp", *flags.split(), "--max_iters", steps, "--outdir", folder)
    bare = run(launch, HERE / "bare_fsdp_tp.py", "--tp", tp, "--batch", 8, "--steps", steps)
    return seconds_a_step(stamps(log)), seconds_a_step([float(line) for line in bare.split()][:-1])


def vit(launch: list[str], ranks: int, tp: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the ViT trainer, and of its bare loop."""
    batch = 1024 // ranks  # steps long enough to be compared
    flags = f"--tpsize {tp} --preset debug --dataset fake --batch_size {batch} --no-plots --warmup 0 --dtype fp32"
    log = run(launch, "-m", "mmm.trainer.vit", *flags.split(), "--max_iters", steps, "--outdir", folder)
    bare = run(launch, HERE / "bare_vision.py", "--model", "vit", "--tp", tp, "--batch", batch, "--steps", steps)
    return seconds_a_step(stamps(log)), seconds_a_step([float(line) for line in bare.split()][:-1])


def cnn(launch: list[str], ranks: int, tp: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the CNN trainer, and of its bare loop: the mean over the second epoch, for both."""
    batch = 256 // ranks
    flags = f"--tpsize {tp} --dataset digits --no-dropout --batch_size {batch} --no-plots --epochs 2 --dtype fp32"
    epoch = 1437 // (batch * ranks // tp)
    run(launch, "-m", "mmm.trainer.cnn", *flags.split(), "--outdir", folder)
    with h5py.File(Path(folder) / "train_dataset.h5") as record:
        second_row = record["dt"][1, 0].item()  # a row is an epoch's; of rank 0, as in the log
    bare = run(launch, HERE / "bare_vision.py", "--model", "cnn", "--tp", tp, "--batch", batch, "--steps", 2 * epoch)
    times = [float(line) for line in bare.split()]
    return second_row / epoch, (times[-1] - times[epoch - 1]) / epoch


def gpt(launch: list[str], ranks: int, tp: int, steps: int, folder: str) -> tuple[float, float]:
    """Seconds a step of the language-model trainer on nanoGPT's model for a CPU, and of nanoGPT's loop."""
    text, batch = Path(folder).with_name("text"), 48  # steps long enough to be compared
    text.write_text("".join(path.read_text() for path in sorted(HERE.glob("*.py"))))
    flags = f"--model gpt --preset shakespeare-cpu --text {text} --tokenizer chars --global_batch_size {batch}"
    once = "--eval_every 0 --eval_batches 1 --no-eval_train --log_every 1 --no-plots"
    log = run(launch, "-m", "mmm.trainer.lm", *flags.split(), *once.split(), "--max_iters", steps, "--outdir", folder)
    bare = run(launch, HERE / "bare_nanogpt.py", "--text", text, "--batch", batch, "--steps", steps, "--stamps")
    return seconds_a_step(stamps(log)), seconds_a_step([float(line) for line in bare.split()][:-1])


PROGRAMS = {"fsdp_tp": fsdp_tp, "vit": vit, "cnn": cnn, "gpt": gpt}


def compare(program: str, layout: str, pairs: int, steps: int) -> bool:
    """Print the pairs and their median. Returns whether the bounds are met."""
    ranks, tp = LAYOUTS[layout]
    launch = [sys.executable, "-m", "mmm_launch", "-n", str(ranks), "--device", "cpu"]
    ratios, bares = [], []
    for pair in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            ours, bare = PROGRAMS[program](launch, ranks, tp, steps, f"{folder}/run")
        ratios.append(ours / bare)
        bares.append(bare)
        print(f"  pair {pair}: program {ours:.4f}  bare {bare:.4f}  ratio {ratios[-1]:.3f}", flush=True)
    middle, step = statistics.median(ratios), statistics.median(bares)
    met = middle <= BOUND and step >= SHORTEST
    print(
        f"{program} on {layout}: median ratio {middle:.3f} (bound ≤ {BOUND}), bare step {step:.3f} s (≥ {SHORTEST}): "
        f"{'met' if met else 'MISSED'}",
        flush=True,
    )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    for name, default in {"pairs": 3, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch "
        f"{torch.__version__}; seconds a step"
    )
    met = True
    for program in args.program or PROGRAMS:
        for layout in args.layout or LAYOUTS if program != "gpt" else ["1"]:
            met &= compare(program, layout, args.pairs, args.steps)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
