"""Four axes at once for a Transformer, built rank by rank: pipeline × data × context × tensor parallel.

    launch -n 8 --device cpu python3 -m mmm.examples.parallel_4d --pp 2 --cp 2 --tp 2
    launch -n 2 --device cpu python3 -m mmm.examples.parallel_4d --break samples

N ranks form a mesh of pp × dp × cp × tp, where tp varies fastest. These are the 16 ranks of pp2·dp2·cp2·tp2::

                stage 0: first layers                  stage 1: last layers, loss
                 cp 0          cp 1                      cp 0          cp 1
              tp 0   tp 1   tp 0   tp 1               tp 0   tp 1   tp 0   tp 1
            ┌──────┬──────┬──────┬──────┐           ┌──────┬──────┬──────┬──────┐
      dp 0  │   0  │   1  │   2  │   3  │ ────────► │   8  │   9  │  10  │  11  │   samples 0 … b-1
            ├──────┼──────┼──────┼──────┤           ├──────┼──────┼──────┼──────┤
      dp 1  │   4  │   5  │   6  │   7  │ ────────► │  12  │  13  │  14  │  15  │   samples b … 2b-1
            └──────┴──────┴──────┴──────┘           └──────┴──────┴──────┴──────┘

The ranks that rank 0 talks to, along each axis::

    tp   0 1        shards of the same matrices: activations, several times in every layer
    cp   0 2        shards of the same sequences: keys and values, once in every layer
    dp   0 2 4 6    the same layers (FSDP, over dp × cp): parameters and gradients, once a layer and step
    pp   0 8        other layers: the activations of a micro-batch, once a stage

The axis that communicates most is innermost, where the links are fastest. The example trains for 20 steps. For other
techniques on any layout, and for other models, see ``mmm.trainer.lm``, ``mmm.trainer.vit`` and ``mmm.trainer.cnn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch.distributed.pipelining as pipelining
import torch.distributed.tensor.parallel as tp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmm.data import Batch
from mmm.examples import _support as example
from mmm.examples._support.pipeline_times import PipelineTimes
from mmm.examples.context_parallel import positions_of, ring_attention
from mmm.examples.fsdp_tp import tensor_parallel_plan
from mmm.examples.pipeline import make_stage
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.nn.init import convert
from mmm.parallel import clip_grad_norm, cross_entropy, draw_weights
from mmm.run.options import check_effect
from mmm.runtime.device import Precision
from mmm.torch_private.groups import flatten


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """A small Transformer on four axes. The ranks that --pp, --cp and --tp leave are data parallel."""

    BREAKS: ClassVar = {
        "samples": "Every dp rank trains on the first rank's samples. These count once for each dp rank, and the "
        "samples of the others are never seen.",
        "init": "Each rank draws its weights with a seed of its own, so the model depends on the mesh.",
    }
    pp: int = 1
    """Number of ranks along pp, over which the layers are split."""
    cp: int = 1
    """Number of ranks along cp, over which each sequence is sharded."""
    schedule: Literal["GPipe", "1F1B"] | None = None
    """The order of forwards and backwards along pp. Default: 1F1B."""
    microbatches: int | None = None
    """Number of micro-batches that a batch is split into. Default: pp."""
    model: example.Model = example.Model(preset="debug", n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=192)
    evaluation: example.Evaluation = example.Evaluation(eval_every=0)


def build(
    sizes: TransformerConfig,
    names: list[str],
    mesh: DeviceMesh,
    precision: Precision,
) -> Transformer:
    """Build what one rank has of the model, on the meta device.

    Args:
        names: the modules of this rank's stage.
        mesh: a mesh with the axes pp, dp, cp, tp.
    """
    # Pipeline: the modules of other stages are left out, and forward skips them (mmm.examples.pipeline).
    model = make_stage(sizes, names)
    convert(model, precision.storage)

    # Tensor parallel: columns, then rows; between them the sequence, dim 1, is sharded (mmm.examples.fsdp_tp).
    plan = {}
    for name, style in tensor_parallel_plan().items():
        if name.startswith("layers.") or name in names:
            plan[name] = style
    if mesh["tp"].size() > 1:
        tp.parallelize_module(model, mesh["tp"], plan)

    # Context parallel: attention to the tokens of all ranks of cp (mmm.examples.context_parallel).
    if mesh["cp"].size() > 1:
        for layer in model.layers.values():
            ring = partial(ring_attention, group=mesh["cp"].get_group())
            layer.attention.attention_fn = ring  # type: ignore[union-attr]

    # FSDP over dp × cp: the ranks of both axes have different tokens, and their gradients are summed.
    dp_cp = flatten(mesh["dp", "cp"], "dp_cp")
    policy = MixedPrecisionPolicy(precision.compute, precision.storage, cast_forward_inputs=False)
    # A stage stays gathered from its first forward to its last backward, or each micro-batch would gather it again. The
    # model itself comes last: it takes the parameters that are in none of the layers.
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=dp_cp, mp_policy=policy, reshard_after_forward=False)
    example.sum_gradients(model)
    return model


def train(config: Config) -> None:
    layout = example.fit(pp=config.pp, cp=config.cp, tp=config.tpsize)
    check_effect(
        layout.pp > 1,
        "--pp",
        "there is one stage, the model",
        "--pp 2",
        schedule=config.schedule,
        microbatches=config.microbatches,
    )
    job = example.resolve(config, layout, example.techniques_of(config), batch_size=8, max_iters=20)
    global_tokens = job.global_batch_size * config.data.seq_length
    example.check_kv_heads(job)
    # Stage → names of its modules. With one stage there is no partition, and the stage has all modules.
    names = job.partition.names() or [[name for name, _ in job.model.named_modules()]]
    with example.start_run("parallel_4d", config, job) as run:
        run.describe(stages=names)
        axes = (layout.pp, layout.dp, layout.cp, layout.tp)
        place = layout.coordinates(run.rank.rank)
        mesh = init_device_mesh(run.device.type, axes, mesh_dim_names=("pp", "dp", "cp", "tp"))
        model = build(job.sizes, names[place["pp"]], mesh, run.precision)
        seed = config.run.seed
        if config.break_ == "init":
            seed += run.rank.rank
        draw_weights(model, run.device, seed)
        run.log.info("%s\n%s", mesh, example.sharded_model(model))

        # This rank's tokens of each sequence, (seq/cp,). They are the same for all samples, so they must not be split
        # into micro-batches as inputs are: a hook hands them to each forward instead.
        positions = positions_of(place["cp"], layout.cp, config.data.seq_length).to(run.device)

        def add_positions(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            return inputs, {**named, "positions": positions}

        model.register_forward_pre_hook(add_positions, with_kwargs=True)
        stage = pipelining.PipelineStage(model, place["pp"], layout.pp, run.device, group=mesh["pp"].get_group())

        def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
            # A sum, divided by the tokens of the global batch: the losses of micro-batches and of ranks add up.
            return cross_entropy(output, targets, global_tokens)

        schedule_class = pipelining.ScheduleGPipe if config.schedule == "GPipe" else pipelining.Schedule1F1B
        microbatches = config.microbatches or job.partition.microbatches
        # The same stage, which tells the clock how long it computes and waits: dtf, dtb, dtw.
        times = PipelineTimes(run.clock, [stage])
        schedule = schedule_class(
            times.stages[0],
            microbatches,
            loss_fn=times.timed_loss(loss_fn),
            scale_grads=False,
        )

        def run_schedule(step: Callable[..., Any], batch: Batch) -> Tensor:
            """Send a batch through the pipeline. Returns this rank's part of the loss. A collective of all ranks."""
            # Only the first stage takes tokens, and only the last one compares with targets.
            losses: list[Tensor] = []
            inputs = [batch.inputs[:, positions]] if stage.is_first else []
            targets = batch.targets[:, positions] if stage.is_last else None
            step(*inputs, target=targets, losses=losses, return_outputs=False)
            return times.local_loss(losses)

        # Ranks of tp, cp and pp read the same samples; those of dp read different ones.
        coordinate = place["dp_shard"]
        if config.break_ == "samples":
            coordinate = 0
        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job, coordinate=coordinate):
            # Under tp the logits stay sharded over the vocabulary.
            with tp.loss_parallel():
                step.log(run_schedule(schedule.step, step.batch))
            if config.break_ is None:
                # The norm is that of all stages' gradients, so the ranks of pp add theirs up.
                clip_grad_norm(model.parameters(), 1.0, stages=mesh["pp"])
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                local_loss = partial(run_schedule, schedule.eval)
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
