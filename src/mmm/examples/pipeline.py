"""Pipeline parallelism: the layers of a Transformer over the ranks, the batch through them in micro-batches.

    launch python3 -m mmm.examples.pipeline
    launch -n 4 --device cpu python3 -m mmm.examples.pipeline --pp 2 --tpsize 2 --schedule ZBVZeroBubble
    launch -n 2 --device cpu python3 -m mmm.examples.pipeline --break scale

Each rank has some of the layers. With one batch at a time all ranks but one would wait; split into micro-batches, they
compute different ones. By 1F1B (F: forward, B: backward, ·: waiting)::

                                         Warmup      Steady                   Cooldown
    rank 0   embedding, layers 0 1       F0 F1  ·  · B0 B0 F2 B1 B1 F3 B2 B2  · B3 B3
               ↓ activations  ↑ gradients
    rank 1   layers 2 3, norm, output     · F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  ·  ·    → loss

What passes between two ranks: of each micro-batch the activations (samples, seq, dim) forward, and their gradients, as
many, back. By default 2 samples of 128 tokens of 256 float32: 0.26 MB, 8 times a step each way. That is less than any
other axis sends, so pp is the outermost: between hosts. ``dtw`` is what a rank waits; --timeline draws it.

The split makes the slowest stage as fast as can be. Within a stage --tpsize shards matrices, and the ranks that are
left are data parallel (FSDP). 30 steps. Same seed and same global batch give the losses of ``mmm.examples.fsdp_tp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.errors import ConfigError, LayoutError
from mmm.examples import _support as example
from mmm.examples._support.pipeline_times import PipelineTimes, Timeline
from mmm.layout import ScheduleName
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.parallel import apply, build_mesh, cross_entropy, materialize
from mmm.parallel.pp.schedules import SCHEDULES, stages_of


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """A pipeline over --pp ranks, × tensor parallel. The ranks that both leave are data parallel."""

    BREAKS: ClassVar = {
        "scale": "PyTorch's schedule divides gradients by the number of micro-batches (its default, for losses that "
        "are means). Each loss here is its sum over the tokens of the global batch: they just add up."
    }
    pp: int = 2
    """Ranks along pp: over how many the layers are split."""
    schedule: ScheduleName = "1F1B"
    """The order of forwards and backwards."""
    microbatches: int = 8
    """Parts that a batch goes through the pipeline in."""
    stages_per_rank: int | None = None
    """Default: the fewest that the schedule takes, 1 or 2."""
    timeline: bool = False
    """At the end, draw the schedule, and say how long the ranks waited in all steps but the first."""


def make_stage(sizes: TransformerConfig, names: list[str]) -> Transformer:
    """The model with only those of its modules; forward skips the others. On the meta device."""
    with torch.device("meta"):
        model = Transformer(sizes)
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(model, name, None)
    for layer in [*model.layers]:
        if f"layers.{layer}" not in names:
            del model.layers[layer]
    return model


def resolve(config: Config) -> example.Job:
    if config.pp < 2:
        raise LayoutError(f"pp {config.pp}: a pipeline has at least 2 ranks; on 1 there is nothing to split")
    layout = example.fit(pp=config.pp, tp=config.tpsize)
    job = example.resolve(config, layout, example.techniques_of(config), max_iters=30)
    if config.timeline and job.steps < 2:
        why = "the first is left out, because PyTorch finds the shapes in it"
        raise ConfigError(f"--timeline with {job.steps} step: {why}; use --max_iters 2 or more")
    return job


def train(config: Config) -> None:
    job = resolve(config)
    layout, partition = job.layout, job.partition
    names = partition.names()  # of the modules of each stage
    with example.start_run("pipeline", config, job, hooks=[Timeline()]) as run:
        run.describe(stages=names)
        run.log.info("the stages\n%s", example.stage_table(names, partition.shares()))
        mesh = build_mesh(layout, run.device.type, config.run.timeout)
        tokens = job.global_batch_size * config.data.seq_length
        numbers = stages_of(mesh["pp"].get_local_rank(), layout.pp, config.schedule, len(names) // layout.pp)
        every = {"positions": torch.arange(config.data.seq_length, device=run.device)}  # not split into micro-batches

        stages: list[PipelineStage] = []
        for number in numbers:
            module = make_stage(job.sizes, names[number])
            apply(module, mesh, job.plan, run.precision, job.techniques)  # tp and FSDP, within the stage
            materialize(module, run.device, config.run.seed)
            module.register_forward_pre_hook(lambda _, x, named: (x, named | every), with_kwargs=True)
            for unit in (unit for unit in module.modules() if isinstance(unit, FSDPModule)):
                unit.set_reshard_after_forward(False)  # gathered once a step, not once a micro-batch
            stages.append(PipelineStage(module, number, len(names), run.device, group=mesh["pp"].get_group()))
            run.log.info("%s, stage %d\n%s", mesh, number, example.sharded_model(module))
        times = PipelineTimes(run.clock, stages)  # dtf, dtb, dtw
        kind = SCHEDULES[config.schedule].own or getattr(schedules, f"Schedule{config.schedule}")
        loss_fn = lambda output, targets: cross_entropy(output, targets, tokens)  # noqa: E731  a sum / the global count
        schedule = kind(
            times.stages if issubclass(kind, schedules.PipelineScheduleMulti) else times.stages[0],
            config.microbatches,
            loss_fn=times.timed_loss(loss_fn),
            scale_grads=config.break_ == "scale",
        )

        def run_schedule(step: Callable[..., Any], batch: Batch) -> Tensor:
            losses: list[Tensor] = []  # of the micro-batches, on the last stage
            inputs = [batch.inputs] if 0 in numbers else []  # other stages take what the stage before sends
            step(*inputs, target=batch.targets if len(names) - 1 in numbers else None, losses=losses)
            return times.local_loss(losses)

        modules = [stage.submod for stage in stages]
        optimizer = config.optimizer.make([p for m in modules for p in m.parameters()])
        run.state(**{f"stage{stage.stage_index}": stage.submod for stage in stages}, optimizer=optimizer)
        for step in example.text_steps(run, job):
            with loss_parallel():  # under tp the logits stay sharded over the vocabulary
                step.log(run_schedule(schedule.step, step.batch))  # forward, loss and backward of all micro-batches
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                local_loss = partial(run_schedule, schedule.eval)
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, *modules)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
