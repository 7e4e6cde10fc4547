"""From a model's shapes to this rank's part of it: what all trainers do once their run has begun."""

from __future__ import annotations

from torch import nn

from mmm.parallel import build_mesh
from mmm.parallel.assemble import Division, ParallelModel, Techniques
from mmm.parallel.plan import Plan
from mmm.trainer.report import sharded_model, stage_table
from mmm.trainer.run import Run


def place(run: Run, model: nn.Module, plan: Plan, how: Techniques, division: Division) -> ParallelModel:
    """Make the mesh, and on it this rank's part of `model` with its initial weights; log who has what. A collective.

    Args:
        model: on the meta device; it is used up. division: of `mmm.parallel.assemble.divide`.
    """
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout)
    if division.stages:
        run.log.info("%d micro-batches by %s\n%s", division.microbatches, how.schedule,
                     stage_table(division.names(), division.shares()))  # fmt: skip
        run.describe(stages=division.names())
    here = ParallelModel(model, plan, run.layout, mesh, run.precision, how, division, device=run.device,
                         seed=run.options.seed, lap=run.clock.lap)  # fmt: skip
    run.log.info("%s, %s", how.data_parallel, mesh)
    for number, module in here.modules.items():
        run.log.info("%s%s", f"stage {number}\n" if division.stages else "", sharded_model(module))
    run.describe(techniques=how, microbatches=division.microbatches)
    return here
