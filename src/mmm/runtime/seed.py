"""Seeds the default generators of a rank: PyTorch's on every device, Python's ``random`` and NumPy's.

Whatever draws from them (``nn.Dropout``, ``torch.randn_like``, the time steps of a diffusion) draws for this rank's
samples. So ranks with different samples draw different numbers, and ranks that share samples (tp, cp) the same ones.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import Any

import numpy as np
import torch

# States of the generators of PyTorch on the CPU, of PyTorch on the device (None on a CPU), of Python and of NumPy.
States = tuple[Any, ...]


def derived_seed(*values: object) -> int:
    """Hash `values` to a seed of 63 bits: equal values give equal seeds, on every machine."""
    text = "/".join(map(str, values))
    digest = hashlib.sha256(text.encode()).digest()
    # 8 bytes are 64 bits; the shift leaves 63, so that the seed is not negative as a signed integer.
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed every default generator, each as ``torch.manual_seed(seed)`` and its like do."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # For each kind of device that is not here, `torch.manual_seed` would store a call with its stack trace, and a
        # step would take 1 ms longer.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # NumPy's generator takes 32 bits, or a list of such.
    low = seed & 0xFFFFFFFF
    high = seed >> 32 & 0xFFFFFFFF
    np.random.seed([low, high] if high else low)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_start(seed: int, coordinate: int) -> None:
    """Seed every default generator for what a program draws before its first step, or without steps."""
    seed_all(derived_seed(seed, "start", coordinate))


def seed_step(seed: int, step: int, coordinate: int) -> None:
    """Seed every default generator for one step.

    A run that is resumed at this step draws what it would have drawn.

    Args:
        seed: the run's seed.
        step: number of the optimizer step.
        coordinate: one number for each dp coordinate and pipeline stage. dp coordinates have different samples, and
            stages different layers, so they need different masks. Ranks that share samples and layers (tp) pass the
            same number.
    """
    seed_all(derived_seed(seed, step, coordinate))


def generator_states(device: torch.device) -> States:
    """Read the states of the default generators, including that of `device`, for `restore_generators`."""
    on_device = None
    if device.type != "cpu":
        on_device = torch.get_device_module(device).get_rng_state()
    return torch.get_rng_state(), on_device, random.getstate(), np.random.get_state()


def restore_generators(device: torch.device, states: States) -> None:
    """Set the default generators to the states that `generator_states` has read."""
    on_cpu, on_device, python, numpy = states
    torch.set_rng_state(on_cpu)
    if on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device)
    random.setstate(python)
    np.random.set_state(numpy)
