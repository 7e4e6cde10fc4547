"""What a model of anyone's own is refused for, by name, where PyTorch would say it in other words, or not at all.

A forward may not write parameters, as a codebook that follows its inputs does. Each rank would write what its own
samples say, and FSDP frees what is written with the gathered parameter: without a word the ranks would part, or nothing
would have been written. What is written through ``.data`` leaves no trace, and is not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.layout import UNSHARDED
from mmm.models.draw import canonical_name
from mmm.models.weights import class_name
from mmm.parallel.dp.fsdp import fsdp_units_of
from mmm.parallel.dp.wrapped import Wrapper, all_groups, unwrapped
from mmm.parallel.plan import Plan
from mmm.parallel.values import check_sizes
from mmm.torch_private.fsdp import unsharded_of
from mmm.torch_private.module import version_of


def check_own_model(model: nn.Module, plan: Plan, technique: str) -> None:
    """Whether data parallelism can shard a model; needs no process group.

    Args:
        model: before it is parallelized. technique: of `Techniques.data_parallel`.

    Raises:
        ConfigError: a parameter without dims, or without sizes yet; an embedding with sparse gradients; under FSDP a
            parameter without elements, a module of ``torch.jit``, a unit that is never called, or has real and complex
            parameters.
    """
    check_sizes(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} has sparse gradients, which no technique adds up: sparse=False")
        if isinstance(module, torch.jit.ScriptModule) and technique not in UNSHARDED:
            raise ConfigError(f"data_parallel {technique} with {name}, of torch.jit: FSDP cannot gather it; use ddp")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and technique != "ddp":
            raise ConfigError(
                f"data_parallel {technique} with {name}, which is a scalar: it has no rows to shard; give it shape "
                f"(1,), or use ddp"
            )
        if not parameter.numel() and technique not in UNSHARDED:
            raise ConfigError(f"data_parallel {technique} with {name} of {tuple(parameter.shape)}: it has no elements")
    if technique not in UNSHARDED:
        _check_units(model, [*fsdp_units_of(model, plan), [model]])


def _check_units(model: nn.Module, units: list[list[nn.Module]]) -> None:
    """Raises ConfigError for the first of `units`, inner ones before outer ones, that FSDP cannot gather."""
    names, seen = {id(module): name for name, module in model.named_modules()}, set[int]()
    for unit in units:
        inside: dict[bool, str] = {}  # whether it is complex → the name of a parameter
        for module in unit:
            never = type(module).forward is nn.Module.forward and "forward" not in vars(module)
            if module is not model and never:
                raise ConfigError(
                    f"fsdp_units names {names[id(module)]}, a {class_name(module)}, which is never called: name "
                    f"what is called in it, in a tuple to gather it as one"
                )
            inside |= {
                p.is_complex(): f"{names[id(module)]}.{name}".lstrip(".")
                for name, p in module.named_parameters()
                if id(p) not in seen
            }
        seen |= {id(parameter) for module in unit for parameter in module.parameters()}
        if len(inside) > 1:
            raise ConfigError(
                f"data_parallel fsdp with {inside[True]}, which is complex, beside {inside[False]}, which is real: "
                f"FSDP gathers one dtype as one; give complex parameters a module of their own, or use ddp, zero1 or "
                f"zero2"
            )


def refuse_written_parameters(model: nn.Module) -> None:
    """Have a forward of `model` that writes one of its parameters in place end in a ConfigError.

    Args:
        model: as `apply` returns it, with its weights.
    """
    inner = unwrapped(model)
    names = {id(parameter): canonical_name(name) for name, parameter in inner.named_parameters()}
    gathered = [parameter for group in all_groups(inner) for parameter in group.fsdp_params]
    replicas = list(inner.parameters()) if isinstance(model, Wrapper) else []
    before: dict[str, int] = {}

    def each() -> Iterator[tuple[str, Tensor]]:
        """What forward computes with, by name; of FSDP's from its first forward on."""
        yield from ((names[id(parameter)], parameter) for parameter in replicas)
        for parameter in gathered:
            if (unsharded := unsharded_of(parameter)) is not None:
                yield names[id(parameter.sharded_param)], unsharded

    def start(*_: Any) -> None:
        before.clear()
        before.update((name, version_of(tensor)) for name, tensor in each())

    def end(*_: Any) -> None:
        for name, tensor in each():
            if version_of(tensor) != before.get(name, 0):
                raise ConfigError(
                    f"forward writes the parameter {name}, in place: each rank would write what its own samples say, "
                    f"and FSDP would lose it; write it after the step, from what all ranks have together (an "
                    f"Embedding's max_norm writes as well: leave it out)"
                )

    inner.register_forward_pre_hook(start)
    inner.register_forward_hook(end)
