"""Two-dimensional parallelism: FSDP × tensor parallel, on a Llama-style Transformer.

    launch python3 -m mmm.examples.fsdp_tp --tpsize 4

N ranks stand on a mesh of dp_shard × tp. Along tp (a row) the ranks work on the *same* samples, and each matrix is
sharded over them. Along dp_shard (a column) they have *different* samples, and what tensor parallel left of each matrix
is sharded once more::

                        tp: same samples, matrices sharded
                   ┌────────┬────────┬────────┬────────┐
       dp_shard:   │ rank 0 │ rank 1 │ rank 2 │ rank 3 │   samples 0 … b-1       host 1
       different   ├────────┼────────┼────────┼────────┤
       samples     │ rank 4 │ rank 5 │ rank 6 │ rank 7 │   samples b … 2b-1      host 2
                   └────────┴────────┴────────┴────────┘
                     FSDP along each column: [0, 4] [1, 5] [2, 6] [3, 7]

tp communicates in every layer, forward and backward, and so keeps to neighbours; FSDP gathers a layer while the one
before is computed, and can go between hosts. Same seed and same global batch give the same losses on every mesh.
The same model with offload, tiling, checkpointing, compile, and on any other mesh: ``mmm.trainer.lm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from mmm.data import Batch
from mmm.examples import _support as example
from mmm.models.llama.model import Transformer
from mmm.parallel import cross_entropy, draw_weights
from mmm.runtime.device import Precision


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """FSDP × tensor parallel on a Transformer. The ranks that --tpsize leaves are data parallel."""

    BREAKS: ClassVar = {
        "averaged": "FSDP averages the gradients over dp_shard, its default. Each local loss is already divided by the "
        "count of the global batch: the average is dp_shard times too small. AdamW nearly hides that, SGD does not.",
        "norms": "ffn_norm is left out of the tensor-parallel plan. Each rank of tp then has the gradient of its own "
        "part of the sequence only: nothing adds the parts up, and the ranks' norms drift apart.",
    }


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """How each module of a Transformer is sharded over tp.

    Columns of A in Y = X A (dim 0 of `nn.Linear.weight`), then rows: each rank computes heads or hidden units of its
    own, then a partial sum of (batch, seq, dim), which is reduce-scattered over the sequence, dim 1: norms and
    residuals are computed once, not tp times. PrepareModuleInput all-gathers the sequence for the next columns.
    """
    block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    ends: dict[str, ParallelStyle] = {  # sharded over the vocabulary: rows of the embedding, columns of the output
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return ends | {f"layers.*.{name}": style for name, style in block.items()}


def shard(model: Transformer, mesh: DeviceMesh, precision: Precision, mistake: str | None = None) -> None:
    """Shard a Transformer over tp, then over dp_shard, in place. Its parameters may lie on the meta device."""
    plan = tensor_parallel_plan()
    if mistake == "norms":
        del plan["layers.*.ffn_norm"]
    if mesh["tp"].size() > 1:  # on one rank DTensors would only take time
        parallelize_module(model, mesh["tp"], plan)

    # Each unit is gathered for its forward and its backward, and freed after them; the root takes what is left.
    policy = MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=False)
    units: list[Any] = [model.tok_embeddings, *model.layers.values(), [model.norm, model.output], model]
    for unit in units:
        fully_shard(unit, mesh=mesh["dp_shard"], mp_policy=policy)
    units[-2][0].set_reshard_after_forward(False)  # norm and output: backward begins there, and needs them at once
    # FSDP averages gradients. Here they are summed, because each local loss is a sum divided by the *global* count:
    # averages of averages would be wrong as soon as one rank has fewer targets than another.
    for module in model.modules():
        if isinstance(module, FSDPModule) and mistake != "averaged":
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no scaled one


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    layout = example.fit(tp=config.tpsize)
    job = example.resolve_own(config, layout)
    model = job.model
    example.check_tensor_parallel(job)
    with example.start_run("fsdp_tp", config, job) as run:
        # Sharded on the meta device; then each rank draws its own part of the weights, the same on every mesh.
        mesh = init_device_mesh(run.device.type, (layout.dp, layout.tp), mesh_dim_names=("dp_shard", "tp"))
        shard(model.to(run.precision.storage), mesh, run.precision, config.break_)
        draw_weights(model, run.device, config.run.seed)
        run.log.info("%s\n%s", mesh, example.sharded_model(model))

        def local_loss(batch: Batch) -> Tensor:
            return cross_entropy(model(batch.inputs), batch.targets, batch.count)

        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            with loss_parallel():  # the logits stay sharded over the vocabulary
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
