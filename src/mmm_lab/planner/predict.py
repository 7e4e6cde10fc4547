"""What one run will need and take: `MemoryModel` and `CostModel` of the layout and the techniques that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmm.models.definition import lookup
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.models import model_spec
from mmm_lab.planner.spec import ModelSpec
from mmm_lab.planner.trial import Trial, full_model, stages_for

if TYPE_CHECKING:
    from mmm_launch.machines.machine import Machine


@dataclass(frozen=True)
class Prediction:
    """Of a step.

    Attributes:
        memory: bytes by part (`mmm_lab.planner.memory.PARTS`) at the peak of a rank, by coordinate on pp.
        seconds: None where the machine's rates are not known. machine: whose rates they are.
    """

    memory: tuple[dict[str, float], ...]
    seconds: float | None = None
    machine: str = ""

    def bytes(self, coordinate: int = 0) -> float:
        """Of a rank with this coordinate on pp."""
        return sum(self.memory[coordinate].values())


def spec_of(resolved: Any, flops: bool) -> ModelSpec | None:
    """The model of a run, as the search sees it; None for a model that has no formulas.

    Args:
        resolved: a `mmm.trainer.job.Job`.
        flops: whether they are to be counted, which takes 20 ms.
    """
    sizes = resolved.sizes
    definition = lookup(sizes)
    if definition is None or not definition.costs.planned:
        return None
    return model_spec(sizes, resolved.sample.shape[-1], flops)


def predict(resolved: Any, device: str, dtype: str, machine: Machine | None = None) -> Prediction | None:
    """What a run will need and take; None for a model that has no formulas.

    Args:
        resolved: a `mmm.trainer.job.Job`. device: its type. dtype: name of the precision.
        machine: on which; None: then only memory is predicted.
    """
    layout, partition = resolved.layout, resolved.partition
    spec = spec_of(resolved, flops=machine is not None)
    if spec is None:
        return None
    techniques = replace(resolved.techniques, microbatches=partition.microbatches)
    stages = [full_model(spec)]
    if layout.pp > 1:
        stages = stages_for(spec, partition.stages, techniques.schedule, layout.pp)
    trial = Trial(layout, techniques, tuple(stages), len(resolved.sample))
    memory = MemoryModel(spec, device, dtype, resolved.optimizer)
    parts = tuple(memory.of_stage(stage, trial) for stage in stages)
    if machine is None:
        return Prediction(parts)
    from mmm_lab.planner.cost import CostModel  # a run of a machine that is not known does without

    cost = CostModel(spec, machine, dtype, memory).step(trial)
    return Prediction(parts, cost.seconds, machine.name)
