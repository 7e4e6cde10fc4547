"""``torch.compile`` without the C++ that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def without_code() -> Iterator[None]:
    """Inside, modules are compiled to the operators of forward and backward: half a minute less.
    `tests/mmm/parallel/test_ties.py` compiles all of it."""
    torch._dynamo.reset()
    original = torch.nn.Module.compile
    with patch.object(torch.nn.Module, "compile", lambda self: original(self, backend="aot_eager")):
        yield
