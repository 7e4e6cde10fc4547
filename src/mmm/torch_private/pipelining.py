"""Private names of pipelines, about what stages send each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from mmm.torch_private.operators import tree_map_only
from mmm.torch_private.replace import replaced


def without_outputs() -> dict[str, bool]:
    """Return the arguments by which a schedule does not join the outputs of its micro-batches.

    Public from 2.10 on; a schedule before always joins them.
    """
    from torch.distributed.pipelining import schedules

    if "return_outputs" in inspect.signature(schedules.PipelineScheduleSingle.step).parameters:
        return {"return_outputs": False}
    return {}


def split_samples(schedule: Any, arguments: Mapping[str, Any]) -> None:
    """Have a schedule split every tensor in the arguments of a step along its first dim.

    Up to 2.9 a schedule by itself splits an argument that is a tensor, and none in a tuple.

    Private: _PipelineSchedule._kwargs_chunk_spec, seen in 2.8 to 2.15. Public replacement: an argument of a schedule's
    class, for arguments that are known by then.
    """
    by_samples = TensorChunkSpec(0)
    schedule._kwargs_chunk_spec = tree_map_only(Tensor, lambda _: by_samples, dict(arguments)) or None


def evaluate(schedule: Any, stages: Iterable[Any], *args: Any, **kwargs: Any) -> None:
    """Run the forwards of a schedule, and its losses.

    Args:
        stages: those of the schedule on this rank. Their methods for a backward do nothing without `has_backward`.

    Private: _stage_initialized and _stages_initialized, seen in 2.8. Public replacement: ``eval``, from 2.9 on, which
    is used if this PyTorch has it.
    """
    if hasattr(schedule, "eval"):
        schedule.eval(*args, **kwargs)
        return
    for stage in stages:
        stage.has_backward = False
    try:
        schedule.step(*args, **kwargs)
    finally:
        for stage in stages:
            stage.has_backward = True
        # What is received without a backward has no gradient: the next step receives it anew.
        schedule._stage_initialized = False
        schedule._stages_initialized = False


def actions_of(schedule: Any, rank: int) -> list[tuple[int, str, int]]:
    """Return what a rank does in a step, in order: stage, kind (such as F or B), micro-batch.

    An overlapped forward and backward is two actions, in the order in which PyTorch runs them.

    Private: PipelineScheduleMulti.pipeline_order_with_comms, seen in 2.8 to 2.15, and _Action, seen in 2.8 to 2.15. No
    public replacement.
    """
    # Up to 2.9 several schedules only have a list without messages, with None where a rank waits.
    lists_by_rank = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    actions = []
    for action in lists_by_rank[rank]:
        if action is None:
            continue
        for single in getattr(action, "sub_actions", None) or (action,):
            # Up to 2.10 the value of a type is a number, and its text the letters.
            kind = single.computation_type.value
            if isinstance(kind, int):
                kind = str(single.computation_type)
            actions.append((single.stage_index, kind, single.microbatch_index))
    return actions


def batching(batch_p2p: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, PyTorch's schedules start their sends and receives by calling `batch_p2p`.

    Args:
        batch_p2p: function of a list of operations and a description, which returns their works.

    Private: schedules._batch_p2p, seen in 2.10 to 2.14. No public replacement.
    """
    from torch.distributed.pipelining import schedules

    return replaced(schedules, _batch_p2p=batch_p2p)


def known_shapes(received: Callable[[Any, int], Any], vote: Any) -> AbstractContextManager[None]:
    """Inside, stages know the shapes of what they receive, and do not send each other shapes.

    Args:
        received: function of a stage and the index of another stage, which returns the `forward_meta` or
            `backward_meta` of what comes from that other stage.
        vote: result of the stages' votes on whether shapes change.

    Private: PipelineStage's methods, seen in 2.12 to 2.14; before, its _shape_inference, seen in 2.8 to 2.11. Public
    replacement: input_args and output_args of a stage.
    """
    from torch.distributed.pipelining import PipelineStage

    if not hasattr(PipelineStage, "_recv_meta"):
        infer = PipelineStage._shape_inference  # type: ignore[attr-defined]

        def inferred(self: Any, *args: Any) -> Any:
            def receive(objects: list[Any], *_: Any, **__: Any) -> None:
                objects[0] = received(self, self.stage_index - 1)

            # It receives and sends in the middle of this method.
            with replaced(dist, recv_object_list=receive, send_object_list=lambda *_, **__: None):
                return infer(self, *args)

        return replaced(PipelineStage, _shape_inference=inferred)

    def voted(*_: Any, **__: Any) -> Any:
        return vote

    return replaced(
        PipelineStage,
        _recv_meta=received,
        _send_meta=lambda *_: None,
        _warmup_forward_vote=voted,
        _warmup_backward_result=voted,
    )


def forward_meta(outputs: tuple[Tensor, ...]) -> Any:
    """Make the message in which a stage learns the shapes of the previous stage's outputs.

    Private: pipelining.stage._StageForwardMeta, seen in 2.12 to 2.14; before, it is the outputs. No public replacement.
    """
    from torch.distributed.pipelining import stage

    if not hasattr(stage, "_StageForwardMeta"):
        return outputs
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
