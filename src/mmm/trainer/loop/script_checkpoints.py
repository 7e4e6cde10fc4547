"""The checkpoints of a script's own loop (`mmm.trainer.train_steps`): what `script_state` has sorted, on any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.objects import decode, saved_tensors
from mmm.checkpoint.state import give_state, metadata_on_all, read_tensors, tensors_of
from mmm.errors import CheckpointError
from mmm.trainer.config.training import CheckpointOptions
from mmm.trainer.loop.checkpointer import Checkpointer
from mmm.trainer.loop.script_state import Optimizer, ScriptState, check_alike
from mmm.trainer.run.core import Run
from mmm.trainer.run.origin import Origin, check_steps_left, damage
from mmm.trainer.run.steps import Step


class ScriptCheckpoints(Checkpointer):
    """Saves after a row, and goes on.

    Attributes:
        state: to save. samples: in a global batch, which has to be the same where the run goes on.
    """

    def __init__(self, run: Run, options: CheckpointOptions, state: ScriptState, samples: int) -> None:
        super().__init__(run, options, ModelMetadata())
        self.state, self.samples = state, samples
        self._saves = self._stops = self._can_be_saved = False

    def load(self, steps: int) -> int:
        """The step to begin with, of so many. A collective.

        Raises:
            CheckpointError: the checkpoint is not of these objects, or of another global batch, or no step is left.
        """
        if (origin := self.record.origin) is None:
            return 0
        check_steps_left(origin, self.run.options, steps)
        with damage(origin):
            about, samples = origin.manifest.state["objects"], origin.manifest.state["samples"]
            if samples != self.samples:
                raise _refused(origin, f"its global batch has {samples} samples, and this one {self.samples}")
            here, tensors = self.state.describe()
            check_fits(origin, about, here)
            states = self._read(origin, about, tensors)
        for name, state in states.items():
            self.state.others[name].load_state_dict(state)
        self.state.gather_updated()
        self.record.go_on(self.run)
        self.note_origin(origin)
        return origin.manifest.step

    def _read(
        self, origin: Origin, about: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Any]:
        """Read models and optimizers, and return what the others are to load."""
        state, files = self.state, origin.manifest.files
        into = state.of_models()
        for name in state.others:
            into[name] = self._room(origin, name, about[name]["state"], tensors[name])
        found = metadata_on_all(origin.path, files)
        state.reshard()
        moments = read_tensors(origin.path, found, into, state.parameters)
        for name, optimizer in state.optimizers.items():
            self._restore_optimizer(origin, name, optimizer, about[name], moments[name])
        return {name: decode(about[name]["state"], into[name]) for name in state.others}

    def _room(self, origin: Origin, name: str, saved: Any, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where an object's tensors are read to: sharded as those that it has now."""
        rooms: dict[str, Tensor] = {}
        for path, shape, dtype, place in saved_tensors(saved):
            now = here.get(path)
            wrong = isinstance(now, DTensor) and now.shape != shape
            if wrong or (place == "sharded" and now is None):
                raise _refused(origin, f"{path} of {name} is a tensor of shape {list(shape)}, and not here")
            if isinstance(now, DTensor):
                rooms[path] = torch.empty_like(now, dtype=dtype)
            else:
                lay = torch.device("cpu") if place == "host" else self.run.device
                rooms[path] = torch.empty(shape, dtype=dtype, device=lay if now is None else now.device)
        return rooms

    def _restore_optimizer(
        self,
        origin: Origin,
        name: str,
        optimizer: Optimizer,
        about: Mapping[str, Any],
        moments: Mapping[str, dict[str, Tensor]],
    ) -> None:
        of_parameter: dict[int, dict[str, Any] | None] = {}
        for at, parameter in self.state.parameters[name].items():
            numbers = {key: decode(value, {}) for key, value in about["numbers"].get(at, {}).items()}
            of_parameter[id(parameter)] = {**moments.get(at, {}), **numbers}
        give_state(optimizer, of_parameter)
        for at, parameter in self.state.parameters[name].items():
            for key, value in moments.get(at, {}).items():
                given = optimizer.state[parameter][key]
                if given.dtype != value.dtype:  # PyTorch has made it the parameter's
                    optimizer.state[parameter][key] = value.to(given.device)
        names = {id(parameter): at for at, parameter in self.state.parameters[name].items()}
        values = {at: group["values"] for group in about["groups"] for at in group["parameters"]}
        for group in optimizer.param_groups:
            first, *others = [values[names[id(parameter)]] for parameter in group["params"]]
            if any(other != first for other in others):
                raise _refused(origin, f"{name} has in one group parameters that were in several, with other values")
            for key, value in first.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = decode(value, {})

    def before_row(self, step: Step) -> None:
        """Find out whether to save after this step, which then has a row. A collective."""
        self._stops = self.stop_asked()
        self._saves = self.due(step.number, step.last or self._stops)
        step.due = step.due or self._saves

    def after_row(self, step: Step) -> None:
        """Save, and stop, if it is time to. A collective."""
        if self._saves:
            self._save(step.number + 1)
        elif self.every is not None and not self._can_be_saved:
            self.state.describe()  # optimizers have what they keep from now on: what cannot be saved is refused
        self._can_be_saved = True
        self.poll()
        if self._stops and not step.last:
            self.stop(step.number + 1)
        if step.last:
            self.wait()

    def _save(self, done: int) -> None:
        state = self.state
        state.reshard()
        about, tensors = state.describe()
        check_alike(self.run, about, {name: tensors[name] for name in state.others})
        tensors |= {name: tensors_of(each, state.parameters[name]) for name, each in state.optimizers.items()}
        self.write(done, {"samples": self.samples, "objects": about}, tensors)


def check_fits(origin: Origin, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a checkpoint has other objects than ``state=``, or their tensors are others."""
    before, now = _contents(saved), _contents(here)
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise _refused(origin, f"{name} is {before.get(name, 'not')} there, and {now.get(name, 'not')} here")


def _contents(about: Mapping[str, Any]) -> dict[str, str]:
    """What has to be equal of what `ScriptState.describe` says: each object's type, and shapes and parameters."""
    contents: dict[str, str] = {}
    for name, each in about.items():
        contents[name] = "a model" if each["kind"] == "model" else each["type"]
        contents |= {f"{at} of {name}": f"of shape {shape}" for at, shape in each.get("shapes", {}).items()}
        for group in each.get("groups", ()):
            contents |= {f"{at} of {name}": "updated" for at in group["parameters"]}
    return contents


def _refused(origin: Origin, why: str) -> CheckpointError:
    return CheckpointError(f"{origin.path} does not go on in this script: {why}", on_every_rank=True)
