"""Step times that `mmm plan` predicts on this machine, beside those that real ranks measure.

    python benchmarks/plan_times.py [--machine FILE] [--repeats 3] [--only NAME …] [--json FILE] [--list]

First this machine is measured, as ``mmm machine --measure`` does (or FILE is read). Then each layout trains some steps
on CPU ranks of this host, a thread each; layouts take turns, so that load from elsewhere meets all of them, and of all
steps of a layout the fastest counts. ``busy`` is what other work on the host changes least: the CPU seconds of the
busiest rank, or of all ranks over the cores; what ranks wait for each other is not in it. The prediction knows layout,
techniques and the machine file, and nothing of these runs. Its error is relative to the measured value before it. Exit
code 1 where for ``step`` Spearman's rank correlation is below 0.9, or the median error above 15 %.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from plan_measured import StepTime, step_times

from mmm.run.command_line import for_a_few_steps, parse
from mmm.run.options import replace_flags
from mmm_lab.planner.machine_text import assumed
from mmm_lab.planner.measure import measure_machine
from mmm_lab.planner.predict import predict
from mmm_launch.machines.machine import Machine, read

# Bounds: of the correlation from below, of the relative error from above.
CORRELATION, MEDIAN = 0.9, 0.15
STEPS = 5
LLAMA = "lm --preset debug --dataset random --dim 256 --n_heads 8 --n_kv_heads 4 --ffn_dim 704 --vocab_size 2048"
LLAMA = f"{LLAMA} --seq_length 256 --batch_size 4"
# Enough layers for four stages of a pipeline, and microbatches to fill it.
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
    name, *arguments = line.split()
    program = importlib.import_module(f"mmm.trainer.{name}")
    sys.argv = [name, *arguments, "--device", "cpu"]
    options = replace_flags(for_a_few_steps(parse(program.Config)), max_iters=STEPS, outdir=Path(outdir))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        program.train(options)


def measured(line: str, ranks: int) -> StepTime:
    """The fastest of all steps but the first, by each of its two times."""
    with tempfile.TemporaryDirectory() as folder:
        steps = step_times(partial(train, line, f"{folder}/run"), ranks)[1:]
    return StepTime(min(step.seconds for step in steps), min(step.busy for step in steps))


def predicted(line: str, ranks: int, machine: Machine) -> tuple[str, float]:
    """The layout, and seconds of a step: what the run's own record would keep."""
    name, *arguments = line.split()
    program = importlib.import_module(f"mmm.trainer.{name}")
    sys.argv = [name, *arguments, "--device", "cpu"]
    # Rank 0 of one host, as its launcher would say; it meets nobody, so any address will do.
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    resolved = program.resolve(parse(program.Config))
    prediction = predict(resolved, "cpu", "fp32", machine.changed({"ranks_per_host": ranks}))
    assert prediction is not None
    assert prediction.seconds is not None
    return str(resolved.layout), prediction.seconds


def places(values: list[float]) -> list[int]:
    """The place of each value among all, the smallest first."""
    indices = range(len(values))
    order = sorted(indices, key=values.__getitem__)
    return [order.index(index) for index in indices]


def spearman(one: list[float], other: list[float]) -> float:
    """Rank correlation; 1 for a single value."""
    if len(one) < 2:
        return 1.0
    return statistics.correlation(places(one), places(other))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--machine", type=Path, help="what mmm machine --measure wrote; default: measured first")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all layouts (default: 3)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    options = parser.parse_args()
    if options.list:
        print("\n".join(options.only))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = options.machine or Path(folder) / "machine.json"
        if options.machine is None:
            print(f"load {os.getloadavg()[0]:.1f}")
            print("\n".join(assumed(measure_machine(path))))
        machine = read(path)
    turns: dict[str, list[StepTime]] = {name: [] for name in options.only}
    for turn in range(options.repeats):
        for name in options.only:
            ranks, line = CASES[name]
            turns[name].append(measured(line, ranks))
        print(f"round {turn + 1} of {options.repeats}: load {os.getloadavg()[0]:.1f}", flush=True)
    print("milliseconds per step")
    print(HEAD)
    rows = []
    for name in options.only:
        ranks, line = CASES[name]
        layout, seconds = predicted(line, ranks, machine)
        # Each from the round in which it was the smallest.
        step = min(turn.seconds for turn in turns[name])
        busy = min(turn.busy for turn in turns[name])
        row = {"name": name, "ranks": ranks, "layout": layout, "predicted": seconds, "step": step, "busy": busy}
        print(line_of(row, turns[name]))
        rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    correlation, median = agreement(rows, "step")
    # What other work on the host changes least is printed, and has no bound.
    agreement(rows, "busy")
    return int(correlation < CORRELATION or median > MEDIAN)


HEAD = (
    f"{'case':<24}{'layout':<26}{'ranks':>5}"
    f"{'predicted':>11}{'step':>9}{'error':>7}{'busy':>9}{'error':>7}   steps of each round"
)


def line_of(row: dict[str, Any], turns: list[StepTime]) -> str:
    """A row as it is printed, in milliseconds."""
    cells = f"{row['name']:<24}{row['layout']:<26}{row['ranks']:>5}"
    seconds = row["predicted"]
    cells += f"{seconds * 1e3:>11.1f}"
    for kind in ("step", "busy"):
        error = seconds / row[kind] - 1
        cells += f"{row[kind] * 1e3:>9.1f}{error:>7.0%}"
    of_rounds = " ".join(f"{turn.seconds * 1e3:.0f}" for turn in turns)
    return f"{cells}   {of_rounds}"


def agreement(rows: list[dict[str, Any]], kind: str) -> tuple[float, float]:
    """Spearman's correlation and the median error, which are printed."""
    ours = [row["predicted"] for row in rows]
    theirs = [row[kind] for row in rows]
    correlation = spearman(ours, theirs)
    median = statistics.median(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    print(f"{len(rows)} layouts, {kind}: Spearman's rank correlation {correlation:.2f}, median error {median:.0%}")
    return correlation, median


if __name__ == "__main__":
    sys.exit(main())
