"""The bubble of every schedule on the ranks there are: replayed, by the formula, by the clock.

    launch -n 4 --device cpu python3 benchmarks/bubble.py

A Transformer whose layers divide over the stages, a few steps of each schedule. Replayed: the schedule's own list of
actions, each taking the CPU time that was measured for it, every rank on a core of its own. Wall: what the clock says,
the ranks sharing the cores that there are. The formula is for stages, and for split backwards parts, that all take the
same time: the column beside it says how far the measured ones are from that.
"""

import argparse
import os
import platform
from statistics import mean, pstdev

import torch
import torch.distributed as dist

from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, Techniques, apply, build_mesh, cross_entropy, materialize
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.recorder import Recorder
from mmm.parallel.pp.replay import Recorded, gather, replay
from mmm.parallel.pp.schedules import SCHEDULES, check_pipeline, stages_of
from mmm.parallel.pp.stages import balance_stages, parts_of, take_stage
from mmm.runtime.device import Precision
from mmm.runtime.failure import run_main
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import whoami

CPU = torch.device("cpu")
SEQ, MICROBATCH = 64, 2


def measure(schedule: str, microbatches: int, steps: int, layers: int, dim: int) -> tuple[Recorded, int]:
    """What the ranks did, and stages a rank. A collective."""
    rank, plan = whoami(), transformer_plan()
    layout = Layout(pp=rank.world_size).fit(rank.world_size)
    config = TransformerConfig(dim=dim, n_layers=layers, n_heads=4, n_kv_heads=4, ffn_dim=4 * dim, vocab_size=256)
    with torch.device("meta"):
        model = Transformer(config)
    parts = parts_of(model, plan)
    techniques = Techniques(schedule=schedule, microbatches=microbatches)
    each, _ = check_pipeline(layout, techniques, microbatches * MICROBATCH, len(parts))
    split = balance_stages([0, *[1] * layers, 0], layout.pp * each)
    mesh, mine = build_mesh(layout, "cpu"), {}
    for number in stages_of(rank.rank, layout.pp, schedule, each):
        mine[number] = apply(
            take_stage(model, parts, split[number]), mesh, plan, Precision("fp32", torch.float32, torch.float32)
        )
        materialize(mine[number], CPU, 0)
    tokens = torch.arange(microbatches * MICROBATCH * SEQ).view(-1, SEQ) % 256
    pipeline = Pipeline(
        mine,
        len(split),
        mesh,
        schedule=schedule,
        microbatches=microbatches,
        device=CPU,
        loss=lambda output, targets: cross_entropy(output, targets, tokens.numel()),
    )
    recorder = Recorder(CPU, mesh["pp"].get_group())
    for step in range(1 + steps):  # the first finds the shapes
        pipeline.times.recorder = recorder if step else None
        pipeline.step(tokens, tokens)
    return gather(recorder), each


def kinds_of(recorded: Recorded) -> str:
    """Mean milliseconds of each kind of action, and how far stages differ: F 4.1 ± 0.2."""
    found = []
    for kind in "FBIW":
        stages: dict[int, list[float]] = {}
        for action, took in recorded.seconds.items():
            if action.kind == kind:
                stages.setdefault(action.stage, []).append(1e3 * took)
        if stages:
            by_stage = [mean(took) for took in stages.values()]
            found.append(f"{kind} {mean(by_stage):.1f} ± {pstdev(by_stage):.1f}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"microbatches": 8, "steps": 5, "layers": 16, "dim": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rank = whoami()
    with process_group(rank, CPU):
        if rank.is_main:
            print(
                f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; "
                f"{rank.world_size} ranks, {args.microbatches} micro-batches, {args.layers} layers of {args.dim}, "
                f"{args.steps} steps\n"
                f"{'schedule':24}{'stages':>7}{'replayed':>10}{'formula':>10}{'wall':>8}   CPU ms of an action, "
                f"± over the stages"
            )
        for schedule in SCHEDULES:
            recorded, each = measure(schedule, args.microbatches, args.steps, args.layers, args.dim)
            replayed = replay(recorded.lists, recorded.seconds).bubble
            formula = bubble_formula(schedule, rank.world_size, args.microbatches, each)
            if rank.is_main:
                known = "none" if formula is None else f"{formula:.1%}"
                print(
                    f"{schedule:24}{each * rank.world_size:7}{replayed:10.1%}{known:>10}"
                    f"{recorded.wall.bubble:8.1%}   {kinds_of(recorded)}",
                    flush=True,
                )
            dist.barrier()


if __name__ == "__main__":
    run_main(main)
