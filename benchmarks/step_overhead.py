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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import h5py
import torch

HERE = Path(__file__).parent
RATIO_BOUND = 1.02
# Seconds. Of a shorter one the time stamps say too little.
SHORTEST_STEP = 0.1
WARMUP_STEPS = 3
# Images of the data set ``digits`` that are trained on.
DIGITS = 1437


@dataclass(frozen=True)
class Setting:
    """What both programs of a pair are started with."""

    ranks: int
    tp: int
    steps: int
    outdir: Path

    def run(self, *target: object) -> str:
        """Launch a program on the CPU. Returns what it printed."""
        launch = [sys.executable, "-m", "mmm_launch", "-n", str(self.ranks), "--device", "cpu", "python3"]
        command = launch + [str(argument) for argument in target]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def program(self, module: str, flags: str, *more: object) -> str:
        """Run a program of the package. Returns its log."""
        return self.run("-m", module, *flags.split(), *more, "--outdir", self.outdir)

    def bare(self, file: str, *flags: object) -> list[float]:
        """Run a bare loop. Returns the time stamp of each step's end."""
        return [float(line) for line in self.run(HERE / file, *flags).split()]


def logged_times(log: str) -> list[float]:
    """The time stamp of each step in a log. The last step is left out: it validates."""
    stamps = re.findall(r"\[([^\]]+)\]\[INFO\]\[\w+:\d+\] - iter=", log)
    times = [datetime.fromisoformat(stamp).timestamp() for stamp in stamps]
    return times[:-1]


def seconds_a_step(times: list[float]) -> float:
    """Median time from one stamp to the next, without warm-up."""
    steps = itertools.pairwise(times[WARMUP_STEPS:])
    return statistics.median(end - begin for begin, end in steps)


# Each of the four returns the seconds of a step: of the program, and of its bare loop.
def fsdp_tp(setting: Setting) -> tuple[float, float]:
    """The main example."""
    flags = f"--tpsize {setting.tp} --batch_size 8 --vocab_size 256 --eval_batches 1 --no-plots --dtype fp32"
    log = setting.program("mmm.examples.fsdp_tp", flags, "--max_iters", setting.steps)
    bare = setting.bare("bare_fsdp_tp.py", "--tp", setting.tp, "--batch", 8, "--steps", setting.steps)
    return seconds_a_step(logged_times(log)), seconds_a_step(bare[:-1])


def vit(setting: Setting) -> tuple[float, float]:
    """The ViT trainer."""
    # Steps are then long enough to be compared.
    batch = 1024 // setting.ranks
    flags = f"--tpsize {setting.tp} --preset debug --dataset fake --batch_size {batch} --no-plots --warmup 0"
    log = setting.program("mmm.trainer.vit", flags, "--dtype", "fp32", "--max_iters", setting.steps)
    bare_flags = ["--model", "vit", "--tp", setting.tp, "--batch", batch, "--steps", setting.steps]
    bare = setting.bare("bare_vision.py", *bare_flags)
    return seconds_a_step(logged_times(log)), seconds_a_step(bare[:-1])


def cnn(setting: Setting) -> tuple[float, float]:
    """The CNN trainer. A step is the mean of the second epoch's, for both."""
    batch = 256 // setting.ranks
    flags = f"--tpsize {setting.tp} --dataset digits --no-dropout --batch_size {batch} --no-plots --epochs 2"
    setting.program("mmm.trainer.cnn", flags, "--dtype", "fp32")
    with h5py.File(setting.outdir / "train_dataset.h5") as record:
        # Of shape (rows, ranks). A row is an epoch's; rank 0's are those in the log.
        second_epoch = record["dt"][1, 0].item()
    global_batch = batch * setting.ranks // setting.tp
    # Of an epoch.
    steps = DIGITS // global_batch
    bare_flags = ["--model", "cnn", "--tp", setting.tp, "--batch", batch, "--steps", 2 * steps]
    bare = setting.bare("bare_vision.py", *bare_flags)
    return second_epoch / steps, (bare[-1] - bare[steps - 1]) / steps


def gpt(setting: Setting) -> tuple[float, float]:
    """The language-model trainer on nanoGPT's model for a CPU, and nanoGPT's loop."""
    text = setting.outdir.with_name("text")
    text.write_text("".join(path.read_text() for path in sorted(HERE.glob("*.py"))))
    # Steps are then long enough to be compared.
    batch = 48
    model = f"--model gpt --preset shakespeare-cpu --text {text} --tokenizer chars --global_batch_size {batch}"
    evaluation = "--eval_every 0 --eval_batches 1 --no-eval_train --log_every 1 --no-plots"
    log = setting.program("mmm.trainer.lm", f"{model} {evaluation}", "--max_iters", setting.steps)
    bare = setting.bare("bare_nanogpt.py", "--text", text, "--batch", batch, "--steps", setting.steps, "--stamps")
    return seconds_a_step(logged_times(log)), seconds_a_step(bare[:-1])


PROGRAMS = {"fsdp_tp": fsdp_tp, "vit": vit, "cnn": cnn, "gpt": gpt}
# Name → number of ranks, and how many of them are tp.
LAYOUTS = {"1": (1, 1), "dp2tp2": (4, 2)}


def compare(program: str, layout: str, pairs: int, steps: int) -> bool:
    """Print the pairs and their median. Returns whether the bounds are met."""
    ranks, tp = LAYOUTS[layout]
    ratios = []
    bare_seconds = []
    for pair in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            ours, bare = PROGRAMS[program](Setting(ranks, tp, steps, Path(folder) / "run"))
        ratio = ours / bare
        print(f"  pair {pair}: program {ours:.4f}  bare {bare:.4f}  ratio {ratio:.3f}", flush=True)
        ratios.append(ratio)
        bare_seconds.append(bare)
    ratio = statistics.median(ratios)
    step = statistics.median(bare_seconds)
    met = ratio <= RATIO_BOUND and step >= SHORTEST_STEP
    verdict = "met" if met else "MISSED"
    print(f"{program} on {layout}: median ratio {ratio:.3f} (bound ≤ {RATIO_BOUND}), ", end="")
    print(f"bare step {step:.3f} s (≥ {SHORTEST_STEP}): {verdict}", flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    processor = platform.processor() or platform.machine()
    load = os.getloadavg()[0]
    print(f"{processor}, {os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}; seconds a step")
    all_met = True
    for program in args.program or PROGRAMS:
        layouts = args.layout or LAYOUTS
        if program == "gpt":
            # NanoGPT's loop knows one rank.
            layouts = ["1"]
        for layout in layouts:
            met = compare(program, layout, args.pairs, args.steps)
            all_met = all_met and met
    return int(not all_met)


if __name__ == "__main__":
    sys.exit(main())
