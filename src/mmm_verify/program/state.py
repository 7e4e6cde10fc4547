"""Watches what a script has to keep in a checkpoint, and what its steps compute from that."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from mmm_verify.difference import bytes_of
from mmm_verify.observe import local_tensor, named_parameters, tensors_of
from mmm_verify.program.recorder import Recorder, Recording
from mmm_verify.shards import canonical_name, to_local
from mmm_verify.torch_private import replaced

# In the order of cause and effect.
KINDS = ("weights", "buffers", "moments", "rates", "scaler", "batch", "random numbers", "loss", "gradients")


@dataclass
class States(Recording):
    """A recording, with all that each step began with and computed.

    Attributes:
        states: by step, (kind, name) → what this rank has; the kinds are `KINDS`.
        copies: by step: each set of tensors, (name) → tensor, that are called like the parameters, such as averages.
    """

    states: list[dict[tuple[str, str], Tensor]] = field(default_factory=list)
    copies: list[list[dict[str, Tensor]]] = field(default_factory=list)


class StateRecorder(Recorder):
    """Keeps all that a script's steps begin with. Random numbers and dropout are the script's own.

    Its last step ends where the script begins the next one, or ends: by then it has saved what it saves.

    Args:
        done, nudge, wanted: see `Recorder`.
    """

    # The next checkpoint would be one too late.
    runs_on = False

    def __init__(self, done: Callable[[Recording], None], nudge: torch.dtype | None, wanted: int) -> None:
        super().__init__(done, None, nudge, wanted)
        self.recording: States = States()
        # Each step ends where weights are next used in training.
        self.changes_later = True
        # What was seen since the last call of step(): it belongs to the next one.
        self._coming: dict[tuple[str, str], Tensor] = {}
        self._state: dict[tuple[str, str], Tensor] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a GradScaler is watched too."""
        scaler_step = GradScaler.step

        def watched_step(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            self._keep("scaler", "", scaler.state_dict())
            return scaler_step(scaler, *args, **kwargs)

        with super().watching(), replaced(GradScaler, "step", watched_step):
            yield

    def _keep(self, kind: str, of: str, values: dict[str, Any]) -> None:
        """Keep the numbers and tensors among some values, unless the step under way has them."""
        for key, value in values.items():
            # Adam's betas are a tuple.
            scalars = value if isinstance(value, tuple) else (value,)
            for index, scalar in enumerate(scalars):
                if isinstance(scalar, (int, float, Tensor)):
                    self._coming.setdefault((kind, f"{key}{of}" + "'" * index), local_tensor(scalar).local)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        super()._before_forward(module, args)
        # Where the script calls one of its models in training.
        if self._forward_depth == 1 and self._generator_state is not None:
            tensors, _ = tensors_of(self._modules())
            first_step, *_ = *self.recording.steps, self._step
            for name, tensor in tensors.items():
                kind = "weights" if name in first_step.parameters else "buffers"
                self._keep(kind, "", {name: tensor.local})
            self._keep("random numbers", "'s generator", _generators())

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        digest = hashlib.sha256()
        for tensor in self._inputs:
            digest.update(bytes_of(to_local(tensor.detach()).cpu()))
        # This may close the last step.
        super()._keep_gradients(optimizer)
        names = {}
        for module in self._modules():
            names.update({id(parameter): name for name, parameter in named_parameters(module)})
        # A step may have several optimizers.
        place = "'" * (len(self._stepped) - 1)
        for index, group in enumerate(optimizer.param_groups):
            of = f" of group {index}{place}"
            self._keep("rates", of, group)
            for parameter in group["params"]:
                # Optimizers make this when they first step.
                self._keep("moments", f" of {names.get(id(parameter), of)}", optimizer.state.get(parameter, {}))
        self._keep("batch", place, {"the batch": torch.tensor(list(digest.digest()))})
        if self._step.loss is not None:
            self._keep("loss", place, {"the loss": self._step.loss.local})
        gradients = {name: own.local for name, own in self._step.gradients.items() if own is not None}
        self._keep("gradients", "", gradients)
        self._state = self._coming | self._state
        self._coming = {}

    def _close_step(self) -> None:
        self.recording.states.append(self._state)
        self.recording.copies.append(self._copies())
        self._state = {}
        super()._close_step()

    def _copies(self) -> list[dict[str, Tensor]]:
        """What modules and dicts have under the names of the first model's parameters, with memory of its own."""
        own = {name: _address(parameter) for name, parameter in named_parameters(self._roots[0])}
        copies = []
        for holder in gc.get_objects():
            items: Any = ()
            # isinstance would ask a proxy, which may import a library.
            if issubclass(type(holder), nn.Module):
                items = named_parameters(holder)
            elif type(holder) is dict and len(holder) >= len(own):
                items = list(holder.items())
            copy = {}
            for name, value in items:
                if isinstance(name, str) and isinstance(value, Tensor) and not value.is_meta:
                    copy[canonical_name(name)] = value
            if all(name in copy and _address(copy[name]) != address for name, address in own.items()):
                copies.append({name: local_tensor(copy[name]).local for name in own})
        return copies


def _address(tensor: Tensor) -> int:
    return to_local(tensor).untyped_storage().data_ptr()


def _generators() -> dict[str, Tensor]:
    """The state of each generator of the process."""
    states = {"Python": random.getstate()}
    if "numpy" in sys.modules:
        states["NumPy"] = sys.modules["numpy"].random.get_state()
    as_tensors = {"torch": torch.get_rng_state()}
    for name, state in states.items():
        as_tensors[name] = torch.tensor(list(pickle.dumps(state)))
    return as_tensors
