"""From a model's shapes to this rank's part of it: what all trainers do once their run has started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.nn.draw import parameter_count
from mmm.nn.experts import has_experts
from mmm.parallel import build_mesh
from mmm.parallel.dp.data_parallel import needs_no_fsdp
from mmm.parallel.dp.microbatches import microbatches_of
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.plan import unmatched
from mmm.run.run import Run
from mmm.run.tables import local_parameters, sharded_model, stage_table


def shard(run: Run, job: Any) -> ParallelModel:
    """Make the mesh, and on it this rank's part of the model with its initial weights; log who has what. A collective.

    Args:
        job: a `mmm.trainer.job.Job`. Its model is consumed; do not reuse it.
    """
    model = job.model
    plan = job.plan
    techniques = job.techniques
    partition = job.partition
    parameters = parameter_count(model)
    for text in unmatched(plan, model):  # `ParallelModel` says them
        run.describe(note=text)
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    if needs_no_fsdp(run.layout, run.precision.mixed, techniques):
        mesh = replace(mesh, no_data_parallel=True)
    if partition.stages:
        table = stage_table(partition.names(), partition.shares())
        run.log.info("%d micro-batches by %s\n%s", partition.microbatches, techniques.schedule, table)
    parallel = ParallelModel(
        model,
        plan,
        mesh,
        run.precision,
        techniques,
        partition,
        device=run.device,
        seed=run.seed,
        lap=run.clock.lap,
    )
    run.log.info("%s, %s", techniques.data_parallel, mesh)
    if mesh.no_data_parallel and run.device.type == "mps":
        run.note(f"{run.device.type} is one device: the model is trained as it is, without {techniques.data_parallel}")
    elif mesh.no_data_parallel:
        run.log.info("one rank: nothing to shard, so the model is trained as it is")
    modules = {number: unwrapped(module) for number, module in parallel.modules.items()}
    for number, module in modules.items():
        run.log.debug("%s%s", f"stage {number}\n" if partition.stages else "", sharded_model(module))
    by_rank = run.comm.gather(sum(map(local_parameters, modules.values())))
    if by_rank:
        least = min(by_rank)
        most = max(by_rank)
        run.log.info(
            "a rank holds %s to %s of %s parameters (%.1f%% to %.1f%%)",
            f"{least:,}",
            f"{most:,}",
            f"{parameters:,}",
            100 * least / parameters,
            100 * most / parameters,
        )
        run.describe(
            **({"stages": partition.names()} if partition.stages else {}),
            techniques=techniques,
            microbatches=partition.microbatches,
            parameters=parameters,
            local=by_rank,
        )
    if parallel.pipeline is None:  # else its schedule has them
        trained = list(parallel.modules.values())
        run.split = lambda batch: microbatches_of(batch, parallel.microbatches, trained)
    return parallel
