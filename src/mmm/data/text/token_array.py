"""What a text is: an array of tokens in memory, or a file of them."""

from typing import Protocol

import numpy as np


class TokenArray(Protocol):
    """A NumPy array of integers, or a file of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...
