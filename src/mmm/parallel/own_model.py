"""What a model of anyone's own is refused for, by name, where PyTorch would say it in other words, or not at all."""

from __future__ import annotations

from torch import nn

from mmm.errors import ConfigError
from mmm.layout import UNSHARDED
from mmm.nn.draw import class_name
from mmm.parallel.dp.fsdp import fsdp_units_of
from mmm.parallel.plan import Plan
from mmm.parallel.values import check_sizes


def check_own_model(model: nn.Module, plan: Plan, technique: str) -> None:
    """Whether data parallelism can shard a model; needs no process group.

    Args:
        model: before it is parallelized. technique: of `Techniques.data_parallel`.

    Raises:
        ConfigError: a parameter without dims, or without sizes yet; an embedding with sparse gradients; under FSDP a
            unit that is never called, or has real and complex parameters.
    """
    check_sizes(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} has sparse gradients, which no technique adds up: sparse=False")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and technique != "ddp":
            raise ConfigError(
                f"data_parallel {technique} with {name}, which is a scalar: it has no rows to shard; give it shape "
                f"(1,), or use ddp"
            )
    if technique not in UNSHARDED:
        _check_units(model, [*fsdp_units_of(model, plan), [model]])


def _check_units(model: nn.Module, units: list[list[nn.Module]]) -> None:
    """Raises ConfigError for the first of `units`, inner ones before outer ones, that FSDP cannot gather."""
    names = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()  # parameters of units before
    for unit in units:
        first_of_kind: dict[bool, str] = {}  # whether it is complex: the name of a parameter
        for module in unit:
            never_called = type(module).forward is nn.Module.forward and "forward" not in vars(module)
            if module is not model and never_called:
                raise ConfigError(
                    f"fsdp_units names {names[id(module)]}, a {class_name(module)}, which is never called: name "
                    f"what is called in it, in a tuple to gather it as one"
                )
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    first_of_kind[parameter.is_complex()] = f"{names[id(module)]}.{name}".lstrip(".")
        if len(first_of_kind) > 1:
            raise ConfigError(
                f"data_parallel fsdp with {first_of_kind[True]}, which is complex, beside {first_of_kind[False]}, "
                f"which is real: FSDP gathers one dtype as one; give complex parameters a module of their own, or use "
                f"ddp, zero1 or zero2"
            )
