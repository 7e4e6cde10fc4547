"""Second derivatives (forces, a penalty on gradients): refused by name where they would be wrong, or fail elsewhere."""

from __future__ import annotations

import torch

from mmm.errors import ConfigError


def refuse_create_graph(through: str, advice: str) -> None:
    """Refuse a second derivative. Call this in a backward.

    Args:
        through: what cannot be differentiated twice.
        advice: why, and what to do.

    Raises:
        ConfigError: the backward makes a graph, by ``create_graph=True``.
    """
    # Only such a backward runs with gradients enabled.
    if torch.is_grad_enabled():
        raise ConfigError(f"create_graph=True through {through}: {advice}")
