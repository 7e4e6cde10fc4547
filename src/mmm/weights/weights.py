"""A model's weights on disk, whoever has written them, read slice by slice.

::

    checkpoint of this package (`OwnWeights`) ──┐
                                                ├──► Weights.read(name, start, length)
    safetensors + config.json (`HuggingFace`) ──┘

A rank reads its own part of each tensor, an export a tensor at a time: nobody has the full model in memory. Names,
shapes and the order of rows are those of this package's Transformer, whatever is on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.state import one_line
from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.models.gpt.model import GPT, GPTConfig
from mmm.models.llama.model import Transformer, TransformerConfig


class Weights(ABC):
    """
    Attributes:
        path: for messages. sizes: fields of ``TransformerConfig``, ``rope_scaling`` as a config.json has it.
        entries: by names in the model; a tied weight once, under its first name. metadata: what else is known.
    """

    path: Path
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


def shapes_of(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of these sizes, by name; a tied weight once.

    Raises:
        CheckpointError: no model has them.
    """
    try:
        config = GPTConfig(**sizes) if is_gpt(sizes) else TransformerConfig(**{**sizes, "rope_scaling": None})
        with torch.device("meta"):
            model = GPT(config) if isinstance(config, GPTConfig) else Transformer(config)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"no model has these sizes: {one_line(error)}") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def is_gpt(sizes: Mapping[str, Any]) -> bool:
    """Whether sizes are a GPT's: it alone has learned positions."""
    return "block_size" in sizes
