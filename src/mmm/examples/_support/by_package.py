"""What an example lets the package parallelize."""

from __future__ import annotations

from mmm.examples._support.text_config import PlainTextConfig, resolve_own
from mmm.layout import Layout, Techniques
from mmm.parallel import Mesh
from mmm.parallel.plans.transformer import transformer_plan
from mmm.trainer.config.resolve_plan import ParallelSpec, resolve_plan
from mmm.trainer.config.run import DEFAULT_BATCH_SIZE, DEFAULT_MAX_ITERS
from mmm.trainer.run.core import Run
from mmm.trainer.run.on_mesh import on_mesh


def resolve(
    config: PlainTextConfig,
    layout: Layout,
    techniques: Techniques | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> ParallelSpec:
    """`resolve_own`, and how the package parallelizes the Transformer."""
    own = resolve_own(config, layout, techniques, batch_size, max_iters)
    tokens = config.data.seq_length // (layout.cp * layout.tp)
    return resolve_plan(own, transformer_plan(own.sizes), config.run.dtype, tokens)


def parallelize(run: Run, resolved: ParallelSpec) -> Mesh:
    """Make the mesh, and on it the model with its initial weights, by the package; log it. A collective."""
    return on_mesh(run, resolved.model, resolved.plan, resolved.techniques)[0]
