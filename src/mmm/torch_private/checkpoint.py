"""Private names of DCP, PyTorch's distributed checkpoints."""

from __future__ import annotations

from typing import Any

import torch


def pickled_names() -> dict[tuple[str, str], Any]:
    """Return the private classes and functions that the pickle ``.metadata`` names: (module, name) → object.

    Private: metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.serialization._get_layout, seen in 2.10 to
    2.14. No public replacement: existing files have these names.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    return {
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # type: ignore[attr-defined]
    }
