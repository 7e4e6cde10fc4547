"""What a dry run predicts, beside what real ranks measure: peak memory, and every collective of a step.

    python benchmarks/plan_accuracy.py [--only NAME …] [--json FILE] [--list]

For each layout the trainer runs some steps and an evaluation on CPU ranks of this host, each under PyTorch's own
``MemTracker``, and as a dry run of each distinct rank. A row has the worst rank of those. Gloo's threads let go of what
they have sent later on a busy machine, which can only add to a peak; so while a rank's differs by more than 0.1 %, the
real ranks run again, five times at most, and the lowest counts. Exit code 1 where the median error of all layouts is
above 1 %, one is above 3 %, or a collective differs.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from plan_measured import Measured, measure

from mmm.run.command_line import for_a_few_steps, parse
from mmm.run.options import replace_flags
from mmm_lab.planner.dry_run import RankReport, dry_run

# Of the relative error of a peak: bounds of all layouts, and from where on the real ranks run again.
MEDIAN, WORST, EXACT = 0.01, 0.03, 1e-3
MOST = 5  # runs of the real ranks
LLAMA = "lm --preset debug --dataset random --batch_size 4"
DEEP = f"{LLAMA} --n_layers 4 --microbatches 4"
# Every token goes to all experts: real routing is then as even as that of a dry run, which has no scores to go by.
EXPERTS = f"{LLAMA} --n_experts 4 --top_k 4"
VIT = "vit --preset debug --batch_size 4"
CNN = "cnn --dataset digits --global_batch_size 32"
# Name → (ranks, program and flags).
CASES = {
    "llama one device": (1, LLAMA),
    "llama ddp": (4, f"{LLAMA} --parallel ddp"),
    "llama zero1": (4, f"{LLAMA} --parallel zero1"),
    "llama zero2": (4, f"{LLAMA} --parallel zero2"),
    "llama zero1·tp": (4, f"{LLAMA} --parallel zero1 --tp 2"),
    "llama zero1·cp": (4, f"{LLAMA} --parallel zero1 --cp 2"),
    "llama pp·zero1": (4, f"{DEEP} --parallel zero1 --pp 2"),
    "llama pp zbv·zero1": (4, f"{DEEP} --parallel zero1 --pp 2 --schedule ZBVZeroBubble"),
    "llama pp·zero1 bf16": (4, f"{DEEP} --parallel zero1 --pp 2 --dtype bf16"),
    "llama zero1·tp bf16": (4, f"{LLAMA} --parallel zero1 --tp 2 --dtype bf16"),
    "llama fsdp": (4, LLAMA),
    "llama fsdp always": (4, f"{LLAMA} --reshard_after_forward always"),
    "llama fsdp never": (4, f"{LLAMA} --reshard_after_forward never"),
    "llama fsdp sgd": (2, f"{LLAMA} --optimizer sgd"),
    "llama fsdp bf16": (2, f"{LLAMA} --dtype bf16"),
    "llama fsdp fp64": (2, f"{LLAMA} --dtype fp64"),
    "llama hsdp": (4, f"{LLAMA} --parallel hsdp"),
    "llama tp": (4, f"{LLAMA} --tp 4 --n_kv_heads 4"),
    "llama tp, kv shared": (4, f"{LLAMA} --tp 4"),
    "llama fsdp·tp": (4, f"{LLAMA} --tp 2"),
    "llama cp ring": (4, f"{LLAMA} --cp 4"),
    "llama cp ulysses": (2, f"{LLAMA} --cp 2 --cp_style ulysses"),
    "llama cp usp": (4, f"{LLAMA} --cp 4 --cp_style usp --ulysses 2"),
    "llama fsdp·cp": (4, f"{LLAMA} --cp 2"),
    "llama cp·tp": (4, f"{LLAMA} --cp 2 --tp 2"),
    "llama pp gpipe": (2, f"{DEEP} --pp 2 --schedule GPipe"),
    "llama pp 1f1b": (2, f"{DEEP} --pp 2 --schedule 1F1B"),
    "llama pp4 1f1b": (4, f"{DEEP} --pp 4 --schedule 1F1B"),
    "llama pp interleaved": (2, f"{DEEP} --pp 2 --schedule Interleaved1F1B"),
    "llama pp zbv": (2, f"{DEEP} --pp 2 --schedule ZBVZeroBubble"),
    "llama pp dualpipe": (2, f"{DEEP} --pp 2 --schedule DualPipeV"),
    "llama pp·fsdp": (4, f"{DEEP} --pp 2"),
    "llama pp·tp": (4, f"{DEEP} --pp 2 --tp 2"),
    "llama pp·cp": (4, f"{DEEP} --pp 2 --cp 2"),
    "llama pp·fsdp bf16": (4, f"{DEEP} --pp 2 --dtype bf16"),
    "llama checkpointing full": (2, f"{LLAMA} --activation_checkpointing full"),
    "llama checkpointing selective": (2, f"{LLAMA} --activation_checkpointing selective"),
    "llama tp checkpointing": (2, f"{LLAMA} --tp 2 --activation_checkpointing full"),
    "llama pp checkpointing": (2, f"{DEEP} --pp 2 --activation_checkpointing full"),
    "llama loss in chunks": (2, f"{LLAMA} --loss_chunks 4"),
    "llama tp, loss in chunks": (2, f"{LLAMA} --tp 2 --loss_chunks 4"),
    "llama offload": (2, f"{LLAMA} --offload"),
    "llama microbatches": (2, f"{LLAMA} --microbatches 4"),
    "llama tied": (2, f"{LLAMA} --tie_word_embeddings"),
    "llama tied pp": (2, f"{DEEP} --pp 2 --tie_word_embeddings"),
    "experts fsdp": (2, EXPERTS),
    "experts ep": (4, f"{EXPERTS} --ep 2"),
    "experts zero1·ep": (4, f"{EXPERTS} --parallel zero1 --ep 2"),
    "experts ep·tp": (4, f"{EXPERTS} --ep 2 --tp 2"),
    "experts pp·ep": (4, f"{EXPERTS} --n_layers 4 --pp 2 --ep 2 --microbatches 4"),
    "vit ddp": (2, f"{VIT} --parallel ddp"),
    "vit fsdp": (4, VIT),
    "vit fsdp·tp": (4, f"{VIT} --tp 2"),
    "vit zero1·tp": (4, f"{VIT} --parallel zero1 --tp 2"),
    "vit pp": (2, f"{VIT} --pp 2"),
    "cnn zero1": (2, f"{CNN} --parallel zero1"),
    "cnn fsdp": (4, CNN),
    "cnn pp": (2, f"{CNN} --pp 2 --microbatches 4"),
    "llama pp·fsdp·tp": (8, f"{DEEP} --pp 2 --tp 2"),
    "llama pp·zero1·tp": (8, f"{DEEP} --parallel zero1 --pp 2 --tp 2"),
    "experts zero1·ep·tp": (8, f"{EXPERTS} --parallel zero1 --ep 2 --tp 2"),
    "llama hsdp·cp·tp": (8, f"{LLAMA} --parallel hsdp --cp 2 --tp 2"),
    "llama hsdp·tp": (8, f"{LLAMA} --parallel hsdp --tp 2"),
    "llama fsdp 8": (8, LLAMA),
    "llama hsdp 2·4": (8, f"{LLAMA} --parallel hsdp --dp_replicate 2"),
    "llama fsdp·tp4": (8, f"{LLAMA} --tp 4 --n_kv_heads 4"),
    "llama tp8": (8, f"{LLAMA} --tp 8 --n_heads 8 --n_kv_heads 8"),
    "llama pp4·fsdp": (8, f"{DEEP} --pp 4"),
    "llama fsdp·cp·tp": (8, f"{LLAMA} --cp 2 --tp 2"),
    "llama cp4·tp": (8, f"{LLAMA} --cp 4 --tp 2"),
    "experts fsdp·ep 8": (8, f"{EXPERTS} --ep 2"),
    "vit pp·fsdp·tp": (8, f"{VIT} --pp 2 --tp 2"),
    "cnn fsdp 8": (8, CNN),
    "experts pp·ep·tp": (8, f"{EXPERTS} --n_layers 4 --pp 2 --ep 2 --tp 2 --microbatches 4"),
}


def train(line: str, outdir: str | None = None) -> None:
    """What a rank does: some steps, of a program that knows nothing."""
    name, *arguments = line.split()
    program = importlib.import_module(f"mmm.trainer.{name}")
    sys.argv = [name, *arguments, "--device", "cpu"]
    options = for_a_few_steps(parse(program.Config))
    if outdir is not None:
        options = replace_flags(options, outdir=Path(outdir))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        program.train(options)


def real_ranks(line: str, ranks: int) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(partial(train, line, f"{folder}/run"), ranks)


def of_steps(measured: Measured) -> int:
    """Bytes. Before the first step rank 0 times a product of matrices (8 MB), and weights are drawn in pieces."""
    return max(size for phase, size in measured.peaks.items() if phase != "start")


def compare(name: str) -> dict:
    """A row: of the rank whose peak is furthest off, and of all ranks' calls."""
    ranks, line = CASES[name]
    began = time.perf_counter()
    dry = dry_run(partial(train, line), ranks)
    middle = time.perf_counter()
    runs = [real_ranks(line, ranks)]
    end = time.perf_counter()

    def peak_of_steps(report: RankReport) -> int:
        return max(peak.bytes for phase, peak in report.peaks.items() if phase != "start")

    def lowest(rank: int) -> int:
        return min(of_steps(run[rank]) for run in runs)

    def error_of(report: RankReport) -> float:
        return peak_of_steps(report) / lowest(report.rank) - 1

    while len(runs) < MOST and any(abs(error_of(report)) > EXACT for report in dry.ranks):
        runs.append(real_ranks(line, ranks))
    differ = [text for report in dry.ranks if (text := difference(report, runs[0][report.rank])) is not None]
    worst = max(dry.ranks, key=lambda report: abs(error_of(report)))
    return {
        "name": name,
        "ranks": ranks,
        "layout": str(dry.ranks[0].held.layout),
        "rank": worst.rank,
        "predicted": peak_of_steps(worst),
        "measured": lowest(worst.rank),
        "error": error_of(worst),
        "calls": sum(len(report.calls) for report in dry.ranks),
        "differ": differ,
        "runs": len(runs),
        "seconds": {"dry run": middle - began, "real ranks": end - middle},
    }


def difference(report: RankReport, measured: Measured) -> str | None:
    """How the calls of a rank differ, or None."""
    # The dry run keeps those of its last step, so of the real rank those of the same step count.
    last = report.calls[-1].phase if report.calls else "step 2"
    theirs = [(sent.axis, sent.call) for sent in measured.calls if sent.phase == last]
    ours = [(sent.axis, sent.call) for sent in report.calls]
    if ours == theirs:
        return None
    # Where one list is the beginning of the other, none of their pairs differs.
    dry, real = "length", ""
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            dry, real = str(one), str(other)
            break
    return f"rank {report.rank}: {len(ours)} and {len(theirs)} calls; dry {dry}, real {real}"


def line_of(row: dict) -> str:
    """A row as it is printed, in MiB."""
    predicted = row["predicted"] / 2**20
    measured = row["measured"] / 2**20
    sizes = f"{predicted:>12,.3f}{measured:>12,.3f}{row['error']:>+10.3%}"
    calls = f"{row['calls']:>7} {'differ' if row['differ'] else 'equal'}"
    return f"{row['name']:<32}{row['layout']:<18}{row['rank']:>5}{sizes}{calls}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    options = parser.parse_args()
    if options.list:
        print("\n".join(options.only))
        return 0
    print(f"{'':<32}{'layout':<18}{'rank':>5}{'dry, MiB':>12}{'real, MiB':>12}{'error':>10}  calls", flush=True)
    rows = []
    for name in options.only:
        row = compare(name)
        print(line_of(row), *row["differ"], sep="\n  ", flush=True)
        rows.append(row)
        # After each layout: a run that is cut short leaves what it has.
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    errors = [abs(row["error"]) for row in rows]
    median = statistics.median(errors)
    worst = max(errors)
    differ = sum(bool(row["differ"]) for row in rows)
    print(f"{len(rows)} layouts: median error {median:.3%}, worst {worst:.3%}; collectives differ in {differ}")
    return int(median > MEDIAN or worst > WORST or differ > 0)


if __name__ == "__main__":
    sys.exit(main())
