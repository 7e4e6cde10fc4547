"""For examples that write out one technique and let the package apply the others."""

from __future__ import annotations

from dataclasses import replace

from mmm.examples._support.text import PlainTextConfig, resolve_own
from mmm.layout import Layout, Techniques
from mmm.models.llama.plan import transformer_plan
from mmm.nn.experts import has_experts
from mmm.parallel import Mesh, build_mesh, materialize, parallelize
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.partition import partition_model
from mmm.run.run import Run
from mmm.run.tables import sharded_model
from mmm.trainer.job import Job


def resolve(config: PlainTextConfig, layout: Layout, techniques: Techniques | None = None, **defaults: int) -> Job:
    """As `resolve_own`, and decide how the package parallelizes the Transformer. Needs no process group."""
    job = resolve_own(config, layout, techniques, **defaults)
    plan = transformer_plan(job.sizes)
    partition = partition_model(job.model, plan, layout, job.techniques, job.sample, config.run.dtype)
    return replace(job, plan=plan, partition=partition)


def parallelize_by_package(run: Run, job: Job) -> Mesh:
    """Let the package make the mesh, and shard the model and draw its weights on it. A collective of all ranks."""
    model = job.model
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    parallel_model = parallelize(model, mesh, job.plan, run.precision, job.techniques)
    # Until here the parameters are on the meta device. Now each rank draws its own shards.
    materialize(parallel_model, run.device, run.seed)
    run.log.info("%s\n%s", mesh, sharded_model(unwrapped(parallel_model)), stacklevel=2)
    return mesh
