"""Random numbers while training, dropout's: a function of (seed, step, coordinate)."""

from __future__ import annotations

import hashlib

import torch


def seed_step(seed: int, step: int, coordinate: int) -> None:
    """Set every default generator for one step.

    Coordinates of dp have different samples and so different masks; stages of a pipeline have other layers: each has a
    number of its own. Ranks that share samples and layers (tp) have the same. A run that is resumed at a step draws
    what it would have drawn.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{coordinate}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
