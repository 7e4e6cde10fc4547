"""What an example lets the package parallelize."""

from __future__ import annotations

from mmm.parallel import Mesh
from mmm.trainer.config.resolve_plan import ResolvedPlan
from mmm.trainer.run.core import Run
from mmm.trainer.run.on_mesh import on_mesh


def parallelize(run: Run, resolved: ResolvedPlan) -> Mesh:
    """Make the mesh, and on it the model with its initial weights, by the package; log it. A collective."""
    return on_mesh(run, resolved.model, resolved.plan, resolved.techniques)[0]
