"""Private names of DCP, PyTorch's distributed checkpoints."""

from __future__ import annotations

from typing import Any

import torch


def storage_info(name: str, offset: int, length: int) -> Any:
    """Where DCP's file writer has put something: file, first byte and bytes.

    Private: checkpoint.filesystem._StorageInfo, seen in 2.10 to 2.14; instead: nothing."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def pickled_names() -> dict[tuple[str, str], Any]:
    """What the pickle ``.metadata`` names besides DCP's public classes, by module and name.

    Private: metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.serialization._get_layout, seen in 2.10 to
    2.14; instead: nothing, files that are there have these names."""
    from torch.distributed.checkpoint import filesystem, metadata

    return {
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # type: ignore[attr-defined]
    }
