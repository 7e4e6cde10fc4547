"""The curves of the guide's chapters: what a rank holds and sends as one size changes.

    python benchmarks/guide_curves.py [CHAPTER …] [--out docs/guide/curves]

Each point is a dry run of rank 0: the real program of the chapter, in float32 on CPU ranks, counts its own tensors and
its own calls to process groups. `make test` compares such counts with those of real ranks. No point is a time, so the
curves are the same on every machine.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from mmm.units import MIB
from mmm_lab.cli.dry_run import dry_run_of, target_of
from mmm_lab.planner.dry_run import RankReport
from mmm_lab.planner.dry_run_report import totals

LM = "mmm.trainer.lm --preset debug --dataset random --vocab_size 256"
SWIN = "--model swin --preset debug --image_size 64 --batch_size 4 --no-plots"
STATE = ("parameters", "gradients", "optimizer state")
# Blue, red and green that colour-blind readers tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73")


def report(ranks: int, flags: str) -> RankReport:
    """Count what rank 0 of a program on so many ranks holds and sends."""
    target = target_of(["python3", "-m", *flags.split(), "--device", "cpu"])
    return dry_run_of(target, ranks, 0).ranks[0]


def held(ranks: int, flags: str, parts: tuple[str, ...] = ()) -> float:
    """MiB that rank 0 holds at its peak, of some parts or of all."""
    peak = report(ranks, flags).peak
    if not parts:
        return peak.bytes / MIB
    return sum(peak.parts[name] for name in parts) / MIB


def sent(ranks: int, flags: str, axes: tuple[str, ...]) -> float:
    """MiB that rank 0 sends in a step over some axes of the mesh."""
    entries = totals(report(ranks, flags))
    return sum(entry.sent for (axis, _), entry in entries.items() if axis in axes) / MIB


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: what is to be seen, in a sentence.
        x_label: what changes from point to point.
        y_label: what was counted, with its unit.
        x: the points.
        curves: label → y of a point x.
        doubles: x doubles from point to point, and is drawn so. Otherwise its scale is linear.
    """

    title: str
    x_label: str
    y_label: str
    x: tuple[int, ...]
    curves: dict[str, Callable[[int], float]]
    doubles: bool = True


# Name of the guide's page → its chart. Where the batch is not what changes, each rank has one sample, or all have 16.
CHARTS = {
    "one-device": Chart(
        "Activations grow with the batch; checkpointing keeps only a part of them",
        "samples in a step",
        "held at the peak, MiB",
        (1, 4, 8, 16, 32),
        {
            "no checkpointing": lambda n: held(1, f"{LM} --global_batch_size {n}"),
            "full checkpointing": lambda n: held(1, f"{LM} --global_batch_size {n} --activation_checkpointing full"),
        },
        doubles=False,
    ),
    "ddp": Chart(
        "DDP: a rank never sends more than twice its gradients",
        "ranks",
        "sent in a step, MiB",
        (2, 4, 8, 16, 32),
        {
            "counted": lambda n: sent(n, f"{LM} --parallel ddp --batch_size 1", ("dp_replicate", "dp_shard")),
            # 4 bytes of each of the model's parameters.
            "2 × gradients": lambda n: 2 * 4 * 119_104 / MIB,
        },
    ),
    "fsdp": Chart(
        "Parameters, gradients and optimizer state: FSDP shards them, DDP does not",
        "ranks",
        "held at the peak, MiB",
        (1, 2, 4, 8, 16),
        {
            "DDP": lambda n: held(n, f"{LM} --parallel ddp --batch_size 1", STATE),
            "FSDP": lambda n: held(n, f"{LM} --parallel fsdp --batch_size 1", STATE),
        },
    ),
    "hsdp": Chart(
        "HSDP on 16 ranks: more replicas, fewer bytes inside, more between groups",
        "replicas",
        "sent in a step, MiB",
        (2, 4, 8),
        {
            "inside a group (dp_shard)": lambda n: sent(16, hsdp(n), ("dp_shard",)),
            "between groups (dp_replicate)": lambda n: sent(16, hsdp(n), ("dp_replicate",)),
        },
    ),
    "tensor-parallel": Chart(
        "On 2 ranks: tp sends more with more tokens, FSDP does not",
        "samples of 128 tokens in a step",
        "sent in a step, MiB",
        (2, 4, 8, 16),
        {
            "tensor parallel": lambda n: sent(2, f"{LM} --tp 2 --global_batch_size {n}", ("tp",)),
            "FSDP": lambda n: sent(2, f"{LM} --global_batch_size {n}", ("dp_shard",)),
        },
        doubles=False,
    ),
    "pipeline": Chart(
        "2 stages: 1F1B keeps 2 micro-batches of activations, GPipe all of them",
        "micro-batches that the 16 samples are split into",
        "activations, MiB",
        (2, 4, 8, 16),
        {
            "GPipe": lambda n: held(2, pipeline(n, "GPipe"), ("activations",)),
            "1F1B": lambda n: held(2, pipeline(n, "1F1B"), ("activations",)),
        },
    ),
    "context-parallel": Chart(
        "Context parallel: each rank has the activations of its own tokens",
        "ranks of cp",
        "activations, MiB",
        (1, 2, 4, 8),
        {"16 samples of 128 tokens": lambda n: held(n, f"{LM} --cp {n} --global_batch_size 16", ("activations",))},
    ),
    "space": Chart(
        "Four images of 64 × 64 pixels on a Swin: a rank has some of the rows",
        "ranks of cp, which share the rows",
        "held at the peak, MiB",
        (1, 2, 4, 8),
        {"swin": lambda n: held(n, f"mmm.trainer.vit {SWIN} --cp {n}")},
    ),
    "experts": Chart(
        "8 experts on 4 ranks: ep sends tokens, FSDP sends experts",
        "samples of 128 tokens in a step",
        "sent in a step, MiB",
        (4, 8, 16, 32),
        {
            "ep4: tokens travel": lambda n: sent(4, experts(n, 4), ("ep", "expert_dp", "dp_shard")),
            "ep1: FSDP gathers the experts": lambda n: sent(4, experts(n, 1), ("ep", "expert_dp", "dp_shard")),
        },
        doubles=False,
    ),
    "several-axes": Chart(
        "8 ranks as dp·tp: what tp adds, and what FSDP no longer sends",
        "ranks of tp; the others are dp",
        "sent in a step, MiB",
        (1, 2, 4),
        {
            "over tp": lambda n: sent(8, f"{LM} --tp {n} --global_batch_size 16", ("tp",)),
            "over dp (FSDP)": lambda n: sent(8, f"{LM} --tp {n} --global_batch_size 16", ("dp_shard",)),
        },
    ),
}


def hsdp(replicas: int) -> str:
    return f"mmm.examples.hsdp --preset debug --global_batch_size 16 --replicas {replicas} --no-plots"


def pipeline(microbatches: int, schedule: str) -> str:
    return f"{LM} --pp 2 --global_batch_size 16 --microbatches {microbatches} --schedule {schedule}"


def experts(samples: int, ep: int) -> str:
    return f"{LM} --n_experts 8 --ep {ep} --global_batch_size {samples}"


def draw(chart: Chart, out: Path) -> None:
    """Draw a chart; its numbers are printed as well."""
    # The same file from the same numbers.
    plt.rcParams["svg.hashsalt"] = "mmm"
    figure, axes = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
    for (label, value), colour in zip(chart.curves.items(), COLOURS, strict=False):
        y = [value(x) for x in chart.x]
        print(f"{out.stem:18} {label:32} {' '.join(f'{height:.3f}' for height in y)}", flush=True)
        axes.plot(chart.x, y, "o-", color=colour, label=label)
    _decorate(axes, chart)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def _decorate(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.doubles:
        axes.set_xscale("log", base=2)
    axes.set_xticks(chart.x, [str(x) for x in chart.x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0, top=1.15 * axes.get_ylim()[1])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best" if chart.doubles else "center left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"default: all of {', '.join(CHARTS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "guide" / "curves")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for chapter in args.chapters or CHARTS:
        draw(CHARTS[chapter], args.out / f"{chapter}.svg")


if __name__ == "__main__":
    main()
