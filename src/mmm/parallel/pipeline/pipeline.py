"""Pipeline parallelism: the layers cut over the ranks of the pp axis; a batch goes through in micro-batches.

Four micro-batches through two stages by 1F1B; F: forward, B: backward (twice as long), ·: waiting::

              Warmup      Steady                   Cooldown
    stage 0   F0 F1  ·  · B0 B0 F2 B1 B1 F3 B2 B2  · B3 B3
    stage 1    · F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  ·  ·

By GPipe and 1F1B, p even stages wait (p - 1) / (m + p - 1) of a step of m micro-batches; above, 3 of 15. Several stages
a rank divide the waiting by their number. The zero-bubble schedules fill it: they split B into the gradient of the
input, which another stage waits for, and that of the weights, for which nobody does.

With V stages a rank, and p = 2, the stages lie on the ranks as

                loop (V = 2)     V (ZBVZeroBubble, DualPipeV)
    rank 0        0   2            0   3         ← the last stage, and so the loss, is where the first is
    rank 1        1   3            1   2

Sources: Huang et al., "GPipe", 2019; Narayanan et al., "Megatron-LM", 2021 (1F1B, interleaved); Lamy-Poirier,
"Breadth-First Pipeline Parallelism", 2022; Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (ZB, ZBV); DeepSeek-AI,
"DeepSeek-V3", 2024 (DualPipe). All are PyTorch's own: ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules

from mmm.errors import ConfigError, LayoutError
from mmm.parallel.apply import check_compile
from mmm.parallel.data.fsdp import widen_gradients
from mmm.parallel.loss import local_value
from mmm.parallel.mesh import Layout
from mmm.parallel.pipeline.recorder import Action, Recorder
from mmm.parallel.pipeline.strides import pass_in_order
from mmm.parallel.plan import Plan

Lap = Callable[[str], None]
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for.

    Attributes:
        least, most: stages a rank (most: None for any number).
        v: stages lie on the ranks there and back, not round and round.
        splits: splits backward in two, which does not go with torch.compile nor with selective checkpointing.
        microbatches: the least number, and what it must be a multiple of, from the number of pp ranks.
    """

    least: int = 1
    most: int | None = 1
    v: bool = False
    splits: bool = False
    microbatches: Callable[[int], tuple[int, int]] = lambda pp: (1, 1)


SCHEDULES: dict[str, Schedule] = {
    "GPipe": Schedule(),
    "1F1B": Schedule(microbatches=lambda pp: (pp, 1)),
    "Interleaved1F1B": Schedule(least=2, most=None, microbatches=lambda pp: (pp, pp)),
    "LoopedBFS": Schedule(least=2, most=None),
    "InterleavedZeroBubble": Schedule(least=2, most=None, splits=True, microbatches=lambda pp: (pp, pp)),
    "ZBVZeroBubble": Schedule(least=2, most=2, v=True, splits=True),
    "DualPipeV": Schedule(least=2, most=2, v=True, splits=True, microbatches=lambda pp: (2 * pp, 1)),
}


def check_pipeline(
    layout: Layout,
    schedule: str,
    microbatches: int,
    batch: int,
    parts: int,
    stages_per_rank: int | None = None,
    *,
    dtype: str = "auto",
    compile: Plan | None = None,
    checkpointing: str = "none",
) -> int:
    """Whether a schedule goes with the layout, the batch and the model; needs no process group.

    Args:
        layout: fitted to the number of ranks.
        microbatches: of a step. batch: samples of a step, per data-parallel coordinate.
        parts: of the model, that stages can be made of (`stages.parts_of`).
        stages_per_rank: None for the fewest that the schedule takes.
        dtype: the flag of a run. compile: the plan, where it is to be compiled. checkpointing: of activations.

    Returns:
        Stages per rank.

    Raises:
        ConfigError: no such schedule, or a dtype that does not go with a pipeline.
        LayoutError: every rule that is broken, with its numbers and what to change.
    """
    if dtype == "fp16":
        raise ConfigError(
            "--dtype fp16 scales the loss up, by a factor that all stages would have to agree on: use bf16 or fp32"
        )
    if schedule not in SCHEDULES:
        raise ConfigError(f"--schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if not hasattr(schedules, f"Schedule{schedule}"):
        raise ConfigError(f"--schedule {schedule}: PyTorch {torch.__version__} lacks it; use 1F1B, or a newer PyTorch")
    if not hasattr(schedules._PipelineSchedule, "eval"):
        raise ConfigError(
            f"pp {layout.pp}: the pipelines of PyTorch {torch.__version__} train only, and cannot be "
            f"evaluated; use a newer PyTorch, or pp 1"
        )
    kind, pp, wrong = SCHEDULES[schedule], layout.pp, []
    each = kind.least if stages_per_rank is None else stages_per_rank
    if pp < 2:
        wrong.append(f"pp {pp}: a pipeline has at least 2 ranks; on 1 there is nothing to cut")
    if each < kind.least or (kind.most is not None and each > kind.most):
        takes = f"exactly {kind.least}" if kind.most == kind.least else f"at least {kind.least}"
        wrong.append(f"--stages_per_rank {each}: {schedule} takes {takes}")
    elif pp * each > parts:
        wrong.append(
            f"pp {pp} with {each} stages a rank is {pp * each} stages, and the model has {parts} parts to put into "
            f"them: use {f'pp {fewer}, ' if (fewer := _smaller_pp(layout, parts // each)) else ''}a model with more "
            f"layers" + (", or a schedule with one stage a rank (1F1B)" if kind.least > 1 and pp <= parts else "")
        )
    least, multiple = kind.microbatches(pp)
    if microbatches < least or microbatches % multiple or batch % microbatches:
        why = []
        if microbatches < least:
            why.append(f"{schedule} with pp {pp} needs at least {least}")
        if microbatches < 1:
            why.append("it must be at least 1")
        elif microbatches % multiple:
            why.append(f"{schedule} needs a multiple of pp {pp}")
        if microbatches >= 1 and batch % microbatches:
            why.append(f"a batch of {batch} a data-parallel coordinate cannot be cut into {microbatches} equal parts")
        good = [m for m in range(least, batch + 1) if m % multiple == 0 and batch % m == 0]
        fix = f"--microbatches {' or '.join(map(str, good[:4]))}" if good else f"a batch that is a multiple of {least}"
        wrong.append(f"--microbatches {microbatches}: {', and '.join(why)}; use {fix}")
    if compile is not None:
        check_compile(compile, layout)
    if compile is not None and kind.splits:
        wrong.append(
            f"--compile with {schedule}, which splits the backward of a stage in two: PyTorch cannot split a "
            f"compiled one; leave --compile out, or use 1F1B or Interleaved1F1B"
        )
    if checkpointing == "selective" and kind.splits:
        wrong.append(
            f"--activation_checkpointing selective with {schedule}, which goes through the backward of a "
            f"stage twice, for its input and for its weights: what selective checkpointing keeps, PyTorch "
            f"gives back once; use full (which then repeats the forward twice), or 1F1B or "
            f"Interleaved1F1B"
        )
    if wrong:
        raise LayoutError("; ".join(wrong))
    return each


def _smaller_pp(layout: Layout, most: int) -> int:
    """The largest pp up to `most` that the same ranks make a mesh with; 0 if that is no pipeline."""
    return next((pp for pp in range(most, 1, -1) if layout.pp * layout.dp_shard % pp == 0), 0)


def stages_of(coordinate: int, pp: int, schedule: str, stages_per_rank: int) -> list[int]:
    """The numbers of the stages on the rank with that coordinate on pp."""
    if SCHEDULES[schedule].v:
        return [coordinate, 2 * pp - 1 - coordinate]
    return [coordinate + turn * pp for turn in range(stages_per_rank)]


class Stage(PipelineStage):
    """PyTorch's stage, telling `lap` what the time has gone into: ``dtf``, ``dtb``, and between them ``dtw``."""

    lap: Lap
    recorder: Recorder | None = None

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        self.lap("dtw")
        result = work()
        self.lap(part)
        return result

    def note(self, kind: str, microbatch: int, work: Callable[[], Any]) -> Any:
        """Do the work; it is noted if that was asked for, and this is training."""
        if self.recorder is None or not self.has_backward:
            return work()
        return self.recorder.note(Action(self.stage_index, kind, microbatch), work)

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        forward = partial(super().forward_one_chunk, fwd_chunk_id, *given, **named)
        return self._timed("dtf", lambda: self.note("F", fwd_chunk_id, forward))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        backward = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
        return self._timed("dtb", lambda: self.note("B" if full_backward else "I", bwd_chunk_id, backward))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        backward = partial(super().backward_weight_one_chunk, bwd_chunk_id, *given, **named)
        return self._timed("dtb", lambda: self.note("W", bwd_chunk_id, backward))

    def perform_reduce_grad(self, *given: Any, **named: Any) -> None:
        if self.has_backward:  # else there is nothing to sum over dp
            widen_gradients(self.submod)
            self._timed("dtb", partial(super().perform_reduce_grad, *given, **named))

    # Between two stages of a rank nothing goes back where there is no backward; PyTorch 2.13 asserts that there is one.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _units(module: nn.Module) -> Iterator[FSDPModule]:
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


class Pipeline:
    """This rank's stages, and the schedule by which all ranks run theirs.

    Each rank differentiates sums over a global count, micro-batch by micro-batch, so gradients simply add up: PyTorch's
    scaling by the number of micro-batches (for losses that are means) is off.

    Args:
        stages: by number, those of this rank (`stages_of`), each applied to the mesh and materialized.
        count: stages over all ranks.
        mesh: with a pp axis.
        schedule: a key of `SCHEDULES`. microbatches: of a step.
        loss: (output, targets) of a micro-batch → its sum over the global count: its share of the loss.
        lap: `StepClock.lap` of a clock with the parts dtf, dtb and dtw. On an accelerator the host then waits for each
            part of the work, which costs overlap.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        mesh: DeviceMesh,
        *,
        schedule: str,
        microbatches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        lap: Lap | None = None,
    ) -> None:
        self.stages, self.device, self.group = dict(stages), device, mesh["pp"].get_group()
        self.has_first, self.has_last = 0 in self.stages, count - 1 in self.stages
        self._loss, self._lap, self._training = loss, lap, False
        self._recorder: Recorder | None = None
        self._whole: dict[str, Any] = {}
        self._wrapped: list[Stage] = []
        for number, module in self.stages.items():
            # FSDP gathers a stage once a step, not once a micro-batch; and what splits a backward in two (PyTorch 2.13)
            # looks for the gathered parameters, and without this loses gradients silently.
            for unit in _units(module):
                unit.set_reshard_after_forward(False, recurse=False)
            module.register_forward_pre_hook(self._add_whole, with_kwargs=True)
            pass_in_order(module, number == 0, number == count - 1)
            stage = Stage(module, number, count, device, group=self.group)
            stage.lap = self._timed
            self._wrapped.append(stage)
        kind = SCHEDULES[schedule]
        make = getattr(schedules, f"Schedule{schedule}")
        stage_or_stages = self._wrapped[0] if kind.most == 1 else self._wrapped
        self.schedule = make(stage_or_stages, microbatches, loss_fn=self._timed_loss, scale_grads=False)

    def _timed(self, part: str) -> None:
        if self._lap is not None and self._training:
            self._lap(part)

    def _timed_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        self._timed("dtw")
        work = partial(self._loss, output, targets)
        value = self._recorder.go_on(work) if self._recorder is not None and self._training else work()
        self._timed("dtf")
        return value

    def _add_whole(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given, {**named, **self._whole}

    def record_to(self, recorder: Recorder | None) -> None:
        """Have what is done in the next steps noted, on all ranks of the pipeline or on none; None: no longer."""
        self._recorder = recorder
        for stage in self._wrapped:
            stage.recorder = recorder

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank's stages, by their names in the whole model."""
        return chain.from_iterable(stage.named_parameters() for stage in self.stages.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def step(self, inputs: Tensor, targets: Tensor, **whole: Any) -> Tensor:
        """Forward and backward of all micro-batches; gradients are then those of the whole batch. A collective.

        The first step works out the shapes that pass between stages, by one more micro-batch.

        Args:
            inputs, targets: (batch, …) of this data-parallel coordinate, the same on each of its stages.
            whole: what each stage's forward takes besides, not cut into micro-batches, such as ``positions``.

        Returns:
            The coordinate's share of the loss, the same on all its stages: scalar, float64 (float32 on MPS).
        """
        self._training = True
        if self._recorder is not None:
            self._recorder.start()
        return self._run(self.schedule.step, inputs, targets, whole)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, **whole: Any) -> Tensor:
        """The share of the loss as `step` returns it, by forward alone. A collective.

        Going from `step` to here and back costs a micro-batch each, as the first step does.
        """
        self._training = False
        share = self._run(self.schedule.eval, inputs, targets, whole)
        for module in self.stages.values():
            for unit in _units(module):  # no backward, after which FSDP would do so
                unit.reshard()
        return share

    def _run(self, run: Callable[..., Any], inputs: Tensor, targets: Tensor, whole: dict[str, Any]) -> Tensor:
        self._whole = whole
        losses: list[Tensor] = []
        given = (inputs,) if self.has_first else ()
        run(*given, target=targets if self.has_last else None, losses=losses, return_outputs=False)
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        share = torch.tensor(sum(map(local_value, losses)), dtype=dtype, device=self.device)
        dist.all_reduce(share, group=self.group)  # only the last stage has losses
        self._timed("dtw")
        return share
