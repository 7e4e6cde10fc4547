"""What a dry run refuses of a program while it runs: what has no meaning without other ranks and without values."""

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
    """Inside, the program makes no process group itself: it would wait for ranks that are not there."""
    init = dist.init_process_group

    def only_fake(backend: str | None = None, *given: Any, **named: Any) -> None:
        if backend != "fake":
            raise ConfigError(
                "dry run: the program makes its process group itself, by torch.distributed.init_process_group: only a "
                "program that starts its run by `start_run` can be tried"
            )
        init(backend, *given, **named)

    dist.init_process_group = only_fake
    try:
        yield
    finally:
        dist.init_process_group = init


def one_model(memory: MemoryTracker) -> Callable[..., torch.nn.Module]:
    """In place of what moves a module's tensors: it refuses another model on the meta device after steps."""
    owner, name = module_apply()
    apply = getattr(owner, name)

    def checked(module: torch.nn.Module, *given: Any, **named: Any) -> torch.nn.Module:
        another = memory.phase() != "start" and any(parameter.is_meta for parameter in module.parameters())
        if another and memory.counts():
            raise ConfigError(
                "dry run: this program trains several models, one after the other, in one run; try one of them alone"
            )
        return apply(module, *given, **named)

    return checked


def no_checkpoint(*_: Any, **__: Any) -> None:
    """In place of `torch.distributed.checkpoint.save`."""
    raise ConfigError(
        "dry run: the program saves a checkpoint by torch.distributed.checkpoint, and its tensors have no elements: "
        "leave that out"
    )
