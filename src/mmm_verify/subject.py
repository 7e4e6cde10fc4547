"""What is verified: a model, what makes it parallel, a batch and a step. Each is a function of the user's."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_verify.errors import ConfigError, LayoutError
from mmm_verify.torch_private import tree_leaves, tree_map_only

BATCH_AXES = ("dp", "data", "fsdp", "ddp", "hsdp", "replicate", "shard", "batch")  # an axis of these, or one_of_these
SAME_SAMPLES = (
    "tp",
    "cp",
    "sp",
    "pp",
    "ep",
    "mp",
    "tensor",
    "model",
    "context",
    "sequence",
    "seq",
    "pipeline",
    "expert",
)
MOST_RANKS = 64


@dataclass(frozen=True)
class Subject:
    """A program to verify.

    Attributes:
        model_fn: () → the model on one device: an ``nn.Module`` on the CPU, with its initial weights.
        parallelize_fn: (model, mesh) → what the ranks run; None where it changes the model in place. What it returns is
            what `step_fn` gets: a module, or a tuple of whatever a step needs with the modules among it.
        batch_fn: () → the global batch: a tensor, or a tuple, list or dict of tensors with the samples along dim 0.
        step_fn: (model, batch) → the loss, the mean over the batch. A third parameter gets the mesh, None on one
            device. It may call ``backward`` itself, as a pipeline's schedule does.
        axes: mesh axis → its size, outermost first.
        batch_axes: the axes over whose ranks the batch is split; the ranks of all others get the same samples.
        local_batch_fn: (batch, mesh) → the batch of a rank, where it is not an equal part of the samples.
        optimizer_fn: parameters → the optimizer of the one step that is taken.
    """

    model_fn: Callable[[], nn.Module]
    parallelize_fn: Callable[[Any, DeviceMesh], Any]
    batch_fn: Callable[[], Any]
    step_fn: Callable[..., Any]
    axes: Mapping[str, int]
    batch_axes: tuple[str, ...]
    local_batch_fn: Callable[[Any, DeviceMesh], Any] | None
    optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    @cached_property
    def places(self) -> list[dict[str, int]]:
        """By rank, its coordinate on each axis."""
        sizes = [range(size) for size in self.axes.values()]
        return [dict(zip(self.axes, place, strict=True)) for place in itertools.product(*sizes)]

    @property
    def layout(self) -> str:
        return "·".join(f"{axis}{size}" for axis, size in self.axes.items())

    @property
    def parts(self) -> int:
        """Into how many parts the batch is split."""
        return len({self.batch_part(rank) for rank in range(len(self.places))})

    def batch_part(self, rank: int) -> int:
        """Which part of the batch a rank has."""
        part = 0
        for axis in self.batch_axes:
            part = part * self.axes[axis] + self.places[rank][axis]
        return part

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` in their coordinate on `axis` alone, itself among them."""
        rest = {**self.places[rank], axis: None}
        return [other for other, place in enumerate(self.places) if {**place, axis: None} == rest]

    def step(self, model: Any, batch: Any, mesh: DeviceMesh | None) -> Any:
        """`step_fn`, which may or may not want the mesh."""
        wanted = [
            parameter
            for parameter in inspect.signature(self.step_fn).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        ]
        return self.step_fn(model, batch, mesh) if len(wanted) > 2 else self.step_fn(model, batch)


def make_subject(
    model_fn: Callable[[], nn.Module],
    parallelize_fn: Callable[[Any, DeviceMesh], Any],
    batch_fn: Callable[[], Any],
    step_fn: Callable[..., Any] | None,
    mesh: str | Mapping[str, int],
    *,
    batch_axes: Sequence[str] | None = None,
    local_batch_fn: Callable[[Any, DeviceMesh], Any] | None = None,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Subject:
    """A `Subject` with the defaults of `mmm_verify.verify`, whose arguments these are.

    Raises:
        ConfigError: the mesh is not written as one, or a batch axis is none of its. LayoutError: it is too large.
    """
    axes = parse_axes(mesh)
    chosen = batch_axes_of(axes) if batch_axes is None else tuple(batch_axes)
    for axis in chosen:
        if axis not in axes:
            raise ConfigError(f"--batch_axes {axis}: the mesh has {', '.join(axes)}")
    return Subject(
        model_fn,
        parallelize_fn,
        batch_fn,
        step_fn or plain_step,
        axes,
        chosen,
        local_batch_fn,
        optimizer_fn or plain_sgd,
    )


def parse_axes(mesh: str | Mapping[str, int]) -> dict[str, int]:
    """``"dp2,tp2"`` → ``{"dp": 2, "tp": 2}``.

    Raises:
        ConfigError: it is not written so. LayoutError: it has more than `MOST_RANKS` ranks.
    """
    if isinstance(mesh, str):
        words = re.findall(r"[^\s,·x]+", mesh.replace(" ", ","))
        found = [re.fullmatch(r"([A-Za-z_]+)([0-9]+)", word) for word in words]
        if not found or not all(found):
            raise ConfigError(f"--mesh {mesh}: write axes with their sizes, the outermost first, such as dp2,tp2")
        pairs = [(match[1], int(match[2])) for match in found if match is not None]
    else:
        pairs = list(mesh.items())
    axes = dict(pairs)
    if len(axes) < len(pairs) or any(size < 1 for size in axes.values()):
        raise ConfigError(f"--mesh {mesh}: each axis is named once, with a size from 1")
    ranks = 1
    for size in axes.values():
        ranks *= size
    if ranks > MOST_RANKS:
        raise LayoutError(f"--mesh {mesh} has {ranks} ranks: they run on this host's CPU, {MOST_RANKS} at most")
    return axes


def batch_axes_of(axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes whose names say that their ranks have different samples: ``dp``, ``dp_shard``, ``data``, ``fsdp``, …"""
    return tuple(axis for axis in axes if set(axis.lower().split("_")) & set(BATCH_AXES))


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One tensor at a time: a model may have plain tensors beside DTensors."""
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def plain_step(model: nn.Module, batch: Any) -> Tensor:
    """The step of a program that has none of its own.

    A dict goes to the model as keywords, and the output's ``loss`` is the loss. Of a pair (inputs, targets) it is the
    cross-entropy over the last dim where targets are integers, else the mean squared error. Of one tensor it is the
    mean square of the output.
    """
    if isinstance(batch, Mapping):
        return model(**batch).loss
    if isinstance(batch, Tensor):
        return _first_tensor(model(batch)).square().mean()
    inputs, targets = batch
    output = _first_tensor(model(inputs))
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _first_tensor(output: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def samples_of(batch: Any) -> int:
    """The samples of a batch: dim 0 of its first tensor.

    Raises:
        ConfigError: it has no tensor with a dim 0.
    """
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes or not sizes[0]:
        raise ConfigError(
            f"--batch gives {type(batch).__name__}: it has to give a tensor, or a tuple, list or dict of tensors, with "
            "the samples along dim 0"
        )
    return sizes[0]


def part_of(batch: Any, part: int, parts: int) -> Any:
    """A part of the samples of a batch; tensors with another dim 0 are left as they are."""
    samples = samples_of(batch)
    own = slice(part * samples // parts, (part + 1) * samples // parts)

    def take(tensor: Tensor) -> Tensor:
        return tensor[own] if tensor.ndim and tensor.shape[0] == samples else tensor

    return tree_map_only(Tensor, take, batch)


def in_reverse(batch: Any) -> Any:
    """The samples of a batch from the last to the first; tensors with another dim 0 are left as they are."""
    samples = samples_of(batch)

    def turn(tensor: Tensor) -> Tensor:
        return tensor.flip(0) if tensor.ndim and tensor.shape[0] == samples else tensor

    return tree_map_only(Tensor, turn, batch)


def check_parts(subject: Subject, batch: Any) -> None:
    """Raises LayoutError where the samples do not divide over the ranks that split them."""
    samples = samples_of(batch)
    if subject.local_batch_fn is None and samples % subject.parts:
        raise LayoutError(
            f"the batch of {samples} samples does not divide over {subject.parts} ranks of "
            f"{', '.join(subject.batch_axes)}: change --batch, or the mesh"
        )


def load_function(spec: str, flag: str) -> Any:
    """What ``module:name`` names; modules are looked for in the working directory too.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    where, colon, name = spec.partition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{flag} {spec}: write MODULE:NAME, such as mymodel:make_model")
    if where.endswith(".py"):
        where = where[:-3].replace(os.sep, ".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(where)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{flag} {spec}: importing {where} failed: {type(error).__name__}: {error}") from None
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{flag} {spec}: {where} has no {name}")
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        raise ConfigError(
            f"{flag} {spec}: it is a {type(value).__name__}, and has to be a function: def make(): return …"
        )
    if not callable(value):
        raise ConfigError(f"{flag} {spec}: it is {type(value).__name__}, and has to be a function")
    return value
