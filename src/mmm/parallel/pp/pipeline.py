"""Pipeline parallelism: the layers split over the ranks of the pp axis; a batch goes through in micro-batches.

Four micro-batches through two stages by 1F1B; F: forward, B: backward (twice as long), ·: waiting::

              Warmup      Steady                   Cooldown
    stage 0   F0 F1  ·  · B0 B0 F2 B1 B1 F3 B2 B2  · B3 B3
    stage 1    · F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  ·  ·

By GPipe and 1F1B, p even stages wait (p - 1) / (m + p - 1) of a step of m micro-batches; above, 3 of 15. Several stages
a rank divide the waiting by their number. The zero-bubble schedules fill it: they split B into the gradient of the
input, which another stage waits for, and that of the weights, for which nobody does.

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

from mmm.nn.draw import accum_dtype
from mmm.parallel.dp.fsdp import reshard, widen_gradients
from mmm.parallel.dp.zero import Zero
from mmm.parallel.local import detached
from mmm.parallel.mesh import Mesh
from mmm.parallel.pp.p2p import P2PStage, batch_by_group, contiguous_between_stages
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.torch_private.pipelining import batching

Lap = Callable[[str], None]


class StageTimes:
    """Tells `lap` what a rank's stages spend a training step on, ``dtf``, ``dtb``, and between them ``dtw``. An
    evaluation, which is without gradients, is no part of a step."""

    def __init__(self, lap: Lap | None) -> None:
        self._lap = lap

    def lap(self, part: str) -> None:
        if self._lap is not None and torch.is_grad_enabled():
            self._lap(part)

    def timed(self, part: str, work: Callable[[], Any]) -> Any:
        """Do the work, which takes that part of the step's time."""
        self.lap("dtw")
        result = work()
        self.lap(part)
        return result

    def timed_loss(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """`loss` of the output and the targets of a micro-batch, timed."""
        return lambda output, targets: self.timed("dtf", partial(loss, output, targets))


class TimedStage(P2PStage):
    """PyTorch's stage, telling `times` what the time was spent on."""

    times: StageTimes

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self.times.timed("dtf", partial(super().forward_one_chunk, *args, **kwargs))

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self.times.timed("dtb", partial(super().backward_one_chunk, *args, **kwargs))

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self.times.timed("dtb", partial(super().backward_weight_one_chunk, *args, **kwargs))

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:  # else there are no gradients to sum over dp
            widen_gradients(self.submod)
            self.times.timed("dtb", partial(super().perform_reduce_grad, *args, **kwargs))

    # In evaluation nothing goes back between two stages of a rank; PyTorch 2.13 asserts that there is a backward.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class ForwardOf(nn.Module):
    """A wrapped model as PyTorch's schedules have to see it, its gradients not summed (`Pipeline.step` does, once).

    Where a schedule splits a backward it looks for the parameters that forward computes with; those of the wrapper are
    what an optimizer updates.
    """

    def __init__(self, zero: Zero) -> None:
        super().__init__()
        zero.sync_gradients(False)
        self.module = zero.module
        self.forward = zero.forward


def sum_over_stages(losses: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """The local losses of a step's micro-batches, summed, on all stages alike: only the last has any. A collective.

    Returns:
        Scalar, `accum_dtype`.
    """
    loss = sum(map(detached, losses), torch.zeros((), dtype=accum_dtype(device), device=device))
    dist.all_reduce(loss, group=group)
    return loss


class Pipeline:
    """This rank's stages, and the schedule by which all ranks run theirs.

    Each rank differentiates sums over a global count, micro-batch by micro-batch, so that gradients simply add up:
    PyTorch's scaling by the number of micro-batches (for losses that are means) is off.

    Args:
        stages: by number, those of this rank (`stages_of`), each applied to the mesh and materialized.
        count: stages over all ranks.
        mesh: with a pp axis.
        schedule: a key of `SCHEDULES`. microbatches: of a step.
        loss: (output, targets) of a micro-batch → its local loss: its sum divided by the global count.
        lap: `StepClock.lap` of a clock with the parts dtf, dtb and dtw.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        mesh: Mesh | DeviceMesh,
        *,
        schedule: str,
        microbatches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        lap: Lap | None = None,
    ) -> None:
        self.stages, self.device, self.group = dict(stages), device, mesh["pp"].get_group()
        self.has_first, self.has_last = 0 in self.stages, count - 1 in self.stages
        self.times = StageTimes(lap)
        self._unsplit: dict[str, Any] = {}
        timed_stages: list[TimedStage] = []
        for stage_id, module in self.stages.items():
            # FSDP gathers a stage once a step, not once a micro-batch. PyTorch 2.13 needs that, too, where it splits a
            # backward in two: it looks for the gathered parameters, and otherwise silently loses gradients.
            for unit in (unit for unit in module.modules() if isinstance(unit, FSDPModule)):
                unit.set_reshard_after_forward(False, recurse=False)
            if isinstance(module, Zero):
                module = ForwardOf(module)
            module.register_forward_pre_hook(self._add_unsplit, with_kwargs=True)
            contiguous_between_stages(module, stage_id == 0, stage_id == count - 1)
            stage = TimedStage(module, stage_id, count, device, group=self.group)
            stage.times, stage.p2p = self.times, Mesh.of(mesh).p2p
            timed_stages.append(stage)
        kind = SCHEDULES[schedule]
        make = kind.own or getattr(schedules, f"Schedule{schedule}")
        stage_or_stages = timed_stages[0] if kind.most == 1 else timed_stages
        self.schedule = make(stage_or_stages, microbatches, loss_fn=self.times.timed_loss(loss), scale_grads=False)

    def _add_unsplit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**self._unsplit, **kwargs}

    def step(self, inputs: Tensor, targets: Tensor, split: Mapping[str, Tensor] = {}, **unsplit: Any) -> Tensor:
        """Forward and backward of all micro-batches; gradients are then those of the full batch. A collective.

        In the first step PyTorch infers the shapes that pass between stages, by one more micro-batch.

        Args:
            inputs, targets: (batch, …) of this data-parallel coordinate, the same on each of its stages.
            split: further arguments of each stage's forward, (batch, …), split into micro-batches as the inputs are.
            unsplit: further arguments of each stage's forward, not split into micro-batches, such as ``positions``.

        Returns:
            The coordinate's local loss, the same on all its stages: scalar, `accum_dtype`.
        """
        loss = self._run(self.schedule.step, inputs, targets, split, unsplit)
        for module in self.stages.values():  # PyTorch's schedules have FSDP alone do it
            if isinstance(module, Zero):
                self.times.timed("dtb", module.reduce_gradients)
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, split: Mapping[str, Tensor] = {}, **unsplit: Any) -> Tensor:
        """The local loss as `step` returns it, by forward alone. A collective.

        Changing from `step` to this and back costs a micro-batch each, as the first step does.
        """
        loss = self._run(self.schedule.eval, inputs, targets, split, unsplit)
        for module in self.stages.values():
            reshard(module)  # FSDP itself does so only after a backward
        return loss

    def _run(
        self,
        run: Callable[..., Any],
        inputs: Tensor,
        targets: Tensor,
        split: Mapping[str, Tensor],
        unsplit: dict[str, Any],
    ) -> Tensor:
        self._unsplit = unsplit
        losses: list[Tensor] = []
        first_inputs = (inputs,) if self.has_first else ()
        with batching(batch_by_group):
            run(*first_inputs, target=targets if self.has_last else None, losses=losses, return_outputs=False, **split)
        loss = sum_over_stages(losses, self.device, self.group)
        self.times.lap("dtw")
        return loss
