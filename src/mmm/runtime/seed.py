"""The default generators of a rank: PyTorch's, on every device, Python's ``random`` and NumPy's.

What draws from them (``nn.Dropout``, ``torch.randn_like``, the time steps of a diffusion) draws for this rank's
samples. So ranks with different samples draw different numbers, and ranks that share samples (tp, cp) the same ones.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import Any

import numpy as np
import torch

States = tuple[Any, ...]


def derived_seed(*parts: object) -> int:
    """63 bits, a function of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed every default generator, each as a program does by ``torch.manual_seed(seed)`` and the like."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # it would keep a call, with a stack trace, for each kind of device, and a step takes 1 ms longer
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]  # NumPy's own takes 32 bits, or several of them
    np.random.seed(words if words[1] else words[0])


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_start(seed: int, coordinate: int) -> None:
    """Set every default generator for what a program draws before its first step, and without steps."""
    seed_all(derived_seed(seed, "start", coordinate))


def seed_step(seed: int, step: int, coordinate: int) -> None:
    """Seed every default generator for one step.

    Coordinates of dp have different samples and so different masks; stages of a pipeline have other layers: each has a
    number of its own. Ranks that share samples and layers (tp) have the same. A run that is resumed at a step draws
    what it would have drawn.
    """
    seed_all(derived_seed(seed, step, coordinate))


def generator_states(device: torch.device) -> States:
    """Of the default generators, those of `device` included, for `restore_generators`."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return torch.get_rng_state(), own, random.getstate(), np.random.get_state()


def restore_generators(device: torch.device, states: States) -> None:
    host, own, python, numpy = states
    torch.set_rng_state(host)
    if own is not None:
        torch.get_device_module(device).set_rng_state(own)
    random.setstate(python)
    np.random.set_state(numpy)
