"""Predicts the memory and the step time of one run: `MemoryModel` and `CostModel` for its layout and techniques."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mmm.models.definition import lookup
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.models import model_spec
from mmm_lab.planner.trial import Trial, full_model, stages_for

if TYPE_CHECKING:
    from mmm_launch.machines.machine import Machine


class Prediction(NamedTuple):
    """What a step needs and takes.

    Attributes:
        memory: for each coordinate on pp, a rank's bytes at its peak by part (`mmm_lab.planner.memory.PARTS`).
        seconds: seconds of a step; None if the machine's rates are not known.
    """

    memory: list[dict[str, float]]
    seconds: float | None


def predict(
    job: Any,
    device: str,
    dtype: str,
    machine: Machine | None = None,
) -> Prediction | None:
    """What a run will need and take. None if there are no formulas for its model.

    Args:
        job: a `mmm.trainer.job.Job`.
        device: type of the device.
        dtype: name of the precision.
        machine: the machine that it runs on; None to predict only memory.
    """
    definition = lookup(job.sizes)
    if definition is None or not definition.costs.planned:
        return None
    layout = job.layout
    partition = job.partition
    spec = model_spec(job.sizes, job.sample.shape[-1], flops=machine is not None)
    techniques = replace(job.techniques, microbatches=partition.microbatches)
    # A prediction is made for each rank of the pipeline, also if two are alike.
    stages = [full_model(spec)]
    if layout.pp > 1:
        stages = stages_for(spec, partition.stages, techniques.schedule, layout.pp)
    trial = Trial(layout, techniques, tuple(stages), len(job.sample))
    memory = MemoryModel(spec, device, dtype, job.optimizer)
    seconds = None
    if machine is not None:
        # Runs on machines that are not known do without this import.
        from mmm_lab.planner.cost import CostModel

        seconds = CostModel(spec, machine, dtype, memory).step(trial).seconds
    return Prediction([memory.of_stage(stage, trial) for stage in stages], seconds)
