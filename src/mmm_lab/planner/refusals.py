"""What a program may not do in a dry run, because it needs other ranks, or the values of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from mmm.errors import ConfigError
from mmm.torch_private.dry_run import module_apply
from mmm.torch_private.replace import replaced
from mmm_lab.planner.tracker import MemoryTracker


def no_other_group() -> AbstractContextManager[None]:
    """Inside, a program that makes its own process group is refused: it would wait for ranks that are not there."""
    init = dist.init_process_group

    def only_fake(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend != "fake":
            raise ConfigError(
                "dry run: the program makes its own process group, by torch.distributed.init_process_group: only a "
                "program that starts its run by `start_run` can be tried"
            )
        init(backend, *args, **kwargs)

    return replaced(dist, init_process_group=only_fake)


def one_model(memory: MemoryTracker) -> Callable[..., torch.nn.Module]:
    """A replacement for ``nn.Module._apply``, which moves a module's tensors.

    It refuses a second model, which is one on the meta device when there has been a backward pass, or when operators
    have seen its parameters without elements: then PyTorch cannot give them memory.
    """
    owner, name = module_apply()
    apply = getattr(owner, name)
    refusal = ConfigError("dry run: this program trains several models in one run: try only one of them")

    def checked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        on_meta = memory.counts() and any(parameter.is_meta for parameter in module.parameters())
        if on_meta and any(change.doing == "backward" for change in memory.changes):
            raise refusal
        try:
            return apply(module, *args, **kwargs)
        except RuntimeError as error:
            raise refusal if on_meta else error from None

    return checked


def no_checkpoint(*_: Any, **__: Any) -> None:
    """A replacement for `torch.distributed.checkpoint.save`."""
    raise ConfigError(
        "dry run: the program saves a checkpoint by torch.distributed.checkpoint, and its tensors have no elements: "
        "leave that out"
    )


def no_pipeline_by_hand(*_: Any, **__: Any) -> None:
    """A replacement for ``PipelineStage.__init__`` in a run that knows of no pipeline."""
    raise ConfigError(
        "dry run: the program makes a PipelineStage by hand, which learns the shapes of its inputs from other ranks: "
        "try it without its pipeline, or with `--pp` of a trainer"
    )
