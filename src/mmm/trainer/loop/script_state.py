"""What a script's loop is to save, ``train_steps(…, state={"model": model, "optimizer": optimizer, …})``: sorted into
models, optimizers and others, and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.checkpoint.objects import encode
from mmm.errors import ConfigError
from mmm.nn.draw import canonical_name
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.dp.zero import Zero
from mmm.parallel.parallel_model import ParallelModel, saved_buffers
from mmm.trainer.run.core import Run

Optimizer = torch.optim.Optimizer
# Of a group of an optimizer: how it computes, which is as it was made, and what it is of.
NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


@dataclass
class ScriptState:
    """The objects of ``state=``, by their names in it.

    Attributes:
        modules: of each model, which data parallelism may have wrapped.
        named: the parameters of each model, by name.
        optimizers: as they were given.
        parameters: of each optimizer, as ``model.fc.weight``: the model's name, and that in the model.
        others: with ``state_dict`` and ``load_state_dict``.
    """

    modules: dict[str, list[nn.Module]] = field(default_factory=dict)
    named: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    parameters: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """What is saved now: all but tensors by name, as JSON has it; and the tensors of models and others.

        Raises:
            ConfigError: an optimizer, or another object, keeps something that cannot be saved.
        """
        about: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = self.of_models()
        for name, of_model in tensors.items():
            about[name] = {"kind": "model", "shapes": {at: list(tensor.shape) for at, tensor in of_model.items()}}
        for name, optimizer in self.optimizers.items():
            about[name] = self._describe_optimizer(name, optimizer)
        for name, other in self.others.items():
            tensors[name] = {}
            found = encode(other.state_dict(), name, tensors[name])
            about[name] = {"kind": "object", "type": type(other).__name__, "state": found}
        return about, tensors

    def of_models(self) -> dict[str, dict[str, Tensor]]:
        """Parameters and saved buffers of each model. A forward may have put other buffers in their place."""
        return {name: {**of_model, **saved_buffers(self.modules[name])} for name, of_model in self.named.items()}

    def _describe_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        names = {id(parameter): at for at, parameter in self.parameters[name].items()}
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            if id(parameter) not in names:
                raise ConfigError(
                    f"{name} in state= keeps a state that is of none of its parameters", on_every_rank=True
                )
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    encoded = encode_number(value, f"{name}'s {key} of {names[id(parameter)]}")
                    numbers.setdefault(names[id(parameter)], {})[key] = encoded
                elif isinstance(parameter, DTensor) and value.dim():
                    check_sharded(name, f"{key} of {names[id(parameter)]}", value, parameter)
        groups = []
        for group in optimizer.param_groups:
            values = {
                key: encode_number(value, f"{name}'s {key}") for key, value in group.items() if key not in NOT_SAVED
            }
            groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], "values": values})
        return {"kind": "optimizer", "type": type(optimizer).__name__, "groups": groups, "numbers": numbers}

    def reshard(self) -> None:
        """Free what FSDP has gathered: `named` are the shards."""
        for module in chain.from_iterable(self.modules.values()):
            reshard(module)

    def gather_updated(self) -> None:
        """What ZeRO-1 and ZeRO-2 do after a step, where something else has changed the shards. A collective."""
        for module in chain.from_iterable(self.modules.values()):
            if isinstance(module, Zero):
                module.gather()


def check_sharded(name: str, what: str, value: Tensor, parameter: DTensor) -> None:
    """Raises ConfigError where what an optimizer keeps for a sharded parameter does not say which part is local."""
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        found = "a DTensor" if isinstance(value, DTensor) else "a plain tensor"
        raise ConfigError(
            f"{name} in state= cannot be saved: its {what} is {found} of shape {list(value.shape)}, and the parameter "
            f"a DTensor of shape {list(parameter.shape)}; what an optimizer keeps has to be sharded as its parameter",
            on_every_rank=True,
        )


def encode_number(value: Any, name: str) -> Any:
    """`encode`, of what is to have no tensors but of one element, which become numbers. Raises ConfigError also for
    others: PyTorch's optimizers would not know how they are sharded."""
    found: dict[str, Tensor] = {}
    encoded = encode(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, name, found)
    if found:
        raise ConfigError(f"{name} in state= cannot be saved: it is, or has in it, a tensor", on_every_rank=True)
    return encoded


def sort_state(state: Mapping[str, Any], optimizer: Optimizer) -> ScriptState:
    """The objects of ``state=``, sorted.

    Args:
        optimizer: that `train_steps` was given.

    Raises:
        ConfigError: an object that cannot be saved, or two names of one; an optimizer of a parameter that is in no
            model; the optimizer, or a scheduler of one, that is not there.
    """
    found, seen = ScriptState(), dict[int, str]()
    for name, each in state.items():
        if type(name) is not str or not name or "." in name:
            raise ConfigError(f"{name!r} in state=: a name is a text without a dot")
        if (first := seen.setdefault(id(each), name)) != name:
            raise ConfigError(f"state= has one object under two names, {first} and {name}: leave one out")
        if isinstance(each, nn.Module | ParallelModel):
            _add_model(found, name, each)
        elif isinstance(each, Optimizer):
            found.optimizers[name] = each
        elif callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None)):
            found.others[name] = each
        else:
            raise ConfigError(
                f"{name} in state= is {article(each)}, which has no state_dict and load_state_dict: give an object "
                f"that has both"
            )
    for name, each in found.optimizers.items():
        _check_optimizer(found, name, each)
    if id(optimizer) not in seen:
        raise ConfigError(f"state= lacks the optimizer that train_steps was given, {article(optimizer)}")
    found.describe()
    return found


def _add_model(found: ScriptState, name: str, model: nn.Module | ParallelModel) -> None:
    if isinstance(model, ParallelModel) and model.pipeline is not None:
        raise ConfigError(f"{name} in state= is a pipeline, of which each rank has another part: trainers save it")
    modules = [model] if isinstance(model, nn.Module) else list(model.modules.values())
    for module in modules:
        reshard(module)
    found.modules[name] = modules
    found.named[name] = {canonical_name(at): parameter for at, parameter in model.named_parameters()}


def _check_optimizer(found: ScriptState, name: str, optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        raise ConfigError(
            f"{name} in state= is {article(optimizer)} with a state_dict or load_state_dict of its own; what "
            f"PyTorch's has is saved, and no more"
        )
    names: dict[int, str] = {}
    for model, named in found.named.items():
        for at, parameter in named.items():
            names.setdefault(id(parameter), f"{model}.{at}")
    found.parameters[name] = {}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if id(parameter) not in names:
            raise ConfigError(
                f"{name} in state= updates a parameter of shape {list(parameter.shape)} that is in none of the models "
                f"of state=: {', '.join(found.named) or 'there is none'}"
            )
        found.parameters[name][names[id(parameter)]] = parameter
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled and not any(getattr(other, "optimizer", None) is optimizer for other in found.others.values()):
        raise ConfigError(f"state= lacks the scheduler of {name}'s learning rate: it would begin anew")


def article(each: object) -> str:
    """An object's class, as ``an AdamW``."""
    name = type(each).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


@torch.no_grad()
def check_alike(run: Run, about: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """What each rank has in full, and one of them saves, is the same on all. A collective.

    Args:
        about, tensors: as of `ScriptState.describe`, or some of it.

    Raises:
        ConfigError: it is not; on every rank, with the first name.
    """
    if run.rank.world_size == 1 or run.dry:
        return
    own = {name: json.dumps(each, sort_keys=True) for name, each in about.items()}
    for name, of_object in tensors.items():
        for at, tensor in of_object.items():
            if not isinstance(tensor, DTensor):
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                own[f"{name}.{at}"] = f"{list(tensor.shape)} {float(real.double().sum()).hex()}"
    everyones: list[Any] = [None] * run.rank.world_size
    dist.all_gather_object(everyones, own)
    for name in own:
        if any(other.get(name) != everyones[0].get(name) for other in everyones):
            raise ConfigError(
                f"{name} in state= is not the same on all ranks, which have it in full: one rank's would be saved "
                "for all",
                on_every_rank=True,
            )
