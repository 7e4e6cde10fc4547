"""What an exact run is refused, by name: whatever has not been shown to give the same bits on every mesh."""

from __future__ import annotations

from torch import nn

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import UNSHARDED, Layout, Techniques, check_lanes
from mmm.nn.experts import has_experts
from mmm.runtime.device import refuse_faults
from mmm.torch_private.module import BatchNorm

# They run the backwards of the micro-batches from the first to the last, each in one piece.
SCHEDULES = ("GPipe", "1F1B")


def check_exact(
    model: nn.Module,
    layout: Layout,
    techniques: Techniques,
    dtype: str = "",
) -> None:
    """Check that an exact run goes with a model, a layout and its techniques. Needs no process group.

    Args:
        model: the model, or a stage of it.
        dtype: name of the precision, where it is known.

    Raises:
        DeviceError: this PyTorch cannot do it.
        ConfigError: the number of lanes is not a power of two, or a technique is not exact.
        LayoutError: the layout has other axes than dp and pp, or does not divide the lanes.
    """
    lanes = techniques.exact
    assert lanes is not None
    name = f"{config_field('exact')} {lanes}"
    refuse_faults("exact")
    check_lanes(lanes)
    # The layout comes first: its errors are to be mended whatever the other fields are.
    for axis in ("cp", "tp"):
        ranks = getattr(layout, axis)
        if ranks > 1:
            raise LayoutError(f"{name} with {axis} {ranks}: only layouts of dp and pp are exact; use {axis} 1")
    if lanes % layout.dp:
        raise LayoutError(
            f"{name}: dp {layout.dp} does not divide its {lanes} lanes; use a layout that does, or another number of "
            f"lanes on every mesh that you compare"
        )
    technique = techniques.data_parallel
    if technique in UNSHARDED:
        # They sum gradients by the backend's own collectives, which promise no order.
        field = config_field("data_parallel")
        raise ConfigError(f"{name} with {field} {technique}: only fsdp and hsdp are exact")
    if layout.dp_replicate > 1 and layout.dp_shard == 1:
        replicas = f"dp_replicate {layout.dp_replicate} and dp_shard 1"
        raise LayoutError(f"{name} with {replicas}: use fsdp, or dp_shard 2")
    if layout.pp > 1:
        _check_pp(name, layout, techniques, lanes)
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
    """Check what does not go with a pipeline."""
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
            f"micro-batch for each of its {layout.pp} stages; use {field} GPipe, or at least {enough} lanes on "
            f"every mesh that you compare"
        )


def microbatches_of_lanes(lanes: int, layout: Layout, own_samples: int) -> int:
    """Return the number of lanes that each data-parallel coordinate computes, one micro-batch each.

    Args:
        own_samples: number of samples of a step on one data-parallel coordinate.

    Raises:
        LayoutError: the samples do not divide into the lanes.
    """
    per_rank = lanes // layout.dp
    if own_samples % per_rank:
        batch = own_samples * layout.dp
        raise LayoutError(
            f"{config_field('exact')} {lanes}: a global batch of {batch} samples does not divide into {lanes} lanes; "
            f"use a multiple of {lanes}"
        )
    return per_rank
