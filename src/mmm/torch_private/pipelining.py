"""Private names of pipelines: what stages send each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def batching(batch_p2p: Callable[..., Any]) -> Iterator[None]:
    """Inside, PyTorch's schedules issue sends and receives by `batch_p2p`: (operations, text) → works.

    Private: schedules._batch_p2p, seen in 2.10 to 2.14; instead: nothing."""
    from torch.distributed.pipelining import schedules

    plain = schedules._batch_p2p
    schedules._batch_p2p = batch_p2p
    try:
        yield
    finally:
        schedules._batch_p2p = plain


@contextmanager
def known_shapes(received: Callable[[Any, int], Any], vote: Any) -> Iterator[None]:
    """Inside, stages do not tell each other the shapes of what they send.

    Args:
        received: (a stage, the number of another) → `forward_meta` or `backward_meta` of what comes from that one.
        vote: what the votes on whether shapes change are.

    Private: PipelineStage's methods, seen in 2.12 to 2.14; instead: input_args and output_args of a stage."""
    from torch.distributed.pipelining import PipelineStage

    changes = {
        "_recv_meta": received,
        "_send_meta": lambda *_: None,
        "_warmup_forward_vote": lambda *_, **__: vote,
        "_warmup_backward_result": lambda *_, **__: vote,
    }
    before = {name: getattr(PipelineStage, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(PipelineStage, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(PipelineStage, name, value)


def forward_meta(outputs: Any) -> Any:
    """What a stage is told of the outputs of the one before.

    Private: pipelining.stage._StageForwardMeta, seen in 2.12 to 2.14; instead: nothing."""
    from torch.distributed.pipelining import stage

    metas = stage.extract_tensor_metas(outputs)
    assert metas is not None
    return stage._StageForwardMeta(forward_metas=metas)


def backward_meta(own: Any) -> Any:
    """What a stage is told of the gradients of its own outputs.

    Private: pipelining.stage._StageBackwardMeta, _derive_grad_metas, PipelineStage._stage_meta, seen in 2.12 to 2.14;
    instead: nothing."""
    from torch.distributed.pipelining import stage

    return stage._StageBackwardMeta(backward_metas=stage._derive_grad_metas(own._stage_meta.outputs))
