"""Pipeline parallelism: the layers split over the ranks of the pp axis; a batch goes through in micro-batches.

Four micro-batches through two stages by 1F1B; F: forward, B: backward (twice as long), ·: waiting::

              Warmup      Steady                   Cooldown
    stage 0   F0 F1  ·  · B0 B0 F2 B1 B1 F3 B2 B2  · B3 B3
    stage 1    · F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  ·  ·

With GPipe and 1F1B, p stages of equal cost wait for (p - 1) / (m + p - 1) of a step of m micro-batches: 3 units of 15
in the picture. With several stages on each rank, this waiting time is divided by their number. The zero-bubble
schedules fill it with work: they split B into the gradient of the input, which another stage waits for, and the
gradient of the weights, which no stage waits for and which can therefore be computed later.

Sources: Huang et al., "GPipe", 2019; Narayanan et al., "Megatron-LM", 2021 (1F1B, interleaved); Lamy-Poirier,
"Breadth-First Pipeline Parallelism", 2022; Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (ZB, ZBV); DeepSeek-AI,
"DeepSeek-V3", 2024 (DualPipe). All are PyTorch's own: ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from mmm.nn.init import accum_dtype
from mmm.parallel.dp.fsdp import reshard, widen_gradients
from mmm.parallel.dp.zero import Zero
from mmm.parallel.exact.gradients import LaneGradients
from mmm.parallel.exact.trees import sum_far
from mmm.parallel.local import detached
from mmm.parallel.mesh import Mesh
from mmm.parallel.pp.p2p import P2PStage, batch_by_group, contiguous_between_stages
from mmm.parallel.pp.schedules import SCHEDULES, choices_of
from mmm.runtime.device import refuse_faults
from mmm.torch_private.pipelining import batching, evaluate, split_samples, without_outputs

# Function of a name: dtf (forward), dtb (backward) or dtw (waiting). Adds the seconds since its last call to that part.
Lap = Callable[[str], None]
# Function of a micro-batch's output and targets that returns its loss.
StageLoss = Callable[[Tensor, Tensor], Tensor]


class StageTimes:
    """Divides a rank's training step into forward (``dtf``), backward (``dtb``) and the waiting between them (``dtw``).

    An evaluation is not timed: it runs without gradients and does not belong to a step.
    """

    def __init__(self, lap: Lap | None) -> None:
        self._lap = lap

    def lap(self, name: str) -> None:
        if self._lap is not None and torch.is_grad_enabled():
            self._lap(name)

    def timed(self, name: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `work`, and count its time as part `name`. The time since the last part ended was waiting."""
        self.lap("dtw")
        result = work(*args, **kwargs)
        self.lap(name)
        return result

    def timed_loss(self, loss: StageLoss) -> StageLoss:
        """Return `loss` as a function whose time counts as forward."""
        return lambda output, targets: self.timed("dtf", loss, output, targets)


class TimedStage(P2PStage):
    """A `P2PStage` that tells `times` what it spends time on."""

    times: StageTimes
    # In an exact run, takes the gradients of each micro-batch, which are summed over dp already.
    gradients: LaneGradients | None = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self.times.timed("dtf", super().forward_one_chunk, *args, **kwargs)

    # An evaluation calls the next three as well, and has no backward. PyTorch 2.8 does not skip it by itself.
    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:
            self.times.timed("dtb", super().backward_one_chunk, *args, **kwargs)
            if self.gradients is not None:
                self.gradients.take()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:
            self.times.timed("dtb", super().backward_weight_one_chunk, *args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        # Without a backward there are no gradients to sum over dp.
        if self.has_backward:
            widen_gradients(self.submod)
            self.times.timed("dtb", super().perform_reduce_grad, *args, **kwargs)

    # Between two stages of the same rank, gradients are handed over by the two methods below. An evaluation has none,
    # and PyTorch 2.13 asserts that there is a backward.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class ForwardOf(nn.Module):
    """Runs the forward of a `Zero` wrapper, but has the parameters of the module inside.

    A schedule that splits a backward asks a stage for the parameters that its forward computes with. `Zero` would
    answer with the shards that the optimizer updates.

    The gradients are not summed over dp in each backward: `Pipeline.step` sums them once.
    """

    def __init__(self, zero: Zero) -> None:
        super().__init__()
        zero.sync_gradients(False)
        self.module = zero.module
        self.forward = zero.forward


class Inside(nn.Module):
    """Runs the forward of an FSDP module, and hides from a schedule that it is one.

    A schedule has FSDP sum the gradients of a step after its last micro-batch. In an exact run FSDP sums those of each
    micro-batch in its backward, as it does without a pipeline.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        assert isinstance(module, FSDPModule), "an exact run has FSDP"
        # Gathered once a step: `Pipeline.step` frees it.
        module.set_reshard_after_backward(False)
        self.module: nn.Module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def sum_over_stages(
    losses: Iterable[Tensor],
    device: torch.device,
    group: dist.ProcessGroup,
    exact: bool = False,
) -> Tensor:
    """Sum the local losses of a step's micro-batches, for all stages. A collective of the ranks of pp.

    Args:
        exact: whether the micro-batches are lanes, whose losses are summed by the far tree.

    Returns:
        Scalar, `accum_dtype`, the same on all stages.
    """
    loss = torch.zeros((), dtype=accum_dtype(device), device=device)
    terms = [detached(microbatch_loss) for microbatch_loss in losses]
    if exact and terms:
        terms = [sum_far(terms)]
    for term in terms:
        loss = loss + term
    # Only the rank with the last stage has losses; the others add 0 and receive the sum.
    dist.all_reduce(loss, group=group)
    return loss


class Pipeline:
    """This rank's stages, and the schedule by which all ranks run theirs.

    Each rank differentiates sums divided by a global count, one micro-batch after another, so that gradients simply add
    up. PyTorch's scaling by the number of micro-batches (for losses that are means) is off.

    Args:
        stages: this rank's stages by their index in the model (`stages_of`), each parallelized and materialized.
        stage_count: number of stages over all ranks.
        mesh: a mesh with a pp axis.
        schedule: a key of `SCHEDULES`.
        microbatches: number of micro-batches of a step.
        loss: function of (output, targets) of a micro-batch that returns its local loss: its sum divided by the global
            count.
        device: the device of this rank.
        lap: `StepClock.lap` of a clock with the parts dtf, dtb and dtw.
        exact: whether the micro-batches are lanes, in the order of `rows_as_visited`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage_count: int,
        mesh: Mesh | DeviceMesh,
        *,
        schedule: str,
        microbatches: int,
        loss: StageLoss,
        device: torch.device,
        lap: Lap | None = None,
        exact: bool = False,
    ) -> None:
        refuse_faults(*choices_of(schedule, mesh["pp"].size(), microbatches))
        self.stages = dict(stages)
        self.gradients = LaneGradients(self.stages.values()) if exact else None
        self.device = device
        self.group = mesh["pp"].get_group()
        last_stage = stage_count - 1
        self.has_first = 0 in self.stages
        self.has_last = last_stage in self.stages
        self.times = StageTimes(lap)
        # Arguments of the current step for every micro-batch's forward, set by `_run` and read by a hook.
        self._unsplit: dict[str, Any] = {}
        p2p = Mesh.of(mesh).p2p
        self._timed_stages: list[TimedStage] = []
        for stage_id, module in self.stages.items():
            # FSDP gathers a stage once a step, not once a micro-batch. PyTorch 2.13 needs that, too, where it splits a
            # backward in two: it looks for the gathered parameters, and otherwise silently loses gradients.
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.set_reshard_after_forward(False, recurse=False)
            if isinstance(module, Zero):
                module = ForwardOf(module)
            if exact:
                module = Inside(module)
            module.register_forward_pre_hook(self._add_unsplit, with_kwargs=True)
            contiguous_between_stages(module, first=stage_id == 0, last=stage_id == last_stage)
            stage = TimedStage(module, stage_id, stage_count, device, group=self.group)
            stage.times = self.times
            stage.gradients = self.gradients
            stage.p2p = p2p
            self._timed_stages.append(stage)
        kind = SCHEDULES[schedule]
        make = kind.schedule_class or getattr(schedules, f"Schedule{schedule}")
        # PyTorch's PipelineScheduleSingle takes one stage, PipelineScheduleMulti a list of stages.
        stage_or_stages = self._timed_stages[0] if kind.max_stages == 1 else self._timed_stages
        timed_loss = self.times.timed_loss(loss)
        self.schedule = make(stage_or_stages, microbatches, loss_fn=timed_loss, scale_grads=False)

    def _add_unsplit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook: adds the arguments that PyTorch's schedule, if it got them, would split."""
        return args, {**self._unsplit, **kwargs}

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        split: Mapping[str, Tensor] = {},
        **unsplit: Any,
    ) -> Tensor:
        """Run forward and backward of all micro-batches. Gradients are then those of the full batch. A collective.

        In the first step PyTorch runs an extra forward, to infer the shapes that pass between stages.

        Args:
            inputs: (batch, …) of this data-parallel coordinate, the same on each of its stages.
            targets: (batch, …) of this data-parallel coordinate, the same on each of its stages.
            split: further arguments of each stage's forward, (batch, …), split into micro-batches as the inputs are.
            unsplit: further arguments of each stage's forward, not split into micro-batches, such as ``positions``.

        Returns:
            The coordinate's local loss, the same on all its stages: scalar, `accum_dtype`.
        """
        loss = self._run(self.schedule.step, inputs, targets, split, unsplit)
        # PyTorch's schedules sum the gradients of FSDP's modules over dp. Those of ZeRO are summed here, once a step.
        for module in self.stages.values():
            if isinstance(module, Zero):
                self.times.timed("dtb", module.reduce_gradients)
        if self.gradients is not None:
            self.times.timed("dtb", self.gradients.put)
        # A schedule of several stages a rank gathers them before their first forward of a step. Without this, that
        # forward would find them older than the optimizer's step, and gather them again.
        for module in self.stages.values():
            reshard(module)
        return loss

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Tensor,
        targets: Tensor,
        split: Mapping[str, Tensor] = {},
        **unsplit: Any,
    ) -> Tensor:
        """The local loss as `step` returns it, by forward only. A collective.

        The first call after a `step`, and the first `step` after this, run an extra forward, as the first step does.
        """
        loss = self._run(partial(evaluate, self.schedule, self._timed_stages), inputs, targets, split, unsplit)
        # FSDP itself frees the gathered parameters only after a backward.
        for module in self.stages.values():
            reshard(module)
        return loss

    def _run(
        self,
        run_schedule: Callable[..., Any],
        inputs: Tensor,
        targets: Tensor,
        split: Mapping[str, Tensor],
        unsplit: dict[str, Any],
    ) -> Tensor:
        """Run the schedule once, and return the sum of its losses, the same on all stages."""
        self._unsplit = unsplit
        losses: list[Tensor] = []
        # Only the first stage takes inputs, and only the last takes targets; the others receive activations.
        # Contiguous: up to 2.11 the first stage refuses a rank's rows of a field, whose strides are those of the field.
        args = (inputs.contiguous(),) if self.has_first else ()
        target = targets if self.has_last else None
        split_samples(self.schedule, split)
        with batching(batch_by_group):
            run_schedule(*args, target=target, losses=losses, **without_outputs(), **split)
        loss = sum_over_stages(losses, self.device, self.group, self.gradients is not None)
        self.times.lap("dtw")
        return loss
