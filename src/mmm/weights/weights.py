"""A model's weights on disk, read slice by slice, whoever has written them.

::

    checkpoint of this package (`OwnWeights`) ──┐
                                                ├──► Weights.read(name, start, length)
    safetensors + config.json (`HuggingFace`) ──┘

Each rank reads its own shard of each tensor, and an export the tensors of one file: nobody has the full model in
memory. Names, shapes and the order of rows are those of this package's model, whatever is on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.storage import one_line
from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.models.definition import ModelDef
from mmm.nn.lora import LoRA
from mmm.nn.rope import RopeScaling
from mmm.outside import printable, short


class Weights(ABC):
    """A model's weights on disk.

    Attributes:
        path: folder that messages name.
        definition: the model that they belong to.
        sizes: the fields of its sizes; ``rope_scaling`` as a config.json has it.
        entries: shape and dtype of each tensor, by its name in the model. A tied weight is there once, under its first
            name.
        metadata: what is known about the model besides.
        lora: what is next to the model's own matrices, and is read merged with them; None if nothing is.
    """

    path: Path
    definition: ModelDef
    sizes: dict[str, Any]
    entries: dict[str, TensorEntry]
    metadata: ModelMetadata
    lora: LoRA | None = None

    @abstractmethod
    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """Read a slice of a tensor, on the CPU and in the dtype that it has on disk.

        Args:
            start, length: first index and number of elements, per dim.

        Raises:
            CheckpointError: a file cannot be read.
        """

    def read_full(self, name: str) -> Tensor:
        """Read a tensor in full, as `read`."""
        shape = self.entries[name].shape
        return self.read(name, [0] * len(shape), shape)

    def check(self, first: int = 0, every: int = 1) -> str | None:
        """Say what is wrong with the files, if they have checksums; None if nothing is.

        Args:
            first, every: which files are read, so that ranks can share them: `first`, `first + every`, ….
        """
        return None


def config_from(definition: ModelDef, sizes: Mapping[str, Any]) -> Any:
    """Make a model's sizes from their fields; ``rope_scaling`` as a config.json has it.

    Raises:
        ValueError: no model has these sizes, or the scaling is not known.
    """
    fields = dict(sizes)
    scaling = fields.get("rope_scaling")
    if scaling is not None:
        fields["rope_scaling"] = RopeScaling.of(scaling)
    try:
        return definition.config(**fields)
    except TypeError as error:
        raise ValueError(one_line(error)) from None


def config_of(weights: Weights) -> Any:
    """The sizes of a model on disk.

    Raises:
        CheckpointError: they do not go together.
    """
    try:
        config = config_from(weights.definition, weights.sizes)
    except ValueError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    problems = config.problems()
    if problems:
        raise CheckpointError(f"{weights.path}: {problems[0]}")
    return config


def shapes_of(definition: ModelDef, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by name; a tied weight is there once.

    Raises:
        CheckpointError: no model has these sizes.
    """
    fields = dict(sizes)
    # The scaling has no influence on shapes, and may be one that is not known.
    if "rope_scaling" in fields:
        fields["rope_scaling"] = None
    try:
        config = config_from(definition, fields)
        # On the meta device: no memory is allocated.
        model, _ = definition.on_meta(config, 1, 1)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"no model has these sizes: {one_line(error)}") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_entries(
    stored: Mapping[str, TensorEntry],
    definition: ModelDef,
    sizes: Mapping[str, Any],
    where: object,
    stored_name: Callable[[str], str] = str,
) -> dict[str, TensorEntry]:
    """Check that files have the tensors of a model and no others. Returns them by their names in this package.

    Args:
        stored: the tensors in the files, by their names there.
        definition: the model.
        sizes: the fields of its sizes.
        where: the folder, for messages.
        stored_name: what the files call a tensor, given its name in this package.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or is not known.
    """
    n_layers = sizes["n_layers"]
    # Before a model is built: a number in a damaged file may be huge.
    if type(n_layers) is not int or n_layers > len(stored):
        raise CheckpointError(f"{where} has {len(stored)} tensors, which are too few for {short(n_layers)} layers")
    try:
        shapes = shapes_of(definition, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    entries = {}
    for name, shape in shapes.items():
        other_name = stored_name(name)
        entry = stored.get(other_name)
        if entry is None:
            raise CheckpointError(f"{where} lacks the tensor {other_name}{_instead(stored, other_name)}")
        if entry.shape != shape:
            raise CheckpointError(
                f"{where}: {other_name} is {_times(entry.shape)}, and the sizes of the model make it {_times(shape)}"
            )
        if not entry.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {other_name} is of dtype {entry.dtype}, which is not a floating-point one")
        entries[name] = entry
    known = set(map(stored_name, shapes))
    for other_name in stored:
        if other_name not in known:
            raise CheckpointError(
                f"{where} has the unknown tensor {printable(other_name)}: it may change the computation"
            )
    return entries


def _instead(names: Iterable[str], wanted: str) -> str:
    """The end of a message about a missing tensor: the one that has its name with a prefix; empty if there is none."""
    for name in names:
        if name.endswith(f".{wanted}"):
            return (
                f", but {printable(name)}: save the model without the prefix (torch.compile: save model._orig_mod; "
                "peft: save what merge_and_unload() returns), or rename the tensors"
            )
    return ""


def _times(shape: tuple[int, ...]) -> str:
    """A shape for messages, such as ``67×32``."""
    return "×".join(map(str, shape)) or "scalar"


def check_new(folder: Path) -> None:
    """Raise CheckpointError if a folder that is to be made exists."""
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
