"""A model's weights on disk, whoever has written them, read slice by slice.

::

    checkpoint of this package (`OwnWeights`) ──┐
                                                ├──► Weights.read(name, start, length)
    safetensors + config.json (`HuggingFace`) ──┘

A rank reads its own part of each tensor, an export a tensor at a time: nobody has the full model in memory. Names,
shapes and the order of rows are those of this package's model, whatever is on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.storage import one_line
from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.models.definition import ModelDef
from mmm.nn.rope import RopeScaling


class Weights(ABC):
    """
    Attributes:
        path: for messages. definition: of the model. sizes: fields of its sizes, ``rope_scaling`` as a config.json has
            it.
        entries: by names in the model; a tied weight once, under its first name. metadata: what else is known.
    """

    path: Path
    definition: ModelDef
    sizes: dict[str, Any]
    entries: dict[str, TensorEntry]
    metadata: ModelMetadata

    @abstractmethod
    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """A slice of a tensor, in the dtype that it has on disk, on the CPU.

        Args:
            start, length: first index and number of elements, per dim.

        Raises:
            CheckpointError: a file cannot be read.
        """

    def check(self, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with the files, where they have checksums; of every `parts`-th of them, from `part` on."""
        return None


def config_from(definition: ModelDef, sizes: Mapping[str, Any]) -> Any:
    """A model's sizes from their fields, ``rope_scaling`` as a config.json has it. Raises ValueError: they are of no
    model, or a scaling that is not known."""
    fields = dict(sizes)
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = RopeScaling.of(fields["rope_scaling"])
    try:
        return definition.config(**fields)
    except TypeError as error:
        raise ValueError(one_line(error)) from None


def shapes_of(definition: ModelDef, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of these sizes, by name; a tied weight once.

    Raises:
        CheckpointError: no model has them.
    """
    try:
        config = config_from(definition, {**sizes, "rope_scaling": None} if "rope_scaling" in sizes else sizes)
        model, _ = definition.on_meta(config, 1, 1)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"no model has these sizes: {one_line(error)}") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
