"""Pipeline parallelism: the layers of a Transformer over the ranks, the batch through them in micro-batches.

    launch python3 -m mmm.examples.pipeline
    launch -n 4 --device cpu python3 -m mmm.examples.pipeline --pp 2 --tpsize 2 --schedule ZBVZeroBubble

Each rank has some of the layers, and gives its activations to the next. With one batch at a time all but one would
wait; cut into micro-batches, they work on different ones. By 1F1B (F: forward, B: backward, ·: waiting)::

                                         Warmup      Steady                   Cooldown
    rank 0   embedding, layers 0 1       F0 F1  ·  · B0 B0 F2 B1 B1 F3 B2 B2  · B3 B3
               ↓ activations  ↑ gradients
    rank 1   layers 2 3, norm, output     · F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  ·  ·    → loss

The cuts make the slowest stage as cheap as can be. pp talks least of all axes, and so is the outermost: between hosts.
--tpsize cuts each layer's matrices within a stage, and the ranks that are left are data parallel (FSDP within a stage).
``dtw`` is what a rank waits, and --timeline draws it: each rank's forwards, backwards and idling. 30 steps. Same seed
and same global batch give the losses of ``mmm.examples.fsdp_tp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from torch.distributed.tensor.parallel import loss_parallel

from mmm.analysis.bubble import gather
from mmm.errors import ConfigError
from mmm.parallel import Layout, apply, build_mesh, loss_of, materialize
from mmm.parallel.assemble import Partition, Techniques
from mmm.parallel.pipeline.pipeline import Pipeline, ScheduleName, check_pipeline, stages_of
from mmm.parallel.pipeline.recorder import Recorder
from mmm.parallel.pipeline.stages import cut, part_costs, parts_of, take_stage
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import MemoryOptions, parse
from mmm.trainer.report import print_once, sharded_model, stage_table
from mmm.trainer.run import start_run
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve, validate
from mmm.trainer.timeline import report_timeline


@dataclass(frozen=True, kw_only=True)
class Config(TextProgramOptions, MemoryOptions, ValidationOptions):
    """A pipeline over --pp ranks, × tensor parallel. The ranks that both leave are data parallel."""

    pp: int = 2
    """Ranks along pp: over how many the layers are cut."""
    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is cut."""
    schedule: ScheduleName = "1F1B"
    """The order of forwards and backwards."""
    microbatches: int = 8
    """Parts that a batch goes through the pipeline in."""
    stages_per_rank: int | None = None
    """Default: the fewest that the schedule takes, 1 or 2."""
    default_max_iters = 30
    timeline: bool = False
    """At the end, draw which rank did what when, and say how long they waited; from all steps but the first."""


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    layout = Layout(pp=config.pp, tp=config.tpsize).fit(whoami().world_size)
    resolved = resolve(config, layout, default_batch=16)
    plan = resolved.plan
    config.check_memory(config.seq_length // layout.tp, config.dtype)
    model, batch, global_batch, steps = resolved.model, resolved.batch, resolved.global_batch, resolved.steps
    if config.timeline and steps < 2:
        raise ConfigError(
            f"--timeline with {steps} step: the first is left out, because PyTorch works out shapes in "
            f"it; use --max_iters 2 or more"
        )
    parts = parts_of(model, plan)
    each = check_pipeline(
        layout,
        config.schedule,
        config.microbatches,
        batch,
        len(parts),
        config.stages_per_rank,
        dtype=config.dtype,
        compile=plan if config.compile else None,
    )
    costs = part_costs(model, parts, resolved.sample)
    cuts = cut(costs, layout.pp * each)
    if config.summary:
        print_once(resolved.summary())
        return

    techniques = Techniques(schedule=config.schedule, offload=config.offload)
    holds = footprint(
        model, config.optimizer, techniques, Partition(parts, costs, cuts, config.microbatches), layout.pp
    )
    with start_run("pipeline", config, layout, resolved.about_data, holds) as run:
        run.log.info("model, whole:\n%s", resolved.summary())
        stages = [[name for i in held for name in parts[i]] for held in cuts]
        run.describe(**resolved.describe(), stages=stages)
        shares = [sum(costs[held.start : held.stop]) / sum(costs) for held in cuts]
        run.log.info("the stages\n%s", stage_table(stages, shares))

        # Cut into stages first; each then goes the way of a whole model: mesh -> plan -> weights.
        mesh = build_mesh(layout, run.device.type, config.timeout)
        numbers = stages_of(layout.coordinates(run.rank.rank)["pp"], layout.pp, config.schedule, each)
        mine = {number: take_stage(model, parts, cuts[number]) for number in numbers}
        for number, stage in mine.items():
            apply(stage, mesh, plan, run.precision, compile=config.compile, **config.memory())
            materialize(stage, run.device, config.seed)
            run.log.info("%s, stage %d\n%s", mesh, number, sharded_model(stage))

        tokens_of_step = global_batch * config.seq_length  # micro-batches divide by it: their losses add up
        loss_fn = loss_of(*mine.values())  # cross-entropy of the logits, or in chunks
        pipeline = Pipeline(
            mine,
            len(cuts),
            mesh,
            schedule=config.schedule,
            microbatches=config.microbatches,
            loss=lambda output, targets: loss_fn(output, targets, tokens_of_step),
            device=run.device,
            lap=run.clock.lap,
        )
        optimizer = make_optimizer(config.optimizer, pipeline.parameters(), config.lr)
        first = layout.dp_coordinate(run.rank.rank) * batch  # this rank's first sample of each global batch
        positions = torch.arange(config.seq_length, device=run.device)
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, config.seq_length)
        recorder = Recorder(run.device, mesh["pp"].get_group())
        for step in range(steps):
            if config.timeline and step == 1:
                pipeline.record_to(recorder)
            run.clock.start()
            part = resolved.tokens.batch(step, global_batch, first, batch).to(run.device)
            run.clock.lap("dtd")
            with loss_parallel():  # the logits stay cut over the vocabulary
                loss = pipeline.step(part.inputs, part.targets, positions=positions)  # laps dtf, dtb, dtw
            optimizer.step()
            optimizer.zero_grad()
            run.clock.lap("dto")

            last = step == steps - 1
            more = {}
            if config.validates(step, steps):
                more["val_loss"] = validate(
                    run,
                    resolved,
                    config.eval_batches,
                    lambda part: pipeline.evaluate(part.inputs, part.targets, positions=positions),
                )
            run.step(step, loss, samples=global_batch, tokens=part.count, last=last, **more)
        if config.timeline:
            report_timeline(run, gather(recorder), config.schedule, config.microbatches, each)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
