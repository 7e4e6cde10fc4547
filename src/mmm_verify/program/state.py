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

# One of `KINDS`, and a name.
Key = tuple[str, str]
# What a rank has at a step.
State = dict[Key, Tensor]
# Tensors that are called like the parameters, such as averages.
Copy = dict[str, Tensor]


@dataclass
class States(Recording):
    """A recording, with all that each step began with and computed.

    Attributes:
        states: by step, what this rank has.
        copies: by step, each set of tensors that are called like the parameters.
    """

    states: list[State] = field(default_factory=list)
    copies: list[list[Copy]] = field(default_factory=list)


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
        self._coming: State = {}
        self._state: State = {}

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
                if not isinstance(scalar, int | float | Tensor):
                    continue
                marks = "'" * index
                local = local_tensor(scalar).local
                self._coming.setdefault((kind, f"{key}{of}{marks}"), local)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        super()._before_forward(module, args)
        # Where the script calls one of its models in training.
        if self._forward_depth != 1 or self._generator_state is None:
            return
        first_step = self._step
        if self.recording.steps:
            first_step = self.recording.steps[0]
        tensors, _ = tensors_of(self._modules())
        for name, tensor in tensors.items():
            kind = "weights" if name in first_step.parameters else "buffers"
            self._keep(kind, "", {name: tensor.local})
        self._keep("random numbers", "'s generator", _generators())

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        contents = []
        for tensor in self._inputs:
            local = to_local(tensor.detach())
            contents.append(bytes_of(local.cpu()))
        # This may close the last step.
        super()._keep_gradients(optimizer)
        names = {}
        for module in self._modules():
            for name, parameter in named_parameters(module):
                names[id(parameter)] = name
        # A step may have several optimizers.
        place = "'" * (len(self._stepped) - 1)
        for index, group in enumerate(optimizer.param_groups):
            of = f" of group {index}{place}"
            self._keep("rates", of, group)
            for parameter in group["params"]:
                name = names.get(id(parameter), of)
                # Optimizers make this when they first step.
                moments = optimizer.state.get(parameter, {})
                self._keep("moments", f" of {name}", moments)
        content = _digest(*contents)
        self._keep("batch", place, {"the batch": content})
        loss = self._step.loss
        if loss is not None:
            self._keep("loss", place, {"the loss": loss.local})
        for name, gradient in self._step.gradients.items():
            if gradient is not None:
                self._keep("gradients", "", {name: gradient.local})
        self._state = self._coming | self._state
        self._coming = {}

    def _close_step(self) -> None:
        self.recording.states.append(self._state)
        self.recording.copies.append(self._copies())
        self._state = {}
        super()._close_step()

    def _copies(self) -> list[Copy]:
        """What modules and dicts have under the names of the first model's parameters, with memory of its own."""
        own = dict(named_parameters(self._roots[0]))
        copies = []
        for holder in gc.get_objects():
            items: Any = ()
            # isinstance would ask a proxy, which may import a library.
            kind = type(holder)
            if issubclass(kind, nn.Module):
                items = named_parameters(holder)
            elif kind is dict and len(holder) >= len(own):
                items = list(holder.items())
            copy: Copy = {}
            for key, value in items:
                parameter = own.get(canonical_name(key)) if isinstance(key, str) else None
                if parameter is None or not isinstance(value, Tensor):
                    continue
                if not value.is_meta and _address(value) != _address(parameter):
                    copy[canonical_name(key)] = value
            if len(copy) < len(own):
                continue
            for name, value in copy.items():
                copy[name] = local_tensor(value).local
            copies.append(copy)
        return copies


def _address(tensor: Tensor) -> int:
    local = to_local(tensor)
    return local.untyped_storage().data_ptr()


def _digest(*contents: bytes) -> Tensor:
    """A hash of some bytes, as a tensor."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return torch.tensor(list(digest.digest()))


def _generators() -> dict[str, Tensor]:
    """A hash of the state of each generator of the process."""
    state = torch.get_rng_state()
    hashes = {"torch": _digest(bytes_of(state))}
    python_state = pickle.dumps(random.getstate())
    hashes["Python"] = _digest(python_state)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = pickle.dumps(numpy.random.get_state())
        hashes["NumPy"] = _digest(numpy_state)
    return hashes
