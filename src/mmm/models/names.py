"""A model in Hugging Face's files: the names of its tensors, the order of its heads' rows, and its config.json.

Rotary positions rotate pairs of a head's elements. In this package, as in Meta's files, element 2i goes with 2i + 1. In
Hugging Face's files element i goes with i + head_dim / 2. So the rows that make queries and keys have another order
there. With head_dim 8::

    row here             0 1 2 3 4 5 6 7
    row in their file    0 4 1 5 2 6 3 7

An expert's matrices are tensors of their own there, and stacked here: experts.0, experts.1, … A # stands for the
number of the expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HuggingFaceNames:
    """How a model is written in the files of Hugging Face.

    Attributes:
        model_types: the values of ``model_type`` in a config.json that this model can be read from.
        tensors: a tensor's name in this package → its name in their files. A * stands for a layer's number.
        prefix: what all names but that of the output begin with there, if some files leave it out.
        rotated: ends of the names, in this package, of the tensors whose rows have another order in their files.
        fused: ends of the names, in this package, of the tensors that make queries, keys and values: their rows are by
            head here, and in their files all queries, then all keys, then all values.
        transposed: ends of the names, in their files, of the matrices that they keep as (in, out).
        longest: the key of a config.json with the length of the longest sequence.
        defaults: by model_type, the values of keys that a config.json may lack, where they are not those of `read`:
            the defaults of the class in `transformers`.
        read: (config.json, its file for error messages) → the fields of the model's sizes, with ``rope_scaling``, if
            it has that, as a config.json has it. Raises CheckpointError.
        write: sizes → the keys of a config.json, ``model_type`` among them. Raises CheckpointError.
    """

    model_types: tuple[str, ...]
    tensors: Mapping[str, str]
    defaults: Mapping[str, Mapping[str, Any]]
    read: Callable[[Mapping[str, Any], object], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    rotated: tuple[str, ...] = ()
    prefix: str = ""
    fused: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    longest: str = "max_position_embeddings"

    def there(self, name: str) -> str:
        """The name of a tensor in Hugging Face's files, given its name in this package."""
        # layers.3.attention.wq.weight → layers.*.attention.wq.weight, and the number back into their name.
        layer = re.search(r"\.(\d+)\.", name)
        if layer is None:
            return self.tensors[name]
        pattern = name.replace(layer[0], ".*.", 1)
        return self.tensors[pattern].replace("*", layer[1])

    def word(self, pattern: str) -> str:
        """What Hugging Face calls a matrix, such as ``q_proj``, given its name in this package's plans."""
        *_, word, _ = self.tensors[f"{pattern}.weight"].split(".")
        return word

    def is_rotated(self, name: str) -> bool:
        """Whether the rows of a tensor's heads have another order in Hugging Face's files."""
        return name.endswith(self.rotated)
