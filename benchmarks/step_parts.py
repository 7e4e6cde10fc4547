"""What a step of a language model is made of on this machine's CPU: each figure beside its bound.

    python benchmarks/step_parts.py [--only row|optimizer|mfu|import]

row        milliseconds that logging and recording one row take, on one rank: the mean of 200, what is written included
optimizer  the optimizer's part of a step of ``mmm.trainer.lm``, clipping included (``dto`` of ``dt``): the median
mfu        model FLOPs utilisation of the Transformer of 8 layers, dim 512, seq 512, fp32, one rank, all cores: the
           FLOPs of its matrix products (6 a weight and token; of attention, those below the diagonal), over what a
           product of square matrices reaches on the same cores
import     the part of ``import mmm.trainer.lm`` that goes to modules which PyTorch's own do not import: the median of 3

Exit code 1 where a figure misses its bound. Nothing else should run on the machine meanwhile.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xarray

import mmm.history

DIM = 512
LAYERS = 8
HEADS = 8
HIDDEN = 1440
SEQ = 512
BATCH = 4
VOCABULARY = 256
MATRIX_SIZE = 2048  # of the square matrices
LM = "-m mmm.trainer.lm"
FLAGS = "--device cpu --dtype fp32 --dataset random --no-plots --eval_batches 1"
# Programs that a process of its own runs.
TIME_ROWS = """
import sys, time
from mmm.trainer import lm
from mmm.run.run import Run
seconds, row = [], Run.row
def timed(*args, **more):
    begin = time.perf_counter()
    try: return row(*args, **more)
    finally: seconds.append(time.perf_counter() - begin)
Run.row = timed
lm.train(lm.parse(lm.Config, lm.__doc__))
print("row", sum(seconds[3:]) / len(seconds[3:]))
"""
TORCH_ALONE = """
import contextlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        __import__(name)  # unlike import_module, -X importtime sees it
"""
NAMES = "import sys, mmm.trainer.lm; print(*(m for m in sys.modules if m.partition('.')[0] == 'torch'))"


def python(*arguments: str) -> str:
    """Run Python with these arguments. Returns what it printed."""
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def training(flags: str) -> xarray.Dataset:
    """The record of a run of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        outdir = f"{folder}/run"
        python(*f"{LM} {FLAGS} {flags}".split(), "--outdir", outdir)
        return mmm.history.load(outdir).load()


def column(data: xarray.Dataset, name: str) -> list[float]:
    """A record's values of one rank: without the first three rows, which warm up, and the last, which evaluates."""
    return data[name].values.ravel().tolist()[3:-1]


def row_milliseconds() -> float:
    flags = f"{FLAGS} --preset debug --seq_length 16 --batch_size 2 --max_iters 203"
    with tempfile.TemporaryDirectory() as folder:
        output = python("-c", TIME_ROWS, *flags.split(), "--outdir", f"{folder}/run")
    seconds = float(output.rpartition("row ")[2])
    return 1000 * seconds


def optimizer_share() -> float:
    data = training("--max_iters 24")
    rows = zip(column(data, "dto"), column(data, "dt"), strict=True)
    return statistics.median(optimizer / step for optimizer, step in rows)


def product_rate() -> float:
    """FLOP/s of a product of square matrices, on all cores: the median of 10."""
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE)
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    # The first two are warm-up.
    return 2 * MATRIX_SIZE**3 / statistics.median(seconds[2:])


def flops_per_token() -> float:
    """FLOPs of the matrix products, forward and backward."""
    # Four matrices of attention, three of the feed-forward network.
    weights = LAYERS * (4 * DIM**2 + 3 * DIM * HIDDEN) + DIM * VOCABULARY
    # Scores and their product with the values; half of them are below the diagonal.
    attention = LAYERS * 2 * SEQ * DIM
    # A backward takes two products for each of the forward's. A product takes 2 FLOPs a weight.
    return 6 * weights + 3 * attention


def mfu() -> float:
    sizes = f"--dim {DIM} --n_layers {LAYERS} --n_heads {HEADS} --n_kv_heads {HEADS} --ffn_dim {HIDDEN}"
    before = product_rate()
    data = training(f"{sizes} --vocab_size {VOCABULARY} --seq_length {SEQ} --batch_size {BATCH} --max_iters 14")
    # The machine may have become slower meanwhile.
    peak = (before + product_rate()) / 2
    tokens_per_second = statistics.median(column(data, "tps"))
    return tokens_per_second * flops_per_token() / peak


def import_seconds(*arguments: str) -> dict[str, float]:
    """Seconds of each module's own code, by its name: what ``-X importtime`` says of a command's imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", done.stderr)
    return {module: int(microseconds) / 1e6 for microseconds, module in lines}


def import_share() -> float:
    modules_of_torch = python("-c", NAMES).split()
    imported_by_torch = import_seconds("-c", TORCH_ALONE, *modules_of_torch).keys()
    shares = []
    for _ in range(3):
        seconds = import_seconds("-c", "import mmm.trainer.lm")
        ours = sum(seconds[module] for module in seconds if module not in imported_by_torch)
        shares.append(ours / sum(seconds.values()))
    return statistics.median(shares)


@dataclass(frozen=True)
class Figure:
    """A figure and its bound.

    Attributes:
        measure: what returns the value.
        bound: the value that is still good.
        higher_is_better: the bound is the least value, not the largest.
        form: how to print a value.
    """

    measure: Callable[[], float]
    bound: float
    form: str
    higher_is_better: bool = False

    def met(self, value: float) -> bool:
        if self.higher_is_better:
            return value >= self.bound
        return value <= self.bound


FIGURES = {
    "row": Figure(row_milliseconds, 0.5, "{:.3f} ms"),
    "optimizer": Figure(optimizer_share, 0.08, "{:.1%}"),
    "mfu": Figure(mfu, 0.70, "{:.3f}", higher_is_better=True),
    "import": Figure(import_share, 0.10, "{:.1%}"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FIGURES)
    args = parser.parse_args()
    processor = platform.processor() or platform.machine()
    print(f"{processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    names = [args.only] if args.only else list(FIGURES)
    missed = False
    for name in names:
        figure = FIGURES[name]
        value = figure.measure()
        verdict = "met"
        if not figure.met(value):
            verdict = "MISSED"
            missed = True
        sign = "≥" if figure.higher_is_better else "≤"
        bound = figure.form.format(figure.bound)
        print(f"{name:10}{figure.form.format(value):>10}   bound: {sign} {bound}   {verdict}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
