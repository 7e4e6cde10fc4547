"""What is verified: a model, a function that makes it parallel, a batch and a step. Each is a user's function."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
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

from mmm_verify.adapter import NO_ADAPTER, Adapter
from mmm_verify.dtypes import parse_dtype
from mmm_verify.errors import ConfigError, LayoutError, describe
from mmm_verify.torch_private import tensors_in, tree_map_only

# Axes whose ranks have different samples: those with one of these names, or with one between underscores (dp_shard).
BATCH_AXES = ("dp", "data", "fsdp", "ddp", "hsdp", "replicate", "shard", "batch")
# Axes whose ranks have the same samples. An axis in neither list gets a note in the verdict.
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
MAX_RANKS = 64


@dataclass(frozen=True)
class Subject:
    """A program to verify.

    Attributes:
        model_fn: () → the model on one device: an ``nn.Module`` on the CPU, with its initial weights.
        parallelize_fn: (model, mesh) → what the ranks run; None if it changes the model in place. What it returns is
            passed to `step_fn`: a module, or a tuple of whatever a step needs with the modules among it. Optimizers in
            the tuple take the steps.
        batch_fn: () → the global batch: a tensor, or a tuple, list or dict of tensors with the samples along dim 0.
        step_fn: (model, batch) → the loss, the mean over the batch. A third parameter receives the mesh, None on one
            device. It may call ``backward`` itself, as a pipeline's schedule does.
        axes: mesh axis → its size, outermost first.
        batch_axes: the axes over whose ranks the batch is split; along all other axes ranks have the same samples.
        local_batch_fn: (batch, mesh) → the batch of a rank. None if it is an equal part of the samples.
        optimizer_fn: parameters → the optimizer of the two steps.
        adapter: where the framework of the program keeps its state.
        dtype: the type that everything is computed in.
        noise: what is added to the model's weights, relative to their spread: zeros would hide a gradient, and ones
            would hide rows that were swapped. 0 for a program that makes the same weights itself.
        keeps_dropout: whether dropout stays on: what it drops is then a function of the batch.
        device: the type of the ranks' devices, one each.
    """

    model_fn: Callable[[], nn.Module]
    parallelize_fn: Callable[[Any, DeviceMesh], Any]
    batch_fn: Callable[[], Any]
    step_fn: Callable[..., Any]
    axes: Mapping[str, int]
    batch_axes: tuple[str, ...]
    local_batch_fn: Callable[[Any, DeviceMesh], Any] | None
    optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    adapter: Adapter = NO_ADAPTER
    dtype: torch.dtype = torch.float64
    noise: float = 0.02
    keeps_dropout: bool = False
    device: str = "cpu"

    @property
    def exact(self) -> bool:
        """Whether everything is computed in float64, in which rounding is far smaller than any mistake."""
        return self.dtype == torch.float64

    @property
    def draws_elsewhere(self) -> bool:
        """Whether ranks draw the weights on another type of device than the model: the last digit may differ then."""
        return self.noise == 0 and self.device != "cpu"

    @cached_property
    def coordinates(self) -> list[dict[str, int]]:
        """By rank, its coordinate on each axis."""
        # The innermost axis varies fastest, as in a DeviceMesh.
        ranges = [range(size) for size in self.axes.values()]
        coordinates = []
        for values in itertools.product(*ranges):
            coordinates.append(dict(zip(self.axes, values, strict=True)))
        return coordinates

    @property
    def n_ranks(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.axes.values())

    @property
    def layout(self) -> str:
        """The mesh as messages show it: ``dp2·tp2``."""
        return "·".join(f"{axis}{size}" for axis, size in self.axes.items())

    @property
    def n_parts(self) -> int:
        """The number of parts that the batch is split into."""
        return math.prod(self.axes[axis] for axis in set(self.batch_axes))

    def part_index(self, rank: int) -> int:
        """Which of the `n_parts` parts of the batch a rank has."""
        # Row-major over the batch axes, in the order in which they are given.
        index = 0
        for axis in self.batch_axes:
            index = index * self.axes[axis] + self.coordinates[rank][axis]
        return index

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that have the coordinates of `rank` on every axis except `axis`; `rank` is one of them."""
        ranks = []
        for other, coordinates in enumerate(self.coordinates):
            own = {**self.coordinates[rank], axis: coordinates[axis]}
            if coordinates == own:
                ranks.append(other)
        return ranks

    def step(self, model: Any, batch: Any, mesh: DeviceMesh | None) -> Any:
        """Call `step_fn`, with the mesh if it has a third parameter without a default."""
        # A third parameter with a default may be something else than a mesh.
        required = 0
        for parameter in inspect.signature(self.step_fn).parameters.values():
            positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if positional and parameter.default is parameter.empty:
                required += 1
        if required > 2:
            return self.step_fn(model, batch, mesh)
        return self.step_fn(model, batch)


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
    adapter: Adapter | None = None,
    dtype: str | torch.dtype = "float64",
) -> Subject:
    """Make a `Subject` from the arguments of `mmm_verify.verify`, with their defaults.

    Raises:
        ConfigError: the mesh cannot be read, it does not have a batch axis that is named, or the type is unknown.
        LayoutError: the mesh has too many ranks.
    """
    axes = parse_axes(mesh)
    if batch_axes is None:
        batch_axes = batch_axes_of(axes)
    for axis in batch_axes:
        if axis not in axes:
            raise ConfigError(f"--batch-axes {axis}: the mesh has {', '.join(axes)}")
    return Subject(
        model_fn,
        parallelize_fn,
        batch_fn,
        step_fn or plain_step,
        axes,
        tuple(batch_axes),
        local_batch_fn,
        optimizer_fn or plain_sgd,
        adapter or NO_ADAPTER,
        parse_dtype(dtype),
    )


def parse_axes(mesh: str | Mapping[str, int]) -> dict[str, int]:
    """``"dp2,tp2"`` → ``{"dp": 2, "tp": 2}``.

    Raises:
        ConfigError: the mesh is not written like this.
        LayoutError: it has more than `MAX_RANKS` ranks.
    """
    if isinstance(mesh, str):
        # Commas, spaces, · and x may stand between axes.
        wrong = ConfigError(f"--mesh {mesh}: write axes with their sizes, the outermost first, such as dp2,tp2")
        pairs = []
        for token in re.findall(r"[^\s,·x]+", mesh):
            match = re.fullmatch(r"([A-Za-z_]+)([0-9]+)", token)
            if match is None:
                raise wrong
            pairs.append((match[1], int(match[2])))
        if not pairs:
            raise wrong
    else:
        pairs = list(mesh.items())
    axes = dict(pairs)
    smallest = min(axes.values(), default=1)
    if len(axes) < len(pairs) or smallest < 1:
        raise ConfigError(f"--mesh {mesh}: name each axis once, with a size of 1 or more")
    n_ranks = math.prod(axes.values())
    if n_ranks > MAX_RANKS:
        raise LayoutError(f"--mesh {mesh} has {n_ranks} ranks: they run on this host's CPU, {MAX_RANKS} at most")
    return axes


def batch_axes_of(axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes whose names say that their ranks have different samples: ``dp``, ``dp_shard``, ``data``, ``fsdp``, …"""
    return tuple(axis for axis in axes if is_named(axis, BATCH_AXES))


def is_named(axis: str, names: Sequence[str]) -> bool:
    """Whether an axis has one of these names, or one of them between underscores."""
    return not set(axis.lower().split("_")).isdisjoint(names)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: plain SGD."""
    # One tensor at a time: plain tensors and DTensors cannot be in one foreach call.
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def plain_step(program: Any, batch: Any) -> Tensor:
    """Compute the loss of a program that has no step function.

    A dict is passed to the model as keywords, and its output's ``loss`` is the loss. For a pair (inputs, targets) it is
    the cross-entropy over the last dim if targets are integers, else the mean squared error. For one tensor it is the
    mean square of the output. Of a tuple, such as a model and its optimizer, the first module is the model.
    """
    model = program
    if isinstance(program, list | tuple):
        model = next(element for element in program if isinstance(element, nn.Module))
    if isinstance(batch, Mapping):
        return model(**batch).loss
    if isinstance(batch, Tensor):
        output = tensors_in(model(batch))[0]
        return output.square().mean()
    inputs, targets = batch
    output = tensors_in(model(inputs))[0]
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    # (..., classes) and (...): every position of every sample is one case.
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def samples_of(batch: Any) -> int:
    """The number of samples in a batch: dim 0 of its first tensor.

    Raises:
        ConfigError: it has no tensor with a dim 0.
    """
    sizes = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim]
    if not sizes or not sizes[0]:
        raise ConfigError(
            f"--batch gives {type(batch).__name__}: it has to give a tensor, or a tuple, list or dict of tensors, with "
            "the samples along dim 0"
        )
    return sizes[0]


def part_range(n_samples: int, index: int, n_parts: int) -> range:
    """The samples in part `index` of a batch that is split into `n_parts`."""
    # Where the samples do not divide, some parts have one more than others.
    start = index * n_samples // n_parts
    end = (index + 1) * n_samples // n_parts
    return range(start, end)


def map_samples(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch with a function of each tensor. One whose dim 0 is not the samples stays as it is."""
    n_samples = samples_of(batch)

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim and tensor.shape[0] == n_samples:
            return function(tensor)
        return tensor

    return tree_map_only(Tensor, change, batch)


def part_of(batch: Any, index: int, n_parts: int) -> Any:
    """Part `index` of a batch that is split into `n_parts`."""
    own = part_range(samples_of(batch), index, n_parts)
    return map_samples(batch, lambda tensor: tensor[own.start : own.stop])


def in_reverse(batch: Any) -> Any:
    """A batch with its samples from last to first."""
    return map_samples(batch, lambda tensor: tensor.flip(0))


def check_parts(subject: Subject, batch: Any) -> None:
    """Raise LayoutError if the samples do not divide over the ranks that split them."""
    n_samples = samples_of(batch)
    if subject.local_batch_fn is None and n_samples % subject.n_parts:
        raise LayoutError(
            f"the batch of {n_samples} samples does not divide over {subject.n_parts} ranks of "
            f"{', '.join(subject.batch_axes)}: change --batch, or the mesh"
        )


def load_object(spec: str, flag: str) -> Any:
    """Load what ``module:name`` names. Modules in the working directory are found too.

    Raises:
        ConfigError: there is no such name, or its module cannot be imported.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{flag} {spec}: write MODULE:NAME, such as mymodel:make_model")
    if module_name.endswith(".py"):
        module_name = module_name[:-3].replace(os.sep, ".")
    # A command that pip has installed does not look for modules in the working directory.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        value = importlib.import_module(module_name)
    # The module is the user's code: it may raise anything.
    except Exception as error:
        raise ConfigError(f"{flag} {spec}: importing {module_name} failed: {describe(error)}") from None
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            raise ConfigError(f"{flag} {spec}: {module_name} has no {name}")
        value = getattr(value, attribute)
    return value


def load_function(spec: str, flag: str) -> Any:
    """Load the function that ``module:name`` names. See `load_object`.

    Raises:
        ConfigError: it cannot be loaded, or is not a function.
    """
    value = load_object(spec, flag)
    kind = type(value).__name__
    # A module is callable, but would be used as the function that makes it.
    if isinstance(value, nn.Module):
        raise ConfigError(f"{flag} {spec}: it is a {kind}, and has to be a function: def make(): return …")
    if not callable(value):
        raise ConfigError(f"{flag} {spec}: it is {kind}, and has to be a function")
    return value
