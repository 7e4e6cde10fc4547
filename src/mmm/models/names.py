"""What a model is called elsewhere: the names of its tensors, the order of its heads' rows, and its config.json.

Rotary positions rotate pairs of a head's elements. In this package, as in Meta's files, element 2i goes
with 2i + 1; in Hugging Face's, element i goes with i + head_dim / 2. So the rows that make queries and keys have
another order there (head_dim 8)::

    here    0 1 2 3 4 5 6 7
    there   0 4 1 5 2 6 3 7     row of the same head that it is there
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HuggingFaceNames:
    """A model in the files of Hugging Face.

    Attributes:
        model_types: the ``model_type`` of a config.json that this model is read from.
        tensors: name here → name there; * stands for a layer's number.
        rotated: ends of the names here of tensors whose rows are those of heads, in another order there.
        read: (config.json, its file, for messages) → fields of the sizes, ``rope_scaling`` as a config.json has it, and
            the keys that are passed over; raises CheckpointError.
        write: sizes → keys of a config.json, its ``model_type`` among them; raises CheckpointError.
    """

    model_types: tuple[str, ...]
    tensors: Mapping[str, str]
    rotated: tuple[str, ...]
    read: Callable[[Mapping[str, Any], object], tuple[dict[str, Any], list[str]]]
    write: Callable[[Any], dict[str, Any]]

    def there(self, name: str) -> str:
        """What Hugging Face's files call a tensor, by its name in this package."""
        layer = re.search(r"\.(\d+)\.", name)
        if layer is None:
            return self.tensors[name]
        return self.tensors[name.replace(layer[0], ".*.", 1)].replace("*", layer[1])

    def is_rotated(self, name: str) -> bool:
        """Whether a tensor's rows have another order in Hugging Face's files."""
        return name.endswith(self.rotated)
