"""What a model of anyone's own is refused for, by name, where PyTorch would say it in other words, or not at all."""

from __future__ import annotations

import torch
from torch import nn

from mmm.errors import ConfigError
from mmm.layout import UNSHARDED
from mmm.nn.weights import class_name
from mmm.parallel.dp.fsdp import fsdp_units_of
from mmm.parallel.plan import Plan
from mmm.parallel.values import check_sizes


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
