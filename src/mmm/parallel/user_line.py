"""Which line of a user's program is running."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent)


def user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost line of a module's method that is not PyTorch's own, as `` (file:line: code)``. Empty if there is
    none.

    Args:
        frames: frames with their lines, from the outermost on, as of ``traceback.walk_tb``.
    """
    location = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        in_module = isinstance(frame.f_locals.get("self"), nn.Module)
        if in_module and not file.startswith(TORCH):
            code = linecache.getline(file, line).strip()
            location = f" ({file}:{line}: {code})"
    return location
