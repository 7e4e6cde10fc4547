"""The plain model and its batch, in the type that is verified, and a run of it on one process."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmm_verify.dtypes import dtype_name, in_dtype
from mmm_verify.errors import ConfigError, describe, is_for_user
from mmm_verify.observe import Observed, named_parameters, observe, without_dropout
from mmm_verify.subject import Subject, samples_of
from mmm_verify.torch_private import map_tensors, tree_map_only

SEED = 0
# Copies of the parameters in each process: weights, gradients, and what is recorded of both, for two steps.
COPIES = 6


def seed_all(seed: int) -> None:
    """Seed the generators that a program draws from: PyTorch's, Python's and, if it is imported, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def make_model(subject: Subject, state: Mapping[str, Tensor] | None, dropout: bool, evaluating: bool) -> nn.Module:
    """Make the model in the type that is verified.

    Args:
        subject: whose model function is called.
        state: the weights to give it. None: its own, with a little noise.
        dropout: whether dropout stays on.
        evaluating: whether to put it into evaluation mode.

    Raises:
        ConfigError: the model's function raises, does not return a module with values on the CPU, or the model is too
            large for this host's memory.
    """
    seed_all(SEED)
    try:
        model = subject.model_fn()
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(f"the model's function raises {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model's function returns {type(model).__name__}, and has to return an nn.Module")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.device.type != "cpu" or is_lazy(tensor):
            raise ConfigError(f"{name} is on {tensor.device.type} or has no size yet: the model has to have its values")
    if state is None:
        _check_memory(model, subject)
    map_tensors(model, lambda tensor: in_dtype(tensor, subject.dtype))
    # The function may return one and the same model each time, with the last step's gradients.
    model.zero_grad()
    _set_mode(model, evaluating)
    if not dropout and not subject.keeps_dropout:
        without_dropout(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(SEED)
        # A dict by canonical name: a tied parameter gets its noise once for each name, in the same order on every rank.
        parameters = dict(named_parameters(model))
        for name, parameter in parameters.items():
            if state is not None:
                parameter.copy_(state[name])
            elif parameter.is_floating_point() or parameter.is_complex():
                _add_noise(parameter, generator, subject.noise)
        for name, buffer in model.named_buffers():
            if state is not None and name in state:
                buffer.copy_(state[name])
    return model


def _add_noise(parameter: nn.Parameter, generator: torch.Generator, size: float) -> None:
    """Add noise to a parameter, in place, of this size relative to the parameter's spread."""
    spread = 0.0
    if parameter.numel() > 1:
        spread = parameter.std().item()
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    # A constant parameter, as of a norm, has no spread: its noise is of this size itself.
    parameter.add_(noise * size * (spread or 1.0))


def _set_mode(model: nn.Module, evaluating: bool) -> None:
    """Set evaluation mode, or keep the mode that the model's function has left each module in."""
    if evaluating:
        model.eval()
    elif model.training:
        # A class may freeze modules, such as batch norms, in its own train(): call it, as a training program does.
        # Modules that the model's function has frozen itself stay frozen.
        frozen = [module for module in model.modules() if not module.training]
        model.train()
        for module in frozen:
            module.training = False


def total_memory() -> int:
    """The memory of this host, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(model: nn.Module, subject: Subject) -> None:
    """Raise ConfigError if the ranks' models, each of which is full until it is sharded, need more than all memory.

    Where others use some of it, or a job may take less, the system ends a rank, and the verdict says so.
    """
    elements = sum(parameter.numel() for parameter in model.parameters())
    n_ranks = subject.n_ranks
    # Both in bytes.
    needed = subject.dtype.itemsize * COPIES * n_ranks * elements
    memory = total_memory()
    if needed > memory:
        plural = "s" if n_ranks > 1 else ""
        raise ConfigError(
            f"{elements:,} parameters in {dtype_name(subject.dtype)} take about {needed / 2**30:,.1f} GiB on "
            f"{n_ranks} rank{plural}, each of which begins with the full model, and this host has "
            f"{memory / 2**30:,.1f} GiB: verify it with fewer layers, or narrower"
        )


def make_batch(subject: Subject) -> Any:
    """Make the global batch, with its floats in the type that is verified, and complex numbers as precise.

    Raises:
        ConfigError: the batch's function raises, or returns nothing with samples.
    """
    seed_all(SEED)
    try:
        batch = subject.batch_fn()
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(f"the batch's function raises {describe(error)}") from error
    samples_of(batch)
    return tree_map_only(Tensor, lambda tensor: in_dtype(tensor, subject.dtype), batch)


def observe_plain(
    subject: Subject,
    state: Mapping[str, Tensor],
    batch: Any,
    seed: int,
    evaluating: bool = False,
    step: bool = False,
    dtypes: bool = False,
) -> Observed:
    """Run the plain model on a batch, with dropout off. See `observe`.

    Args:
        seed: seed for the random numbers that the step draws.
    """
    model = make_model(subject, state, dropout=False, evaluating=evaluating)
    seed_all(seed)
    try:
        return observe(subject, model, batch, None, step=step, dtypes=dtypes)
    # The user's code may raise anything.
    except Exception as error:
        if is_for_user(error):
            raise
        raise ConfigError(f"a step on one device raises {failure_of(error)}") from error


def failure_of(error: Exception) -> str:
    """Describe an error of the user's step, with what to change if that is known."""
    message = describe(error)
    # PyTorch's messages about two types that do not fit together.
    is_about_types = any(word in str(error) for word in ("dtype", "Double", "double"))
    if isinstance(error, RuntimeError) and is_about_types:
        message += (
            ". Everything is computed in float64: a .float() in the code gives float32; write .to(x.dtype) to get the "
            "type of x, or verify it with --dtype float32"
        )
    return message
