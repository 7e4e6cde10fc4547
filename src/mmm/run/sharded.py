"""From a model's shapes to this rank's part of it: what all trainers do once their run has started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.nn.experts import has_experts
from mmm.nn.init import parameter_count
from mmm.parallel import build_mesh
from mmm.parallel.dp.data_parallel import needs_no_fsdp
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.plan import unmatched
from mmm.run.run import Run
from mmm.run.tables import local_parameters, sharded_model, stage_table


def shard(run: Run, job: Any) -> ParallelModel:
    """Make the mesh and this rank's part of the model with its initial weights, and log who has what. A collective.

    Args:
        job: a `mmm.trainer.job.Job`. Its model is consumed; do not reuse it.
    """
    model = job.model
    plan = job.plan
    techniques = job.techniques
    partition = job.partition
    n_parameters = parameter_count(model)
    # `ParallelModel` logs these; here they are only kept in the record.
    for text in unmatched(plan, model):
        run.describe(note=text)
    # A collective: the ranks make the process groups of all axes.
    mesh = build_mesh(
        run.layout,
        run.device.type,
        run.options.timeout,
        experts=has_experts(model),
    )
    if needs_no_fsdp(run.layout, run.precision.mixed, techniques):
        mesh = replace(mesh, no_data_parallel=True)
    # Without pp the model is not cut.
    if partition.stages:
        table = stage_table(partition.names(), partition.shares())
        run.log.info("%d micro-batches by %s\n%s", partition.microbatches, techniques.schedule, table)
    # A collective too: stages are cut, the techniques are applied to each, and then the weights are drawn.
    parallel = ParallelModel(
        model,
        plan,
        mesh,
        run.precision,
        techniques,
        partition,
        device=run.device,
        seed=run.seed,
        lap=run.clock.model_lap,
    )
    run.log.info("%s, %s", techniques.data_parallel, mesh)
    if mesh.no_data_parallel and run.device.type == "mps":
        run.note(f"{run.device.type} is one device: the model is trained as it is, without {techniques.data_parallel}")
    elif mesh.no_data_parallel:
        run.log.info("one rank: nothing to shard, so the model is trained as it is")
    n_local = 0
    for stage_index, module in parallel.modules.items():
        inner = unwrapped(module)
        heading = f"stage {stage_index}\n" if partition.stages else ""
        run.log.debug("%s%s", heading, sharded_model(inner))
        n_local += local_parameters(inner)
    by_rank = run.comm.gather(n_local)
    # Only rank 0 has the list.
    if by_rank:
        least = min(by_rank)
        most = max(by_rank)
        # Usually all ranks hold as many.
        counts = " to ".join(f"{count:,}" for count in dict.fromkeys((least, most)))
        shares = " to ".join(f"{count / n_parameters:.1%}" for count in dict.fromkeys((least, most)))
        run.log.info("a rank holds %s of %s parameters (%s)", counts, f"{n_parameters:,}", shares)
        facts: dict[str, Any] = {}
        if partition.stages:
            facts["stages"] = partition.names()
        run.describe(
            **facts,
            techniques=techniques,
            microbatches=partition.microbatches,
            parameters=n_parameters,
            local=by_rank,
        )
    return parallel
