"""Pipeline parallelism: the layers of a Transformer spread over the ranks, and a batch sent through in micro-batches.

    launch python3 -m mmm.examples.pipeline
    launch -n 4 --device cpu python3 -m mmm.examples.pipeline --pp 2 --tp 2 --schedule ZBVZeroBubble
    launch -n 2 --device cpu python3 -m mmm.examples.pipeline --break scale

Each rank has some of the layers. With one batch at a time, all ranks but one would wait. So the batch is split into
micro-batches, and the ranks compute different ones at the same time. With the schedule 1F1B (F: forward, B: backward,
·: waiting)::

                                         Warmup      Steady                   Cooldown
    rank 0   embedding, layers 0 1       F0 F1  ·  · B0 B0 F2 B1 B1 F3 B2 B2  · B3 B3
               ↓ activations  ↑ gradients
    rank 1   layers 2 3, norm, output     · F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  ·  ·    → loss

Between two ranks travel, for each micro-batch, the activations (samples, seq, dim) forward, and gradients of the same
size back. By default that is 2 samples of 128 tokens of 256 float32: 0.26 MB, 8 times a step each way. It is less than
any other axis sends, so pp is the outermost axis and goes between hosts. ``dtw`` is the time that a rank waits;
--timeline draws it.

The layers are split so that the slowest stage is as fast as it can be. Within a stage --tp shards matrices, and the
ranks that are left are data parallel (FSDP). The example trains for 30 steps. With the same seed and the same global
batch its losses are those of ``mmm.examples.fsdp_tp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.errors import ConfigError, LayoutError
from mmm.examples import _support as example
from mmm.examples._support.pipeline_times import PipelineTimes, Timeline
from mmm.layout import ScheduleName
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.parallel import build_mesh, cross_entropy, materialize, parallelize
from mmm.parallel.pp.schedules import SCHEDULES, stages_of


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """A pipeline over --pp ranks, × tensor parallel. The ranks that both leave are data parallel."""

    BREAKS: ClassVar = {
        "scale": "PyTorch's schedule divides gradients by the number of micro-batches. This is its default, and right "
        "for losses that are means. Each loss here is a sum, divided by the tokens of the global batch, so its "
        "gradients only have to be added up.",
    }
    pp: int = 2
    """Number of ranks along pp, over which the layers are split."""
    schedule: ScheduleName = "1F1B"
    """The order of forwards and backwards."""
    microbatches: int = 8
    """Number of micro-batches that a batch is split into."""
    stages_per_rank: int | None = None
    """Number of stages on each rank. Default: the fewest that the schedule takes, 1 or 2."""
    timeline: bool = False
    """At the end, draw the schedule, and say how long the ranks waited in all steps but the first."""


def make_stage(sizes: TransformerConfig, names: list[str]) -> Transformer:
    """Build the model with only some of its modules, on the meta device. Its forward skips what is missing.

    Args:
        names: the modules of this stage, such as ``tok_embeddings`` or ``layers.0``.
    """
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
    """Check the flags, and decide on the stages. Needs no process group."""
    if config.pp < 2:
        raise LayoutError(f"pp {config.pp}: a pipeline has at least 2 ranks; on 1 there is nothing to split")
    layout = example.fit(pp=config.pp, tp=config.tpsize)
    job = example.resolve(config, layout, example.techniques_of(config), max_iters=30)
    if config.timeline and job.steps < 2:
        reason = "the first is left out, because PyTorch finds the shapes in it"
        raise ConfigError(f"--timeline with {job.steps} step: {reason}; use --max_iters 2 or more")
    return job


def train(config: Config) -> None:
    job = resolve(config)
    layout = job.layout
    # Stage → names of its modules.
    names = job.partition.names()
    n_stages = len(names)
    with example.start_run("pipeline", config, job, hooks=[Timeline()]) as run:
        run.describe(stages=names)
        run.log.info("the stages\n%s", example.stage_table(names, job.partition.shares()))
        mesh = build_mesh(layout, run.device.type, config.run.timeout)
        pp_rank = mesh["pp"].get_local_rank()
        pp_group = mesh["pp"].get_group()
        own_stages = stages_of(pp_rank, layout.pp, config.schedule, n_stages // layout.pp)
        # All samples have the same positions, (seq,), so they must not be split into micro-batches as inputs are. A
        # hook hands them to each forward instead.
        positions = torch.arange(config.data.seq_length, device=run.device)

        def add_positions(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            return inputs, {**named, "positions": positions}

        stages: list[PipelineStage] = []
        for stage_index in own_stages:
            module = make_stage(job.sizes, names[stage_index])
            # Tensor parallel and FSDP, over the ranks that have the same stage.
            parallelize(module, mesh, job.plan, run.precision, job.techniques)
            materialize(module, run.device, config.run.seed)
            module.register_forward_pre_hook(add_positions, with_kwargs=True)
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    # Gathered once a step: otherwise FSDP would gather it again for every micro-batch.
                    unit.set_reshard_after_forward(False)
            stages.append(PipelineStage(module, stage_index, n_stages, run.device, group=pp_group))
            run.log.info("%s, stage %d\n%s", mesh, stage_index, example.sharded_model(module))

        # The same stages, which tell the clock how long they compute and wait: dtf, dtb, dtw.
        times = PipelineTimes(run.clock, stages)
        global_tokens = job.global_batch_size * config.data.seq_length

        def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
            # A sum, divided by the tokens of the global batch: the losses of micro-batches and of ranks add up.
            return cross_entropy(output, targets, global_tokens)

        schedule_class = SCHEDULES[config.schedule].schedule_class or getattr(schedules, f"Schedule{config.schedule}")
        takes_several = issubclass(schedule_class, schedules.PipelineScheduleMulti)
        schedule = schedule_class(
            times.stages if takes_several else times.stages[0],
            config.microbatches,
            loss_fn=times.timed_loss(loss_fn),
            scale_grads=config.break_ == "scale",
        )
        has_first = 0 in own_stages
        has_last = n_stages - 1 in own_stages

        def run_schedule(step: Callable[..., Any], batch: Batch) -> Tensor:
            """Send a batch through the pipeline. Returns this rank's part of the loss. A collective of all ranks."""
            # Only the first stage takes tokens, the others take what the stage before sends. Only the last one knows
            # the losses of the micro-batches.
            losses: list[Tensor] = []
            inputs = [batch.inputs] if has_first else []
            targets = batch.targets if has_last else None
            step(*inputs, target=targets, losses=losses)
            return times.local_loss(losses)

        modules = [stage.submod for stage in stages]
        parameters = [p for module in modules for p in module.parameters()]
        optimizer = config.optimizer.make(parameters)
        by_name = {f"stage{stage.stage_index}": stage.submod for stage in stages}
        run.state(**by_name, optimizer=optimizer)
        for step in example.text_steps(run, job):
            # Under tp the logits stay sharded over the vocabulary.
            with loss_parallel():
                # Forward, loss and backward of all micro-batches, in the order of the schedule.
                step.log(run_schedule(schedule.step, step.batch))
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                # schedule.eval makes the forwards only.
                local_loss = partial(run_schedule, schedule.eval)
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, *modules)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
