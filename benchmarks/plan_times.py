"""Step times that `mmm plan` predicts on this machine, beside those that real ranks measure.

    python benchmarks/plan_times.py [--machine FILE] [--repeats 3] [--only NAME …] [--json FILE] [--list]

First this machine is measured, as ``mmm plan --calibrate`` does (or FILE is read). Then each layout trains some steps
on CPU ranks of this host, a thread each; layouts take turns, so that load from elsewhere meets all of them, and of all
steps of a layout the fastest counts. The prediction knows the layout, the techniques and the machine file, and nothing
of these runs. Exit code 1 where Spearman's rank correlation is below 0.9, or the median error above 15 %.
"""

import contextlib
import importlib
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from mmm.plan.measured import step_seconds
from mmm.trainer.dry_run import for_a_few_steps
from mmm.trainer.options import parse

CORRELATION, MEDIAN = 0.9, 0.15
STEPS = 5
LLAMA = "lm --preset debug --dataset random --dim 256 --n_heads 8 --n_kv_heads 4 --ffn_dim 704 --vocab_size 2048"
LLAMA = f"{LLAMA} --seq_length 256 --batch_size 4"
DEEP = f"{LLAMA} --n_layers 4 --microbatches 4"
# Name → (ranks, program and flags).
CASES = {
    "one device": (1, LLAMA),
    "one device, batch 2": (1, LLAMA.replace("batch_size 4", "batch_size 2")),
    "one device, 4 layers": (1, f"{LLAMA} --n_layers 4"),
    "checkpointing full": (1, f"{LLAMA} --activation_checkpointing full"),
    "microbatches": (1, f"{LLAMA} --microbatches 4"),
    "loss in chunks": (1, f"{LLAMA} --loss_chunks 4"),
    "ddp 2": (2, f"{LLAMA} --parallel ddp"),
    "ddp 4": (4, f"{LLAMA} --parallel ddp"),
    "zero1 2": (2, f"{LLAMA} --parallel zero1"),
    "zero2 4": (4, f"{LLAMA} --parallel zero2"),
    "fsdp 2": (2, LLAMA),
    "fsdp 4": (4, LLAMA),
    "fsdp 2 checkpointing": (2, f"{LLAMA} --activation_checkpointing full"),
    "fsdp 2 microbatches": (2, f"{LLAMA} --microbatches 2"),
    "hsdp 4": (4, f"{LLAMA} --parallel hsdp"),
    "tp 2": (2, f"{LLAMA} --tp 2"),
    "tp 4": (4, f"{LLAMA} --tp 4"),
    "fsdp·tp 4": (4, f"{LLAMA} --tp 2"),
    "cp 2 ring": (2, f"{LLAMA} --cp 2"),
    "cp 2 ulysses": (2, f"{LLAMA} --cp 2 --cp_style ulysses"),
    "cp 4 ring": (4, f"{LLAMA} --cp 4"),
    "fsdp·cp 4": (4, f"{LLAMA} --cp 2"),
    "pp 2 gpipe": (2, f"{DEEP} --pp 2 --schedule GPipe"),
    "pp 2 1f1b": (2, f"{DEEP} --pp 2 --schedule 1F1B"),
    "pp 4 1f1b": (4, f"{DEEP} --pp 4 --schedule 1F1B"),
    "pp·fsdp 4": (4, f"{DEEP} --pp 2"),
    "pp·tp 4": (4, f"{DEEP} --pp 2 --tp 2"),
}


def train(line: str, outdir: str) -> None:
    """What a rank does: some steps, of a program that knows nothing."""
    name, *words = line.split()
    program = importlib.import_module(f"mmm.trainer.{name}")
    sys.argv = [name, *words, "--device", "cpu"]
    options = replace(for_a_few_steps(parse(program.Config)), max_iters=STEPS, outdir=Path(outdir))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        program.train(options)


def measured(line: str, ranks: int) -> list[float]:
    """Seconds of each step but the first."""
    with tempfile.TemporaryDirectory() as folder:
        return step_seconds(partial(train, line, f"{folder}/run"), ranks)[1:]
