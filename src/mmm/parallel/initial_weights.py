"""Gives memory and initial weights to a model that has been parallelized on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError, config_field
from mmm.nn import init, weights
from mmm.nn.meta import KEPT, drop_values
from mmm.parallel.dp.wrapped import Wrapper, is_offloaded, unwrapped
from mmm.parallel.local import local_box, to_local
from mmm.parallel.ties import find_ties, retie
from mmm.parallel.values import Values, constructed_values
from mmm.torch_private.module import own_buffers

InitName = Literal["by_name"]


def check_weights(model: nn.Module) -> None:
    """Raises ConfigError where a parameter, or a buffer without values, has no rule. Needs no process group."""
    problems = weights.parameter_problems(model) + weights.buffer_problems(model)
    if problems:
        raise ConfigError("; ".join(problems))


def materialize(
    model: nn.Module,
    device: torch.device,
    seed: int,
    rules: weights.InitRules | None = None,
    *,
    init: InitName | None = None,
    values: Values | None = None,
) -> None:
    """Give a model memory on `device`, and this rank's shards of its initial weights. Buffers keep their values.

    The weights come from `values`. Without these they are drawn, if the model has a method ``init_rule`` or `init` says
    so. Otherwise they are what the constructor made, which has to be the same on every rank.

    A collective for ddp, zero1 and zero2, whose ranks connect here: what they send must have memory first.

    Args:
        model: what `parallelize` returned.
        seed: for the weights that are drawn.
        rules: as for `mmm.nn.weights.initialize`.
        init: ``by_name`` draws the weights from the seed by their names, those of PyTorch's own modules as PyTorch
            documents them, whatever a constructor made of them.
        values: where the weights come from, as `loaded_values` returns it.

    Raises:
        ConfigError: nothing says how the weights start, or as `check_weights`.
    """
    inner = unwrapped(model)
    if init not in (None, "by_name"):
        raise ConfigError(f'{config_field("init")} {init!r}: it is None or "by_name"')
    if values is None and init is None and not hasattr(inner, "init_rule"):
        values = constructed_values(inner)
    if values is None:
        check_weights(inner)
    # `to_empty` makes a new tensor for each name: ties and the values of buffers are put back.
    buffers = dict(inner.named_buffers(remove_duplicate=False))
    ties = find_ties(inner)
    inner.to_empty(device="cpu" if is_offloaded(inner) else device)
    retie(inner, ties, "its memory")
    _restore_buffers(inner, buffers, device)
    empty = {name for name, buffer in buffers.items() if buffer.is_meta}
    if values is None:
        weights.initialize(inner, seed, box_of=local_box, local_of=to_local, empty=empty, device=device, rules=rules)
    else:
        _fill(inner, values, empty)
    if KEPT:
        drop_values(inner)
    if isinstance(model, Wrapper):
        model.connect()


def draw_weights(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a model on the meta device memory on `device`, and draw this rank's shards of its weights by its own rules.

    The model's ``init_rule``, for buffers ``buffer_rule``, says how a tensor of a given name starts. Its elements
    follow from the seed and this name, and are the same on every mesh.
    """
    materialize(model, device, seed)


@torch.no_grad()
def _fill(model: nn.Module, values: Values, empty: Collection[str]) -> None:
    """Fill parameters and buffers with this rank's shards of `values`.

    Args:
        empty: names of buffers that have no values of their own.
    """
    for full_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        name = init.canonical_name(full_name)
        box = local_box(tensor)
        shard = values(name, box)
        if shard is not None:
            to_local(tensor).copy_(shard)
        elif isinstance(tensor, nn.Parameter) or full_name in empty:
            model_name = init.class_name(model)
            raise ConfigError(f"nothing gives {name} of {model_name} its values")


def _restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor], device: torch.device) -> None:
    """Put buffers on the device: with their values, or empty where they had none.

    They go there with offload too, which moves only parameters to the host. A buffer that several modules share stays
    shared.
    """
    moved: dict[int, Tensor] = {}
    for buffer in buffers.values():
        if buffer.is_meta:
            moved[id(buffer)] = torch.empty_like(buffer, device=device)
        else:
            moved[id(buffer)] = buffer.to(device)
    for name, buffer in buffers.items():
        path, _, own_name = name.rpartition(".")
        owner = model.get_submodule(path)
        own_buffers(owner)[own_name] = moved[id(buffer)]
