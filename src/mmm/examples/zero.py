"""ZeRO, stages 1, 2 and 3: the same training, and what each stage no longer keeps on every rank.

    launch python3 -m mmm.examples.zero

DDP (stage 0) keeps N copies of everything. Each stage cuts one thing more into N parts; with P parameters and AdamW,
which has two numbers of state for each::

                parameters   gradients   optimizer state    a rank sends in a step
      stage 0       P            P            2P            2P    all-reduce
      stage 1       P            P            2P/N          3P    all-reduce, all-gather of the updated parameters
      stage 2       P            P/N          2P/N          2P    reduce-scatter, all-gather
      stage 3       P/N          P/N          2P/N          3P    all-gather twice, reduce-scatter (this is FSDP)

(Sent: times (N-1)/N.) Each stage trains a Transformer for 5 steps, from the same weights to the same losses. Then a
table says what the rank that holds most really holds, beside the theory: a part is a little more than P/N where N does
not divide a matrix's rows. MB: 10⁶ bytes. With --offload, stages 1 to 3 keep on the host what a rank updates.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, figure 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from mmm.analysis.local_elements import local_elements
from mmm.models.transformer import Transformer
from mmm.models.weights import parameter_count
from mmm.parallel import Layout, Mesh, apply, build_mesh, cross_entropy, local_value, materialize
from mmm.parallel.memory.offload import moved_text
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.techniques import Techniques
from mmm.runtime.process_group import gather_floats
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import parse
from mmm.trainer.report import print_once
from mmm.trainer.run import Run, start_run
from mmm.trainer.text import ResolvedText, TextProgramOptions, resolve

KINDS = ("parameters", "gradients", "optimizer_state")
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3")  # by stage
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-1}  # relative, of the losses: sums go in another order


@dataclass(frozen=True, kw_only=True)
class Config(TextProgramOptions):
    """ZeRO stages 0 to 3 on a Transformer, one after the other; --max_iters steps (5 unless given) of each."""

    preset: Literal["debug", "small", "medium"] = "debug"
    default_max_iters = 5
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    optimizer: Literal["adamw"] = "adamw"
    """SGD has no state, and stage 1 would save nothing."""
    offload: bool = False
    """Stages 1 to 3: keep on the host, and update there, what a rank updates."""


def train(config: Config) -> bool:
    """Every stage, and the table. Whether the losses of all stages are the same."""
    layout = Layout().fit(whoami().world_size)
    resolved = resolve(config, layout, default_batch=2)
    whole = parameter_count(resolved.model)
    if config.summary:
        print_once(resolved.summary())
        return True

    holds = footprint(resolved.model, config.optimizer, Techniques(data_parallel="ddp"))  # of stage 0, which holds most
    with start_run("zero", config, layout, resolved.about_data, holds) as run:
        run.describe(**resolved.describe(), parameters=whole)
        mesh = build_mesh(layout, run.device.type, config.timeout)
        held, losses = zip(*(train_stage(run, mesh, resolved, stage) for stage in range(len(TECHNIQUES))), strict=True)
        width = torch.empty(0, dtype=run.precision.storage).element_size()
        run.log.info(
            "numbers kept, on the rank that keeps most\n%s", table(held, whole, layout.dp, width, config.offload)
        )
        apart = max(abs(loss / first - 1) for curve in losses for loss, first in zip(curve, losses[0], strict=True))
        limit = TOLERANCE[run.precision.name]
        run.log.info("the losses of the stages differ by %.1e at most (allowed: %.0e)", apart, limit)
        run.describe(held=held, losses_differ=apart)
    return apart <= limit


def train_stage(run: Run, mesh: Mesh, resolved: ResolvedText, stage: int) -> tuple[dict[str, int], list[float]]:
    """A few steps from the initial weights: the most numbers that any rank holds, and the loss of each step."""
    with torch.device("meta"):
        model: nn.Module = Transformer(resolved.sizes)
    options, technique = run.options, TECHNIQUES[stage]
    assert isinstance(options, Config)
    offload = options.offload and stage > 0
    model = apply(
        model,
        mesh,
        transformer_plan(),
        run.precision,
        data_parallel=technique,
        compile=options.compile,
        offload=offload,
    )
    materialize(model, run.device, options.seed)
    optimizer = make_optimizer(options.optimizer, model.parameters(), options.lr)
    batch, global_batch, losses = resolved.batch, resolved.global_batch, []
    mine = batch * run.layout.dp_coordinate(run.rank.rank)
    for step in range(resolved.steps):
        run.clock.start()
        part = resolved.tokens.batch(step, global_batch, mine, batch).to(run.device)
        run.clock.lap("dtd")
        loss = cross_entropy(model(part.inputs), part.targets, part.count)
        run.clock.lap("dtf")
        loss.backward()
        run.clock.lap("dtb")
        optimizer.step()
        run.clock.lap("dto")
        here = local_elements(model, optimizer)  # while there are gradients
        optimizer.zero_grad()
        everyone = gather_floats([float(here[kind]) for kind in KINDS], run.device)
        most = {kind: int(max(column)) for kind, column in zip(KINDS, zip(*everyone, strict=True), strict=True)}
        at, share = {"stage": stage, "iter": step}, {"loss": local_value(loss)}
        due = step % options.log_every == 0 or step == resolved.steps - 1
        losses.append(run.row(at, share, samples=global_batch, tokens=part.count, more=most, due=due))
    if offload:
        run.log.info("stage %d, %s", stage, moved_text(model, optimizer, run.device))
    return most, losses


def theory(stage: int, whole: int, ranks: int, offload: bool = False) -> dict[str, float]:
    """What a rank holds of `whole` parameters. With offload stage 1 keeps only its part of the gradient either."""
    cut = whole / ranks
    return {
        "parameters": cut if stage >= 3 else whole,
        "gradients": cut if stage >= (1 if offload else 2) else whole,
        "optimizer_state": 2 * (cut if stage >= 1 else whole),
    }


def table(held: Sequence[dict[str, int]], whole: int, ranks: int, width: int, offload: bool = False) -> str:
    """A line a stage: of each kind, the numbers held and the theory; in all, megabytes of numbers of `width` bytes."""
    heads = [*(kind.replace("_", " ") for kind in KINDS), "all, MB"]
    lines = ["         " + "".join(f"{head:>24}" for head in heads), "stage    " + f"{'held':>12}{'theory':>12}" * 4]
    for stage, numbers in enumerate(held):
        says = theory(stage, whole, ranks, offload)
        cells = "".join(f"{numbers[kind]:>12,}{says[kind]:>12,.0f}" for kind in KINDS)
        megabytes = (sum(values.values()) * width / 1e6 for values in (numbers, says))
        lines.append(f"{stage} {TECHNIQUES[stage]:<7}{cells}" + "".join(f"{size:>12.2f}" for size in megabytes))
    return "\n".join(lines)


def main() -> None:
    if not train(parse(Config, __doc__)):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
