"""What an exact run is refused, by name: whatever has not been shown to give the same bits on every mesh."""

from __future__ import annotations

from torch import nn

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import UNSHARDED, Lanes, Layout, Techniques
from mmm.nn.experts import has_experts
from mmm.torch_private.module import BatchNorm

# They run the backwards of the micro-batches from the first to the last, each in one piece.
SCHEDULES = ("GPipe", "1F1B")


def check_exact(model: nn.Module, layout: Layout, techniques: Techniques, dtype: str = "") -> None:
    """Check that an exact run goes with a model, a layout and its techniques. Needs no process group.

    Args:
        model: the model, or a stage of it.
        dtype: name of the precision, where it is known.

    Raises:
        ConfigError: the text of the partition is wrong, or a technique is not exact.
        LayoutError: the layout does not divide the partition.
    """
    assert techniques.exact is not None
    lanes = Lanes.of(techniques.exact)
    name = f"{config_field('exact')} {techniques.exact}"
    # A wrong layout is said before what the layout alone would not be refused for.
    for axis, ranks, count in (("dp", layout.dp, lanes.dp), ("cp", layout.cp, lanes.cp), ("tp", layout.tp, lanes.tp)):
        if count % ranks:
            raise LayoutError(
                f"{name}: {axis} {ranks} does not divide its {count} lanes along {axis}; use a layout that does, or "
                f"another partition on every mesh that you compare"
            )
    technique = techniques.data_parallel
    if technique in UNSHARDED:
        raise ConfigError(f"{name} with {config_field('data_parallel')} {technique}: only fsdp and hsdp are exact")
    if layout.dp_replicate > 1 and layout.dp_shard == 1:
        raise LayoutError(f"{name} with dp_replicate {layout.dp_replicate} and dp_shard 1: use fsdp, or dp_shard 2")
    if lanes.cp > 1 or lanes.tp > 1:
        raise ConfigError(f"{name}: only lanes along dp are supported; give {config_field('exact')} {lanes.dp}")
    if layout.pp > 1 and techniques.schedule not in SCHEDULES:
        choices = " and ".join(SCHEDULES)
        raise ConfigError(f"{name} with {config_field('schedule')} {techniques.schedule}: only {choices} are exact")
    per_rank = lanes.dp // layout.dp
    if layout.pp > 1 and techniques.schedule == "1F1B" and per_rank < layout.pp:
        raise LayoutError(
            f"{name} with pp {layout.pp} and dp {layout.dp}: a pipeline has {per_rank} lanes, and 1F1B needs a "
            f"micro-batch for each of its {layout.pp} stages; use {config_field('schedule')} GPipe, or at least "
            f"{layout.pp * layout.dp} lanes along dp on every mesh that you compare"
        )
    if techniques.microbatches is not None:
        raise ConfigError(
            f"{name} with {config_field('microbatches')} {techniques.microbatches}: each lane is a micro-batch; leave "
            f"one out"
        )
    if has_experts(model):
        raise ConfigError(f"{name} with experts: a kernel sees the tokens that other ranks have sent it; use none")
    for module_name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            raise ConfigError(f"{name} with {module_name}, a BatchNorm: it needs all samples at once; use LayerNorm")
    for field in ("compile", "offload"):
        if getattr(techniques, field):
            raise ConfigError(f"{name} with {config_field(field)}: this has not been shown to be exact; leave one out")
    if dtype == "fp16":
        raise ConfigError(f"{name} with {config_field('dtype')} fp16: scaled gradients are not exact; use bf16")


def microbatches_of_lanes(exact: str, layout: Layout, batch: int) -> int:
    """Number of lanes along dp that each data-parallel coordinate computes, one micro-batch each.

    Args:
        exact: the partition, as `Techniques.exact` has it.
        batch: samples of a step for one data-parallel coordinate.

    Raises:
        LayoutError: the samples do not divide into the lanes.
    """
    lanes = Lanes.of(exact).dp
    per_rank = lanes // layout.dp
    if batch % per_rank:
        raise LayoutError(
            f"{config_field('exact')} {exact}: a global batch of {batch * layout.dp} samples does not divide into "
            f"{lanes} lanes; use a multiple of {lanes}"
        )
    return per_rank
