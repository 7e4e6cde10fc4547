"""Two-dimensional parallelism: FSDP × tensor parallel, on a Llama-style Transformer.

    launch python3 -m mmm.examples.fsdp_tp --tpsize 4

N ranks form a mesh of dp_shard × tp. Along tp (a row) the ranks work on the *same* samples, and each matrix is sharded
over them. Along dp_shard (a column) they have *different* samples, and what tensor parallel left of each matrix is
sharded once more::

                        tp: same samples, matrices sharded
                   ┌────────┬────────┬────────┬────────┐
       dp_shard:   │ rank 0 │ rank 1 │ rank 2 │ rank 3 │   samples 0 … b-1       host 1
       different   ├────────┼────────┼────────┼────────┤
       samples     │ rank 4 │ rank 5 │ rank 6 │ rank 7 │   samples b … 2b-1      host 2
                   └────────┴────────┴────────┴────────┘
                     FSDP along each column: [0, 4] [1, 5] [2, 6] [3, 7]

Tensor parallel communicates in every layer, forward and backward, so its ranks should be neighbours on one host. FSDP
gathers a layer while the one before it computes, so it can go between hosts. With the same seed and the same global
batch the losses are the same on every mesh. For the same model with offload, tiling, checkpointing or compile, and on
any other mesh, see ``mmm.trainer.lm``.
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
    """FSDP × tensor parallel on a Transformer. All ranks that --tp leaves are data parallel."""

    BREAKS: ClassVar = {
        "averaged": "By default FSDP averages the gradients over the ranks of dp_shard. Each local loss is already "
        "divided by the number of targets in the global batch, so the average is too small by a factor of the number "
        "of these ranks. AdamW nearly hides that, SGD does not.",
        "norms": "ffn_norm, a normalization layer, is left out of the tensor-parallel plan. Each rank of tp then has "
        "the gradient of its own part of the sequence only: nothing adds the parts up, and the ranks' copies of this "
        "layer drift apart.",
    }


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """How each module of a Transformer is sharded over tp: a style of PyTorch for each module's name.

    A product Y = X A is sharded by columns of A (dim 0 of `nn.Linear.weight`), and the one after it by rows. With
    columns each rank computes its own heads or hidden units; with rows each rank computes a partial sum of
    (batch, seq, dim). A reduce-scatter adds the partial sums up and leaves each rank some of the tokens (dim 1). So
    norms and residuals are computed once, not tp times. PrepareModuleInput all-gathers the tokens for the next columns.
    """
    block: dict[str, ParallelStyle] = {
        # Each rank normalizes its own tokens, (batch, seq/tp, dim). The gradient of a norm's weight is then a sum over
        # the ranks, and SequenceParallel takes it.
        "attention_norm": SequenceParallel(),
        # All-gather: every head attends to all tokens. The other two arguments are the cosines and sines.
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        # Columns: n_heads/tp heads on each rank.
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        # Rows: a partial sum on each rank, then the reduce-scatter over the sequence.
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    # Both ends are sharded over the vocabulary: rows of the embedding, columns of the output. The logits stay DTensors,
    # (batch, seq, vocab/tp) on each rank, because loss_parallel can compute the loss from them.
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for name, style in block.items():
        plan[f"layers.*.{name}"] = style
    return plan


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    precision: Precision,
    mistake: str | None = None,
) -> None:
    """Shard a Transformer over tp, then over dp_shard, in place. Its parameters may be on the meta device.

    Args:
        mesh: a mesh with the axes dp_shard and tp.
        mistake: one of `Config.BREAKS` to make.
    """
    plan = tensor_parallel_plan()
    if mistake == "norms":
        del plan["layers.*.ffn_norm"]
    # With one rank there is nothing to shard, and DTensors would only cost time.
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], plan)

    # FSDP all-gathers a unit before its forward and its backward, and frees it afterwards. The model
    # itself comes last: it takes the parameters that are in no other unit.
    policy = MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=False)
    head: list[Any] = [model.norm, model.output]
    units: list[Any] = [model.tok_embeddings, *model.layers.values(), head, model]
    for unit in units:
        fully_shard(unit, mesh=mesh["dp_shard"], mp_policy=policy)
    # Backward begins with norm and output and needs them at once, so they are not freed after forward.
    head[0].set_reshard_after_forward(False)

    # FSDP averages gradients. Here they are summed, because each local loss is a sum divided by the *global* count:
    # averages of averages would be wrong as soon as one rank has fewer targets than another.
    for module in model.modules():
        if isinstance(module, FSDPModule) and mistake != "averaged":
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo has no sum that is scaled.
            module.set_force_sum_reduction_for_comms(True)


def train(config: Config) -> None:
    # Everything that could be refused is checked here, before any rank talks to another.
    layout = example.fit(tp=config.tpsize)
    job = example.resolve_own(config, layout)
    model = job.model
    example.check_kv_heads(job)
    with example.start_run("fsdp_tp", config, job) as run:
        # tp is the last axis: its ranks are neighbours.
        mesh = init_device_mesh(run.device.type, (layout.dp, layout.tp), mesh_dim_names=("dp_shard", "tp"))
        # The model is sharded on the meta device. Then each rank draws its own shard of the weights, which are a
        # function of the seed, so they are the same on every mesh.
        shard(model.to(run.precision.storage), mesh, run.precision, config.break_)
        draw_weights(model, run.device, config.run.seed)
        run.log.info("%s\n%s", mesh, example.sharded_model(model))

        def local_loss(batch: Batch) -> Tensor:
            # The sum over this rank's targets, divided by their count in the global batch.
            logits = model(batch.inputs)
            return cross_entropy(logits, batch.targets, batch.count)

        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            # The logits stay sharded over the vocabulary: tp ranks exchange three numbers per token instead.
            with loss_parallel():
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
