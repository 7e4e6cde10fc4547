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
from collections.abc import Sequence

import torch
import xarray

import mmm.history

ROW_BOUND, OPTIMIZER_BOUND, MFU_BOUND, IMPORT_BOUND = 0.5, 0.08, 0.70, 0.10
DIM, LAYERS, SEQ, BATCH, VOCAB, HIDDEN = 512, 8, 512, 4, 256, 1440
SIZE = 2048  # of the square matrices
LM = ["-m", "mmm.trainer.lm", "--device", "cpu", "--dtype", "fp32", "--dataset", "random", "--no-plots"]
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


def run(words: Sequence[str]) -> str:
    return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout


def column(data: xarray.Dataset, name: str) -> list[float]:
    """Values of a record's rows, on its one rank; the first three, which warm up, and the last, which evaluates, are
    left out."""
    return data[name].values.ravel().tolist()[3:-1]


def trained(*words: str) -> xarray.Dataset:
    """The record of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run([*LM, "--eval_batches", "1", "--outdir", f"{folder}/run", *words])
        return mmm.history.load(f"{folder}/run").load()


def row_cost() -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [*LM[2:], "--eval_batches", "1", "--outdir", f"{folder}/run"]
        small = ["--preset", "debug", "--seq_length", "16", "--batch_size", "2", "--max_iters", "203"]
        log = run(["-c", TIME_ROWS, *words, *small])
    return 1000 * float(log.rpartition("row ")[2])


def optimizer_part() -> float:
    data = trained("--max_iters", "24")
    return statistics.median(a / b for a, b in zip(column(data, "dto"), column(data, "dt"), strict=True))


def product_rate() -> float:
    """FLOP/s of a product of square matrices, on all cores: the median of 10."""
    a, b = torch.randn(2, SIZE, SIZE)
    seconds = []
    for _ in range(12):
        begin = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begin)
    return 2 * SIZE**3 / statistics.median(seconds[2:])


def mfu() -> float:
    sizes = {"dim": DIM, "n_layers": LAYERS, "n_heads": 8, "n_kv_heads": 8, "vocab_size": VOCAB, "ffn_dim": HIDDEN}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    before = product_rate()
    data = trained("--seq_length", str(SEQ), "--batch_size", str(BATCH), "--max_iters", "14", *words)
    rate = (before + product_rate()) / 2
    weights = LAYERS * (4 * DIM**2 + 3 * DIM * HIDDEN) + DIM * VOCAB
    attention = LAYERS * 2 * SEQ * DIM  # scores and their product with the values, a token, half of them below
    return statistics.median(column(data, "tps")) * (6 * weights + 3 * attention) / rate


def imported(*words: str) -> dict[str, float]:
    """Seconds of each module's own code, by its name: what python says of a command's imports."""
    done = subprocess.run([sys.executable, "-X", "importtime", *words], check=True, capture_output=True, text=True)
    found = re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", done.stderr)
    return {name: int(microseconds) / 1e6 for microseconds, name in found}


def import_part() -> float:
    torchs = imported("-c", TORCH_ALONE, *run(["-c", NAMES]).split()).keys()
    parts = []
    for _ in range(3):
        seconds = imported("-c", "import mmm.trainer.lm")
        parts.append(sum(took for name, took in seconds.items() if name not in torchs) / sum(seconds.values()))
    return statistics.median(parts)


FIGURES = {  # name: (what measures it, its bound, whether that is the most, how to print it)
    "row": (row_cost, ROW_BOUND, True, "{:.3f} ms"),
    "optimizer": (optimizer_part, OPTIMIZER_BOUND, True, "{:.1%}"),
    "mfu": (mfu, MFU_BOUND, False, "{:.3f}"),
    "import": (import_part, IMPORT_BOUND, True, "{:.1%}"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FIGURES)
    args = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}"
    )
    missed = False
    for name in [args.only] if args.only else FIGURES:
        measure, bound, most, form = FIGURES[name]
        value = measure()
        met = value <= bound if most else value >= bound
        missed = missed or not met
        print(
            f"{name:10}{form.format(value):>10}   bound: {'≤' if most else '≥'} {form.format(bound)}   "
            f"{'met' if met else 'MISSED'}",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
