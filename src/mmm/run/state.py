"""What a run saves: the objects of ``run.state(model=…, optimizer=…, …)``, sorted, checked, described, and loaded.

Tensors are saved by their names in the full model, and DTensors say which shard is local. So a checkpoint does not know
the layout that it was saved on. Everything else is JSON, in ``checkpoint.json``::

    {"model":     {"kind": "model"},
     "optimizer": {"kind": "optimizer", "type": "AdamW", "numbers": {…},
                   "groups": [{"parameters": […], "values": {…}}]},
     "scheduler": {"kind": "object", "type": "LambdaLR", "state": {…}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.checkpoint.manifest import FileSum
from mmm.checkpoint.objects import decode, encode, saved_tensors
from mmm.checkpoint.state import give_state, metadata_on_all, read_tensors, shapes_of, tensors_of
from mmm.errors import CheckpointError, ConfigError
from mmm.nn.init import canonical_name
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.dp.zero import Zero
from mmm.parallel.parallel_model import ParallelModel, saved_buffers
from mmm.run.comm import TorchComm
from mmm.units import counted

Optimizer = torch.optim.Optimizer
# What the JSON says of each object, by the object's name.
Described = dict[str, dict[str, Any]]
# These keys of an optimizer's group say how it computes. The program decides that anew, so they are not saved.
NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class State:
    """The objects of ``run.state(…)``, by their names in it.

    Attributes:
        modules: modules of each model, which data parallelism may have wrapped.
        parameters: parameters of each model, by name.
        repeated: further parameters of each model under a name of `parameters`: a tied weight that two stages have.
        optimizers: the optimizers, as the program made them.
        updated: parameters of each optimizer, by a name such as ``model.fc.weight``: model, and name in the model.
        others: objects with ``state_dict`` and ``load_state_dict``.
        has_stages: whether a model is a pipeline, so that each rank has other layers.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: an object cannot be saved, or has two names; an optimizer has a parameter that is in no model;
                the scheduler of a learning rate is missing.
        """
        self.modules: dict[str, list[nn.Module]] = {}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.repeated: dict[str, list[tuple[str, nn.Parameter]]] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.updated: dict[str, dict[str, Tensor]] = {}
        self.others: dict[str, Any] = {}
        self.has_stages = False
        _check_names(objects)
        for name, value in objects.items():
            can_save = callable(getattr(value, "state_dict", None))
            can_load = callable(getattr(value, "load_state_dict", None))
            if isinstance(value, nn.Module | ParallelModel):
                self._add_model(name, value)
            elif isinstance(value, Optimizer):
                self.optimizers[name] = value
            elif can_save and can_load:
                self.others[name] = value
            else:
                raise ConfigError(
                    f"{name} of run.state(…) is {article(value)}, which has no state_dict and load_state_dict: give an "
                    "object that has both"
                )
        # Such as ``model.fc.weight``, by the parameter's id: the parameters are the same objects during the whole run.
        self._names = self.names_of_parameters()
        for name, optimizer in self.optimizers.items():
            self._add_optimizer(name, optimizer)
        # A resumed run may have other flags for its optimizer. So only what the loop has changed since is saved.
        self._as_made: dict[str, list[dict[str, Any]]] = {}
        for name, optimizer in self.optimizers.items():
            self._as_made[name] = [dict(group) for group in optimizer.param_groups]

    def _add_model(self, name: str, model: nn.Module | ParallelModel) -> None:
        if isinstance(model, ParallelModel):
            self.modules[name] = list(model.modules.values())
            self.has_stages |= model.pipeline is not None
        else:
            self.modules[name] = [model]
        # The parameters of FSDP have to be the shards, which the optimizer has as well.
        self.reshard()
        parameters: dict[str, nn.Parameter] = {}
        repeated = []
        for long_name, parameter in model.named_parameters():
            short_name = canonical_name(long_name)
            if parameters.setdefault(short_name, parameter) is not parameter:
                repeated.append((short_name, parameter))
        self.parameters[name] = parameters
        self.repeated[name] = repeated

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        # A state dict of another form could not be saved by the parameters' names.
        kind = type(optimizer)
        if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
            raise ConfigError(
                f"{name} of run.state(…) is {article(optimizer)} with a state_dict or load_state_dict of its own; only "
                f"what PyTorch's has is saved"
            )
        self.updated[name] = {}
        for parameter in parameters_of(optimizer):
            parameter_name = self._names.get(id(parameter))
            if parameter_name is None:
                models = ", ".join(self.parameters) or "there is none"
                raise ConfigError(
                    f"{name} of run.state(…) updates a parameter of shape {list(parameter.shape)} that is in none "
                    f"of its models: {models}"
                )
            self.updated[name].setdefault(parameter_name, parameter)
        # PyTorch's schedulers leave this mark. A scheduler that is not saved would begin anew.
        is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        has_scheduler = any(getattr(other, "optimizer", None) is optimizer for other in self.others.values())
        if is_scheduled and not has_scheduler:
            raise ConfigError(f"run.state(…) lacks the scheduler of {name}'s learning rate: it would begin anew")

    def names_of_parameters(self) -> dict[int, str]:
        """Names such as ``model.fc.weight``, by the parameter's id. A repeated parameter has the name of the first."""
        names: dict[int, str] = {}
        for model, parameters in self.parameters.items():
            for name, parameter in (*parameters.items(), *self.repeated[model]):
                names.setdefault(id(parameter), f"{model}.{name}")
        return names

    def reshard(self) -> None:
        """Free what FSDP has gathered: the parameters are then the shards."""
        for module in chain.from_iterable(self.modules.values()):
            reshard(module)

    def gather_updated(self) -> None:
        """Gather the parameters from their shards, as ZeRO-1 and ZeRO-2 do after each step. A collective.

        Needed where something else than a step has changed the shards.
        """
        for module in chain.from_iterable(self.modules.values()):
            if isinstance(module, Zero):
                module.gather()

    def of_models(self) -> dict[str, dict[str, Tensor]]:
        """Parameters and saved buffers of each model. A forward may have replaced buffers, so they are read anew."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, parameters in self.parameters.items():
            buffers = saved_buffers(self.modules[name])
            tensors[name] = {**parameters, **buffers}
        return tensors

    def describe(self) -> tuple[Described, dict[str, dict[str, Any]]]:
        """Describe the objects as they are now.

        Returns:
            Everything but tensors, as JSON has it; and the tensors of models and others, by object and name.

        Raises:
            ConfigError: an optimizer, or another object, keeps something that cannot be saved.
        """
        described: Described = {}
        tensors: dict[str, dict[str, Any]] = self.of_models()
        for name in self.parameters:
            described[name] = {"kind": "model"}
        for name, optimizer in self.optimizers.items():
            described[name] = self._describe_optimizer(name, optimizer)
        for name, other in self.others.items():
            tensors[name] = {}
            encoded = encode(other.state_dict(), name, tensors[name])
            described[name] = {
                "kind": "object",
                "type": type(other).__name__,
                "state": encoded,
            }
        return described, tensors

    def check_groups(self, name: str, optimizer: Optimizer) -> None:
        """Check that an optimizer has the groups of parameters that it had in ``run.state(…)``.

        Raises:
            ConfigError: it has others. A resumed run would not have them when it loads the checkpoint.
        """
        n_groups = len(optimizer.param_groups)
        n_groups_before = len(self._as_made[name])
        if n_groups != n_groups_before:
            raise ConfigError(
                f"{name} of run.state(…) has {counted(n_groups, 'group')} of parameters, and had {n_groups_before} in "
                "run.state(…): call add_param_group before it; a group whose parameters are to train later may begin "
                "with lr=0.0",
                on_every_rank=True,
            )
        unknown = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in self._names]
        if unknown:
            raise ConfigError(
                f"{name} of run.state(…) has a parameter of shape {tuple(unknown[0].shape)} that it did not have in "
                "run.state(…): give it all parameters before",
                on_every_rank=True,
            )

    def _describe_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        self.check_groups(name, optimizer)
        scalars: dict[str, dict[str, Any]] = {}
        # Such as {"step": 10.0, "exp_avg": tensor, "exp_avg_sq": tensor} of AdamW.
        for parameter, state in optimizer.state.items():
            parameter_name = self._names.get(id(parameter))
            if parameter_name is None:
                raise ConfigError(
                    f"{name} of run.state(…) keeps a state that belongs to none of its parameters", on_every_rank=True
                )
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    encoded = encode_number(value, f"{name}'s {key} of {parameter_name}")
                    scalars.setdefault(parameter_name, {})[key] = encoded
                # A scalar, such as the number of steps, is the same on all ranks.
                elif isinstance(parameter, DTensor) and value.dim():
                    check_sharded(name, f"{key} of {parameter_name}", value, parameter)
        groups = []
        for group, as_made in zip(optimizer.param_groups, self._as_made[name], strict=True):
            changed = {}
            for key, value in group.items():
                if key not in NOT_SAVED and not _equal(value, as_made.get(key)):
                    changed[key] = encode_number(value, f"{name}'s {key}")
            parameters = [self._names[id(parameter)] for parameter in group["params"]]
            groups.append({"parameters": parameters, "values": changed})
        return {
            "kind": "optimizer",
            "type": type(optimizer).__name__,
            "groups": groups,
            "numbers": scalars,
        }

    def tensors_to_save(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of `describe`, and those that the optimizers keep."""
        to_save = dict(tensors)
        for name, optimizer in self.optimizers.items():
            to_save[name] = tensors_of(optimizer, self.updated[name])
        return to_save

    def load(
        self,
        path: Path,
        files: Mapping[str, FileSum],
        described: Described,
        current: Described,
        current_tensors: Mapping[str, Mapping[str, Tensor]],
        device: torch.device,
    ) -> None:
        """Load a checkpoint into the objects. A collective.

        Args:
            path: the checkpoint.
            files: its files, from its manifest.
            described: what it says of its objects, as `describe` returns it.
            current, current_tensors: the objects of this run, as `describe` has returned them.
            device: where tensors of other objects are read to.

        Raises:
            CheckpointError: the checkpoint has other objects, lacks a tensor, or has it in another shape. On every
                rank.
        """
        # Rank 0 reads the metadata for all.
        metadata = metadata_on_all(path, files)
        _check_same_objects(path, described, current)
        self._check_updated(path, described, current)
        if not self.has_stages:
            # By object and name.
            shapes = {names[:2]: entry.size for names, entry in shapes_of(metadata).items()}
            self._check_same_tensors(path, shapes)
        into = self.of_models()
        for name in self.others:
            state = described[name]["state"]
            into[name] = _places_to_load(path, name, state, current_tensors[name], device)
        self.reshard()
        own = {name: tensors_of(optimizer, self.updated[name]) for name, optimizer in self.optimizers.items()}
        # Models are read in place; what belongs to an optimizer is returned, sharded as its parameter is.
        moments = read_tensors(path, metadata, into, self.updated, own)
        for name in self.parameters:
            # A tied weight that this rank has twice was read once.
            for parameter_name, parameter in self.repeated[name]:
                # In place, and without autograd.
                parameter.detach().copy_(self.parameters[name][parameter_name].detach())
        for name, optimizer in self.optimizers.items():
            self._restore_optimizer(path, optimizer, described[name], moments[name])
        for name, other in self.others.items():
            other.load_state_dict(decode(described[name]["state"], into[name]))
        self.gather_updated()

    def _check_updated(self, path: Path, saved: Described, current: Described) -> None:
        """Compare the parameters that each optimizer updates. A rank with only some of the layers has fewer."""
        for name in self.optimizers:
            before = _parameters_in(saved[name])
            now = _parameters_in(current[name])
            for parameter in now:
                if parameter not in before:
                    raise refused(path, f"{parameter} is updated by {name} here, and not in the checkpoint")
            # Other stages update those that this rank lacks.
            for parameter in before:
                if parameter not in now and not self.has_stages:
                    raise refused(path, f"{parameter} is updated by {name} in the checkpoint, and not here")

    def _check_same_tensors(self, path: Path, saved: Mapping[tuple[str, ...], torch.Size]) -> None:
        """Compare the shapes of the models' tensors. Not called on a rank that has only some of the layers."""
        for model, tensors in self.of_models().items():
            shapes_now: dict[tuple[str, ...], torch.Size] = {}
            for name, tensor in tensors.items():
                shapes_now[model, name] = tensor.shape
            shapes_before = {names: shape for names, shape in saved.items() if names[0] == model}
            for names in {**shapes_before, **shapes_now}:
                if shapes_now.get(names) != shapes_before.get(names):
                    before = _shape_text(shapes_before.get(names))
                    now = _shape_text(shapes_now.get(names))
                    raise refused(path, f"{names[1]} of {model} is {before} in the checkpoint, and {now} here")

    def _restore_optimizer(
        self,
        path: Path,
        optimizer: Optimizer,
        described: Mapping[str, Any],
        moments: Mapping[str, dict[str, Tensor]],
    ) -> None:
        """Give an optimizer the state and the group values of a checkpoint."""
        of_parameter: dict[int, dict[str, Any] | None] = {}
        has_state_of: set[str] = set()
        parameters = parameters_of(optimizer)
        for parameter in parameters:
            name = self._names[id(parameter)]
            encoded = described["numbers"].get(name, {})
            scalars = {key: decode(value, {}) for key, value in encoded.items()}
            tensors = moments.get(name, {})
            # Each copy of a tied weight that this rank has twice needs a state of its own.
            if name in has_state_of:
                tensors = {key: value.clone() for key, value in tensors.items()}
            has_state_of.add(name)
            of_parameter[id(parameter)] = {**tensors, **scalars}
        give_state(optimizer, of_parameter)
        for parameter in parameters:
            name = self._names[id(parameter)]
            for key, value in moments.get(name, {}).items():
                restored = optimizer.state[parameter][key]
                # PyTorch's load_state_dict casts floats to the dtype of the parameter.
                if restored.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(restored.device)
        # The values of its group, for each parameter.
        saved = {}
        for saved_group in described["groups"]:
            for name in saved_group["parameters"]:
                saved[name] = saved_group["values"]
        for group in optimizer.param_groups:
            names = [self._names[id(parameter)] for parameter in group["params"]]
            values = [saved.get(name, {}) for name in names]
            if not values:
                continue
            if any(other != values[0] for other in values):
                raise refused(path, "an optimizer has in one group parameters that were in several, with other values")
            for key, value in values[0].items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = decode(value, {})


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _equal(value: Any, before: Any) -> bool:
    """Whether a value of a group is as before. A tensor may have changed in place, so it never is."""
    if isinstance(value, Tensor):
        return False
    return type(value) is type(before) and value == before


def _check_names(objects: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name with a dot, or an object with two names."""
    names: dict[int, str] = {}
    for name, value in objects.items():
        if "." in name:
            raise ConfigError(f"{name!r} of run.state(…): a name has no dot")
        first = names.setdefault(id(value), name)
        if first != name:
            raise ConfigError(f"run.state(…) has one object under two names, {first} and {name}: leave one out")


def article(value: object) -> str:
    """An object's class, such as ``an AdamW``."""
    name = type(value).__name__
    if name[:1].lower() in "aeiou":
        return f"an {name}"
    return f"a {name}"


def _shape_text(shape: torch.Size | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def _check_same_objects(path: Path, saved: Described, current: Described) -> None:
    """Raises CheckpointError if a checkpoint has other objects than ``run.state(…)``."""
    for name in {**saved, **current}:
        before = _kind(saved.get(name))
        now = _kind(current.get(name))
        if before != now:
            raise refused(path, f"{name} is {before} in the checkpoint, and {now} here")


def _kind(described: Mapping[str, Any] | None) -> str:
    if described is None:
        return "missing"
    return "a model" if described["kind"] == "model" else described["type"]


def _parameters_in(described: Mapping[str, Any]) -> list[str]:
    return [name for group in described.get("groups", ()) for name in group["parameters"]]


def _places_to_load(
    path: Path,
    name: str,
    saved: Any,
    current: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Empty tensors that an object's tensors are read into: sharded as those that it has now.

    Args:
        name: the object's name.
        saved: its state in the checkpoint.
        current: its tensors now, by path.
        device: for a tensor that it does not have now.
    """
    places: dict[str, Tensor] = {}
    for tensor in saved_tensors(saved):
        now = current.get(tensor.path)
        has_other_shape = isinstance(now, DTensor) and now.shape != tensor.shape
        if has_other_shape or (tensor.place == "sharded" and now is None):
            shape = _shape_text(tensor.shape)
            raise refused(path, f"{tensor.path} of {name} is a tensor {shape} in the checkpoint, and not here")
        # In the checkpoint's dtype, with the sharding and the device that the object has now.
        if isinstance(now, DTensor):
            places[tensor.path] = torch.empty_like(now, dtype=tensor.dtype)
        elif now is not None:
            places[tensor.path] = torch.empty(tensor.shape, dtype=tensor.dtype, device=now.device)
        else:
            place = torch.device("cpu") if tensor.place == "host" else device
            places[tensor.path] = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
    return places


def check_sharded(name: str, tensor_name: str, value: Tensor, parameter: DTensor) -> None:
    """Raises ConfigError if what an optimizer keeps for a sharded parameter does not say which shard is local."""
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        kind = "a DTensor" if isinstance(value, DTensor) else "a plain tensor"
        raise ConfigError(
            f"{name} of run.state(…) cannot be saved: its {tensor_name} is {kind} of shape {list(value.shape)}, and "
            f"the parameter a DTensor of shape {list(parameter.shape)}; what an optimizer keeps has to be sharded as "
            "its parameter",
            on_every_rank=True,
        )


def encode_number(value: Any, name: str) -> Any:
    """`encode` a value without tensors. A tensor of one element becomes a number.

    Raises:
        ConfigError: it has another tensor. Nobody would know how that is sharded.
    """
    tensors: dict[str, Tensor] = {}
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    encoded = encode(value, name, tensors)
    if tensors:
        raise ConfigError(f"{name} of run.state(…) cannot be saved: it is, or has in it, a tensor", on_every_rank=True)
    return encoded


@torch.no_grad()
def check_alike(
    comm: TorchComm,
    described: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Check that what every rank has in full, and one of them saves, is the same on all. A collective.

    Args:
        described, tensors: as `State.describe` returns them, or some of them.

    Raises:
        ConfigError: it is not; on every rank, with the first name.
    """
    if comm.rank.world_size == 1 or comm.dry:
        return
    own = {name: _digest(value) for name, value in described.items()}
    for name, of_object in tensors.items():
        for tensor_name, tensor in of_object.items():
            # The shards of a DTensor differ, as they should.
            if not isinstance(tensor, DTensor):
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                # All digits of the sum of its elements.
                total = float(real.double().sum()).hex()
                own[f"{name}.{tensor_name}"] = f"{list(tensor.shape)} {total}"
    by_rank = comm.gather_everywhere(own)
    for name in own:
        if any(other.get(name) != by_rank[0].get(name) for other in by_rank):
            raise ConfigError(
                f"{name} of run.state(…) is not the same on all ranks, which have it in full: one rank's would be "
                "saved for all",
                on_every_rank=True,
            )


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def of_all_stages(comm: TorchComm, described: Described) -> Described:
    """Merge what all stages of a pipeline say of the optimizers: each updates other parameters. A collective."""
    merged: Described = {}
    for of_rank in comm.gather_everywhere(described):
        for name, value in of_rank.items():
            # A copy: the lists below are added to.
            first = merged.setdefault(name, json.loads(json.dumps(value)))
            if value["kind"] == "optimizer" and first != value:
                known = set(_parameters_in(first))
                first["groups"] += [group for group in value["groups"] if not known.issuperset(group["parameters"])]
                first["numbers"] |= value["numbers"]
    return merged


def refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be resumed by this program: {why}", on_every_rank=True)
