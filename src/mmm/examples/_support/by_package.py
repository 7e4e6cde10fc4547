"""What an example lets the package parallelize."""

from __future__ import annotations

from mmm.examples._support.text import PlainTextConfig, resolve_own
from mmm.layout import Layout, Techniques
from mmm.models.definition import check_sizes
from mmm.models.llama.plan import transformer_plan
from mmm.nn.experts import has_experts
from mmm.parallel import Mesh, apply, build_mesh, materialize
from mmm.parallel.dp.wrapped import unwrapped
from mmm.run.run import Run
from mmm.run.tables import sharded_model
from mmm.trainer.job import Job
from mmm.trainer.planned import with_plan


def resolve(config: PlainTextConfig, layout: Layout, techniques: Techniques | None = None, **defaults: int) -> Job:
    """`resolve_own`, and how the package parallelizes the Transformer."""
    check_sizes(config.sizes(), layout, config.data.seq_length)
    own = resolve_own(config, layout, techniques, **defaults)
    tokens = config.data.seq_length // (layout.cp * layout.tp)
    return with_plan(own, transformer_plan(own.sizes), config.run.dtype, tokens)


def parallelize_by_package(run: Run, job: Job) -> Mesh:
    """Make the mesh, and on it the model with its initial weights, by the package; log it. A collective."""
    model = job.model
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    trained = apply(model, mesh, job.plan, run.precision, job.techniques)
    materialize(trained, run.device, run.seed)
    run.log.info("%s\n%s", mesh, sharded_model(unwrapped(trained)), stacklevel=2)
    return mesh
