"""Private names of pipelines, about what stages send each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def batching(batch_p2p: Callable[..., Any]) -> Iterator[None]:
    """Inside, PyTorch's schedules start their sends and receives by calling `batch_p2p`.

    Args:
        batch_p2p: function of a list of operations and a description, which returns their works.

    Private: schedules._batch_p2p, seen in 2.10 to 2.14. No public replacement.
    """
    from torch.distributed.pipelining import schedules

    original = schedules._batch_p2p
    schedules._batch_p2p = batch_p2p
    try:
        yield
    finally:
        schedules._batch_p2p = original


@contextmanager
def known_shapes(received: Callable[[Any, int], Any], vote: Any) -> Iterator[None]:
    """Inside, stages know the shapes of what they receive, and do not send each other shapes.

    Args:
        received: function of a stage and the index of another stage, which returns the `forward_meta` or
            `backward_meta` of what comes from that other stage.
        vote: result of the stages' votes on whether shapes change.

    Private: PipelineStage's methods, seen in 2.12 to 2.14. Public replacement: input_args and output_args of a stage.
    """
    from torch.distributed.pipelining import PipelineStage

    changes = {
        "_recv_meta": received,
        "_send_meta": lambda *_: None,
        "_warmup_forward_vote": lambda *_, **__: vote,
        "_warmup_backward_result": lambda *_, **__: vote,
    }
    originals = {name: getattr(PipelineStage, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(PipelineStage, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(PipelineStage, name, value)


def forward_meta(outputs: Any) -> Any:
    """Make the message in which a stage learns the shapes of the previous stage's outputs.

    Private: pipelining.stage._StageForwardMeta, seen in 2.12 to 2.14. No public replacement.
    """
    from torch.distributed.pipelining import stage

    metas = stage.extract_tensor_metas(outputs)
    assert metas is not None
    return stage._StageForwardMeta(forward_metas=metas)


def backward_meta(own: Any) -> Any:
    """Make the message in which a stage learns the shapes of the gradients of its own outputs.

    Private: pipelining.stage._StageBackwardMeta, _derive_grad_metas, PipelineStage._stage_meta, seen in 2.12 to 2.14.
    No public replacement.
    """
    from torch.distributed.pipelining import stage

    gradients = stage._derive_grad_metas(own._stage_meta.outputs)
    return stage._StageBackwardMeta(backward_metas=gradients)
