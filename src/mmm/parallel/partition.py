"""How a model goes onto a layout: every check, and which of its parts each pipeline stage gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import Layout, Techniques
from mmm.nn.init import parameter_count
from mmm.parallel.checks import check_techniques
from mmm.parallel.cp.space.checks import check_field
from mmm.parallel.cp.space.trial import read_fields
from mmm.parallel.cp.styles import splits_space
from mmm.parallel.exact.checks import microbatches_of_lanes
from mmm.parallel.initial_weights import check_weights
from mmm.parallel.plan import Plan, check_axes
from mmm.parallel.pp.schedules import check_pipeline, choices_of, stages_of
from mmm.parallel.pp.stages import Part, balance_stages, check_stages, part_costs, parts_of
from mmm.parallel.pp.ties import stage_ties
from mmm.runtime.device import refuse_faults


@dataclass(frozen=True)
class Partition:
    """Which parts of a model each pipeline stage has. Without a pipeline, parts, costs and stages are empty.

    Attributes:
        parts: the parts of the model that stages are made of, in the order of forward.
        costs: floating-point operations of each part.
        stages: the numbers of the parts in each stage.
        microbatches: number of micro-batches of a step.
    """

    parts: list[Part]
    costs: list[int]
    stages: list[range]
    microbatches: int

    def names(self) -> list[list[str]]:
        """The names of the modules in each stage."""
        names_by_stage = []
        for stage in self.stages:
            names_by_stage.append([name for part_id in stage for name in self.parts[part_id]])
        return names_by_stage

    def parameters(self, model: nn.Module, pp: int, schedule: str) -> tuple[int, ...]:
        """Elements of the unsharded parameters at each pp coordinate. Without a pipeline: of the model, as the only
        entry."""
        if not self.stages:
            return (parameter_count(model),)
        elements = []
        for names in self.names():
            modules = [model.get_submodule(name) for name in names]
            elements.append(parameter_count(modules))
        totals = []
        for coordinate in range(pp):
            stages_per_rank = len(elements) // pp
            stage_ids = stages_of(coordinate, pp, schedule, stages_per_rank)
            totals.append(sum(elements[stage_id] for stage_id in stage_ids))
        return tuple(totals)

    def shares(self) -> list[float]:
        """Each stage's fraction of the floating-point operations."""
        total = sum(self.costs)
        shares = []
        for stage in self.stages:
            stage_costs = self.costs[stage.start : stage.stop]
            shares.append(sum(stage_costs) / total)
        return shares


def partition_model(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    techniques: Techniques,
    inputs: Tensor,
    dtype: str = "",
) -> Partition:
    """Check how a model goes onto a layout, and split it into stages. Needs no process group.

    Args:
        model: the full model, its parameters on the meta device (`mmm.parallel.meta_parameters`).
        layout: fitted to the number of ranks.
        inputs: those of a step, for one data-parallel coordinate: (batch, …), on the meta device.
        dtype: name of the precision, where it is known: a pipeline does not train in every one.

    Raises:
        UserError: the model does not go onto the layout; the message says what to change.
    """
    check_weights(model)
    check_axes(plan, layout)
    check_techniques(model, plan, layout, techniques, dtype)
    if plan.check is not None:
        plan.check(model, layout, inputs, techniques.ulysses_size(layout.cp))
    if splits_space(layout, techniques):
        assert plan.space is not None
        check_field(plan.space, tuple(inputs.shape[1:]))
        read_fields(model, plan.space, layout.cp)
    batch = len(inputs)
    if techniques.exact is not None:
        per_rank = microbatches_of_lanes(techniques.exact, layout, batch)
        techniques = replace(techniques, microbatches=per_rank)
    if layout.pp == 1:
        return Partition([], [], [], _gradient_accumulation(techniques, batch))
    parts = parts_of(model, plan)
    stages_per_rank, microbatches = check_pipeline(layout, techniques, batch, len(parts), dtype)
    refuse_faults(*choices_of(techniques.schedule, layout.pp, microbatches, techniques.loss_chunks))
    costs = part_costs(model, parts, inputs)
    stages = balance_stages(costs, layout.pp * stages_per_rank)
    partition = Partition(parts, costs, stages, microbatches)
    if techniques.exact is not None and stage_ties(model, partition.names()):
        raise LayoutError(
            f"{config_field('exact')} {techniques.exact} with pp {layout.pp}: the model has a weight in several "
            f"stages, whose gradients are summed in another order than on one rank; use pp 1, or untie it"
        )
    # A forward on the meta device: a stage that cannot run is refused here, before any rank has started.
    check_stages(model, parts, stages, inputs)
    return partition


def _gradient_accumulation(techniques: Techniques, batch: int) -> int:
    """Micro-batches of a step without a pipeline.

    Args:
        batch: samples of a step for one data-parallel coordinate.
    """
    if techniques.stages_per_rank is not None:
        raise ConfigError(
            f"{config_field('stages_per_rank')} {techniques.stages_per_rank} without {config_field('pp')}: there is "
            f"one stage, the model",
        )
    if techniques.microbatches is None:
        return 1
    if not 1 <= techniques.microbatches <= batch:
        raise LayoutError(
            f"{config_field('microbatches')} {techniques.microbatches}: a batch of {batch} a data-parallel coordinate "
            f"can be split into 1 to {batch} parts",
        )
    return techniques.microbatches
