"""What an exact run is refused, by name: whatever has not been shown to give the same bits on every mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import UNSHARDED, Lanes, Layout, Techniques
from mmm.nn.experts import has_experts
from mmm.parallel.plan import Plan
from mmm.torch_private.module import BatchNorm

# They run the backwards of the micro-batches from the first to the last, each in one piece.
SCHEDULES = ("GPipe", "1F1B")


def check_exact(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    techniques: Techniques,
    dtype: str = "",
) -> None:
    """Check that an exact run goes with a model, a layout and its techniques. Needs no process group.

    Args:
        model: the model, or a stage of it.
        plan: how it is sharded.
        dtype: name of the precision, where it is known.

    Raises:
        ConfigError: the text of the partition is wrong, or a technique is not exact.
        LayoutError: the layout does not divide the partition.
    """
    assert techniques.exact is not None
    lanes = techniques.lanes
    name = f"{config_field('exact')} {techniques.exact}"
    # The layout comes first: its errors are to be mended whatever the other fields are.
    for axis in ("dp", "cp", "tp"):
        count = getattr(lanes, axis)
        ranks = getattr(layout, axis)
        if count % ranks:
            raise LayoutError(
                f"{name}: {axis} {ranks} does not divide its {count} lanes along {axis}; use a layout that does, or "
                f"another partition on every mesh that you compare"
            )
    technique = techniques.data_parallel
    if technique in UNSHARDED:
        # They sum gradients by the backend's own collectives, which promise no order.
        field = config_field("data_parallel")
        raise ConfigError(f"{name} with {field} {technique}: only fsdp and hsdp are exact")
    if layout.dp_replicate > 1 and layout.dp_shard == 1:
        replicas = f"dp_replicate {layout.dp_replicate} and dp_shard 1"
        raise LayoutError(f"{name} with {replicas}: use fsdp, or dp_shard 2")
    if lanes.cp > 1:
        _check_cp(name, plan, layout, techniques)
    if lanes.cp > 1 and lanes.tp > 1:
        field = config_field("exact")
        choices = f"{lanes.dp}.{lanes.cp}, or {lanes.dp}.1.{lanes.tp}"
        raise ConfigError(
            f"{name}: lanes along cp and along tp have not been shown to be exact together; give {field} {choices}"
        )
    if lanes.tp > 1 and techniques.loss_chunks > 1:
        # `LaneLoss` takes the vocabulary lane by lane; the loss in chunks takes all of a rank's at once.
        field = config_field("loss_chunks")
        raise ConfigError(f"{name} with {field} {techniques.loss_chunks}: use 1 with lanes of tp")
    if layout.pp > 1:
        _check_pp(name, layout, techniques, lanes.dp)
    if techniques.microbatches is not None:
        field = config_field("microbatches")
        raise ConfigError(f"{name} with {field} {techniques.microbatches}: each lane is a micro-batch; leave one out")
    if has_experts(model):
        raise ConfigError(f"{name} with experts: a kernel sees the tokens that other ranks have sent it; use none")
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm):
            raise ConfigError(f"{name} with {path}, a BatchNorm: it needs all samples at once; use LayerNorm")
    for option in ("compile", "offload"):
        if getattr(techniques, option):
            field = config_field(option)
            raise ConfigError(f"{name} with {field}: this has not been shown to be exact; leave one out")
    if dtype == "fp16":
        field = config_field("dtype")
        raise ConfigError(f"{name} with {field} fp16: scaled gradients are not exact; use bf16")


def _check_pp(name: str, layout: Layout, techniques: Techniques, lanes: int) -> None:
    """Check what does not go with a pipeline, of `lanes` lanes along dp."""
    field = config_field("schedule")
    if techniques.schedule not in SCHEDULES:
        choices = " and ".join(SCHEDULES)
        raise ConfigError(f"{name} with {field} {techniques.schedule}: only {choices} are exact")
    # Each lane is a micro-batch.
    per_rank = lanes // layout.dp
    if techniques.schedule == "1F1B" and per_rank < layout.pp:
        enough = layout.pp * layout.dp
        raise LayoutError(
            f"{name} with pp {layout.pp} and dp {layout.dp}: a pipeline has {per_rank} lanes, and 1F1B needs a "
            f"micro-batch for each of its {layout.pp} stages; use {field} GPipe, or at least {enough} lanes along dp "
            f"on every mesh that you compare"
        )


def _check_cp(name: str, plan: Plan, layout: Layout, techniques: Techniques) -> None:
    """Check what does not go with several lanes along cp."""
    if not plan.sequence:
        raise ConfigError(f"{name}: this model has no sequence that lanes along cp could share; use 1 of them")
    if layout.pp > 1:
        raise LayoutError(f"{name} with pp {layout.pp}: lanes along cp need pp 1")
    if techniques.cp_style != "ring":
        # The default is the ring, whose place gathered keys and values take.
        field = config_field("cp_style")
        raise ConfigError(f"{name} with {field} {techniques.cp_style}: it is not exact; leave it out")
    if techniques.loss_chunks > 1:
        field = config_field("loss_chunks")
        raise ConfigError(
            f"{name} with {field} {techniques.loss_chunks}: the loss is computed lane by lane; give {field} 1"
        )


def microbatches_of_lanes(exact: str, layout: Layout, sample: Sequence[int]) -> int:
    """Return the number of lanes along dp that each data-parallel coordinate computes, one micro-batch each.

    Args:
        exact: the partition, as `Techniques.exact` has it.
        sample: shape of the inputs of a step for one data-parallel coordinate, (batch, …) or (batch, seq).

    Raises:
        LayoutError: the samples, or the tokens of a sequence, do not divide into the lanes.
    """
    lanes = Lanes.of(exact)
    name = f"{config_field('exact')} {exact}"
    per_rank = lanes.dp // layout.dp
    own_samples = sample[0]
    if own_samples % per_rank:
        batch = own_samples * layout.dp
        raise LayoutError(
            f"{name}: a global batch of {batch} samples does not divide into {lanes.dp} lanes; use a "
            f"multiple of {lanes.dp}"
        )
    # A lane has two chunks of the sequence: one of the head, one of the tail.
    chunks = 2 * lanes.cp
    if lanes.cp > 1 and sample[1] % chunks:
        raise LayoutError(
            f"{name}: sequences of {sample[1]} tokens do not divide into {chunks} chunks, two for each lane along cp; "
            f"use a multiple of {chunks}"
        )
    return per_rank
