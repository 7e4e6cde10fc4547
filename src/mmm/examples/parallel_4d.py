"""Four axes at once for a Transformer, built rank by rank: pipeline × data × context × tensor parallel.

    launch python3 -m mmm.examples.parallel_4d
    launch -n 8 --device cpu python3 -m mmm.examples.parallel_4d --pp 2 --cp 2 --tp 2
    launch -n 2 --device cpu python3 -m mmm.examples.parallel_4d --dp_shard 2 --break samples

N ranks stand on a mesh of pp × dp × cp × tp, tp varying fastest; the 16 of pp2·dp2·cp2·tp2::

                stage 0: first layers                  stage 1: last layers, loss
                 cp 0          cp 1                      cp 0          cp 1
              tp 0   tp 1   tp 0   tp 1               tp 0   tp 1   tp 0   tp 1
            ┌──────┬──────┬──────┬──────┐           ┌──────┬──────┬──────┬──────┐
      dp 0  │   0  │   1  │   2  │   3  │ ────────► │   8  │   9  │  10  │  11  │   samples 0 … b-1
            ├──────┼──────┼──────┼──────┤           ├──────┼──────┼──────┼──────┤
      dp 1  │   4  │   5  │   6  │   7  │ ────────► │  12  │  13  │  14  │  15  │   samples b … 2b-1
            └──────┴──────┴──────┴──────┘           └──────┴──────┴──────┴──────┘

    tp   0 1        parts of the same matrices: activations, several times in every layer
    cp   0 2        parts of the same sequences: keys and values, once in every layer
    dp   0 2 4 6    the same layers (FSDP, over dp × cp): parameters and gradients, once a layer and step
    pp   0 8        other layers: the activations of a micro-batch, once a stage

Those are the ranks that talk to rank 0; what talks most stands innermost. Other techniques on any layout:
``mmm.trainer.lm``, and for the ViT and the CNN ``mmm.trainer.vit`` and ``mmm.trainer.fsdp``. 20 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed.pipelining as pipelining
import torch.distributed.tensor.parallel as tp
import tyro
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from mmm.data import Batch
from mmm.errors import ConfigError, LayoutError
from mmm.examples.context_parallel import positions_of, ring_attention
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.models.weights import convert
from mmm.parallel import clip_grad_norm, cross_entropy, materialize, to_local
from mmm.runtime.device import Precision
from mmm.trainer import example
from mmm.trainer.timeline import PipelineTimes


@dataclass(frozen=True, kw_only=True)
class Config(example.TextExampleOptions):
    """A small Transformer on four axes. Where no axis is given, each in turn gets 2 ranks, as long as they divide."""

    BREAKS: ClassVar[dict[str, str]] = {
        "samples": "every dp rank trains on the samples of the first: the others are never seen, and those count twice",
        "init": "each rank draws what it holds from a generator of its own: the model depends on the mesh",
    }
    NEEDS: ClassVar[dict[str, example.Need]] = {"schedule": example.PIPELINE, "microbatches": example.PIPELINE}
    model: str = "transformer"
    """No other: the ViT on these axes is mmm.trainer.vit, the CNN mmm.trainer.fsdp."""
    pp: int = 1
    dp_shard: Annotated[int, tyro.conf.arg(aliases=["--dp"])] = -1
    cp: int = 1
    schedule: Literal["GPipe", "1F1B"] | None = None
    microbatches: int | None = None
    """Parts that a batch goes through the stages in. Default: pp."""
    preset: example.Preset = "debug"
    n_layers: int | None = 4
    n_heads: int | None = 8
    n_kv_heads: int | None = 4
    ffn_dim: int | None = 192
    eval_every: int = 0
    default_max_iters = 20

    default_batch_size = 8

    def axes(self, ranks: int) -> dict[str, int]:
        if self.model != "transformer":
            raise ConfigError(f"--model {self.model}: the ViT is mmm.trainer.vit, the CNN mmm.trainer.fsdp")
        sizes = {"pp": self.pp, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tpsize}
        if not self.chooses():
            return sizes
        for place, axis in enumerate(("pp", "tp", "dp_shard", "cp"), start=1):
            if axis != "dp_shard" and ranks % 2**place == 0:
                sizes[axis] = 2
        return sizes

    def chooses(self) -> bool:
        return (self.pp, self.dp_shard, self.cp, self.tpsize) == (1, -1, 1, 1)


def build(sizes: TransformerConfig, names: list[str], mesh: DeviceMesh, precision: Precision) -> Transformer:
    """One rank's part of the model, on the meta device. names: the modules of its stage. mesh: pp, dp, cp, tp."""
    # 1. Its stage: the others' modules are left out, and forward skips them.
    with torch.device("meta"):
        model = Transformer(sizes)
    convert(model, precision.storage)
    for number in [number for number in model.layers if f"layers.{number}" not in names]:
        del model.layers[number]
    for name in {"tok_embeddings", "norm", "output"}.difference(names):
        setattr(model, name, None)
    # 2. Tensor parallel: columns, then rows; between them the sequence, dim 1, is sharded (mmm.examples.fsdp_tp).
    columns, rows, norm = tp.ColwiseParallel, tp.RowwiseParallel(output_layouts=Shard(1)), tp.SequenceParallel
    split, full = Shard(1), Replicate()
    plan = {
        "tok_embeddings": tp.RowwiseParallel(input_layouts=full, output_layouts=split),
        "layers.*.attention_norm": norm(),
        "layers.*.attention": tp.PrepareModuleInput(
            input_layouts=(split, None, None), desired_input_layouts=(full, None, None)
        ),
        **{f"layers.*.{name}": columns() for name in ("attention.wq", "attention.wk", "attention.wv")},
        **{f"layers.*.{name}": rows for name in ("attention.wo", "feed_forward.w2")},
        "layers.*.ffn_norm": norm(),
        "layers.*.feed_forward": tp.PrepareModuleInput(input_layouts=split, desired_input_layouts=full),
        **{f"layers.*.{name}": columns() for name in ("feed_forward.w1", "feed_forward.w3")},
        "norm": norm(),
        "output": columns(input_layouts=split, output_layouts=Shard(-1), use_local_output=False),
    }
    if mesh["tp"].size() > 1:
        here = {name: style for name, style in plan.items() if name.startswith("layers.") or name in names}
        tp.parallelize_module(model, mesh["tp"], here)
    # 3. Context parallel: attention to the tokens of all ranks of cp (mmm.examples.context_parallel).
    for layer in model.layers.values() if mesh["cp"].size() > 1 else ():
        layer.attention.attention_fn = partial(ring_attention, group=mesh["cp"].get_group())  # type: ignore
    # 4. FSDP over dp × cp, whose ranks have other tokens: gradients are summed. A stage is gathered once a step.
    dp_cp = mesh["dp", "cp"]._flatten("dp_cp")
    policy = MixedPrecisionPolicy(precision.compute, precision.storage, cast_forward_inputs=False)
    for module in (*model.layers.values(), model):  # the root takes what is left
        unit = fully_shard(module, mesh=dp_cp, mp_policy=policy, reshard_after_forward=False)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    resolved = example.resolve(config)
    layout = resolved.layout
    if resolved.sizes.n_kv_heads % layout.tp:
        raise LayoutError(f"n_kv_heads {resolved.sizes.n_kv_heads} is not divisible by tp {layout.tp}")
    if config.summary:
        example.print_once(resolved.summary())
        return

    names = resolved.partition.names() or [[name for name, _ in resolved.model.named_modules()]]
    with example.start_run("parallel_4d", config, resolved) as run:
        run.describe(stages=names)
        if config.chooses():
            run.note(f"no axis was given a size: layout {layout} chosen for {layout.ranks} ranks")
        axes, at = (layout.pp, layout.dp, layout.cp, layout.tp), layout.coordinates(run.rank.rank)
        mesh = init_device_mesh(run.device.type, axes, mesh_dim_names=("pp", "dp", "cp", "tp"))
        model = build(resolved.sizes, names[at["pp"]], mesh, run.precision)
        materialize(model, run.device, config.seed)
        if config.break_ == "init":
            torch.manual_seed(config.seed + run.rank.rank)
            for parameter in model.parameters():
                to_local(parameter.data).normal_(std=0.02)
        run.log.info("%s\n%s", mesh, example.sharded_model(model))

        tokens = resolved.global_batch_size * config.seq_length
        positions = positions_of(at["cp"], layout.cp, config.seq_length).to(run.device)
        whole = {"positions": positions}  # not split into micro-batches
        model.register_forward_pre_hook(lambda _, x, named: (x, named | whole), with_kwargs=True)
        stage = pipelining.PipelineStage(model, at["pp"], layout.pp, run.device, group=mesh["pp"].get_group())
        kind = pipelining.ScheduleGPipe if config.schedule == "GPipe" else pipelining.Schedule1F1B
        # A loss is its sum over the tokens of the global batch: what micro-batches and ranks have adds up.
        loss_fn = lambda output, targets: cross_entropy(output, targets, tokens)  # noqa: E731
        schedule = kind(
            stage, config.microbatches or resolved.partition.microbatches, loss_fn=loss_fn, scale_grads=False
        )
        times = PipelineTimes(run, schedule, [stage])  # dtf, dtb, dtw

        def through(go: Callable[..., Any], batch: Batch) -> Tensor:
            losses: list[Tensor] = []
            inputs = [batch.inputs[:, positions]] if stage.is_first else []
            targets = batch.targets[:, positions] if stage.is_last else None
            go(*inputs, target=targets, losses=losses, return_outputs=False)
            return times.local_loss(losses)

        optimizer = example.make_optimizer(config.optimizer, model.parameters(), config.lr)
        samples_of = 0 if config.break_ == "samples" else at["dp_shard"]
        evaluate = partial(through, schedule.eval)
        for step in example.text_steps(run, resolved, model, optimizer, evaluate, coordinate=samples_of):
            with tp.loss_parallel():  # under tp the logits stay sharded over the vocabulary
                step.log(through(schedule.step, step.batch))
            if config.break_ is None:
                clip_grad_norm(model.parameters(), 1.0, stages=mesh["pp"])
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    example.run_main(lambda: train(example.parse(Config, __doc__)))
