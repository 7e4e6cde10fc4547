"""What a program may not do in a dry run, because it needs other ranks, or the values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mmm.errors import ConfigError
from mmm.torch_private.dry_run import module_apply
from mmm_lab.planner.tracker import MemoryTracker


@contextmanager
def no_other_group() -> Iterator[None]:
    """Refuse a program that makes its own process group: it would wait for ranks that are not there."""
    init = dist.init_process_group

    def only_fake(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend != "fake":
            raise ConfigError(
                "dry run: the program makes its own process group, by torch.distributed.init_process_group: only a "
                "program that starts its run by `start_run` can be tried"
            )
        init(backend, *args, **kwargs)

    dist.init_process_group = only_fake
    try:
        yield
    finally:
        dist.init_process_group = init


def one_model(memory: MemoryTracker) -> Callable[..., torch.nn.Module]:
    """A replacement for ``nn.Module._apply``, which moves a module's tensors.

    It refuses a second model, which is one that is on the meta device when steps have been made.
    """
    owner, name = module_apply()
    apply = getattr(owner, name)

    def checked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        another = memory.phase() != "start" and any(parameter.is_meta for parameter in module.parameters())
        if another and memory.counts():
            raise ConfigError(
                "dry run: this program trains several models in one run, one after another; try only one of them"
            )
        return apply(module, *args, **kwargs)

    return checked


def no_checkpoint(*_: Any, **__: Any) -> None:
    """A replacement for `torch.distributed.checkpoint.save`."""
    raise ConfigError(
        "dry run: the program saves a checkpoint by torch.distributed.checkpoint, and its tensors have no elements: "
        "leave that out"
    )
