"""How a model goes onto a layout: every check, and which of its parts each pipeline stage gets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import Layout, Techniques
from mmm.nn.draw import parameter_count
from mmm.parallel.checks import check_techniques
from mmm.parallel.initial_weights import check_weights
from mmm.parallel.plan import Plan, check_axes
from mmm.parallel.pp.schedules import check_pipeline, stages_of
from mmm.parallel.pp.stages import Part, balance_stages, check_stages, part_costs, parts_of


@dataclass(frozen=True)
class Partition:
    """Which part of a model each pipeline stage has; parts, costs and stages are empty where there is no pipeline.

    Attributes:
        parts: of the model, in the order of forward. costs: floating-point operations of each.
        stages: the numbers of the parts in each stage. microbatches: of a step.
    """

    parts: list[Part]
    costs: list[int]
    stages: list[range]
    microbatches: int

    def names(self) -> list[list[str]]:
        """The modules of each stage."""
        return [[name for part_id in stage for name in self.parts[part_id]] for stage in self.stages]

    def parameters(self, model: nn.Module, pp: int, schedule: str) -> tuple[int, ...]:
        """Elements of the stages of each pp coordinate, unsharded; of the model, where there is no pipeline."""
        if not self.stages:
            return (parameter_count(model),)
        counts = [parameter_count([model.get_submodule(name) for name in names]) for names in self.names()]
        own = (stages_of(coordinate, pp, schedule, len(counts) // pp) for coordinate in range(pp))
        return tuple(sum(counts[stage] for stage in stages) for stages in own)

    def shares(self) -> list[float]:
        """Each stage's fraction of the floating-point operations."""
        return [sum(self.costs[stage.start : stage.stop]) / sum(self.costs) for stage in self.stages]


def partition_model(
    model: nn.Module, plan: Plan, layout: Layout, techniques: Techniques, inputs: Tensor, dtype: str = ""
) -> Partition:
    """Check how a model goes onto a layout, and split it into stages; needs no process group.

    Args:
        model: its parameters on the meta device (`mmm.parallel.meta_parameters`). layout: fitted.
        inputs: of a step, of one data-parallel coordinate: (batch, …), on the meta device.
        dtype: name of the precision, where it is known: a pipeline does not train in every one.

    Raises:
        UserError: it does not go; with what to change.
    """
    check_weights(model)
    check_axes(plan, layout)
    check_techniques(model, plan, layout, techniques, dtype)
    if plan.check is not None:
        plan.check(model, layout, inputs, techniques.ulysses_size(layout.cp))
    if layout.pp == 1:
        return Partition([], [], [], _gradient_accumulation(techniques, len(inputs)))
    parts = parts_of(model, plan)
    stages_per_rank, microbatches = check_pipeline(layout, techniques, len(inputs), len(parts), dtype)
    costs = part_costs(model, parts, inputs)
    partition = Partition(parts, costs, balance_stages(costs, layout.pp * stages_per_rank), microbatches)
    check_stages(model, parts, partition.stages, inputs)
    return partition


def _gradient_accumulation(techniques: Techniques, batch: int) -> int:
    """Micro-batches of a step without a pipeline."""
    if techniques.stages_per_rank is not None:
        raise ConfigError(
            f"{config_field('stages_per_rank')} "
            f"{techniques.stages_per_rank} without {config_field('pp')}: there is one stage, the model",
        )
    microbatches = 1 if techniques.microbatches is None else techniques.microbatches
    if not 1 <= microbatches <= batch:
        raise LayoutError(
            f"{config_field('microbatches')} "
            f"{microbatches}: a batch of {batch} a data-parallel coordinate can be split into 1 to "
            f"{batch} parts",
        )
    return microbatches
