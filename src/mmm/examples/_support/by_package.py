"""What an example lets the package parallelize."""

from __future__ import annotations

from mmm.parallel import Mesh
from mmm.trainer.on_mesh import on_mesh
from mmm.trainer.resolve_plan import ResolvedPlan
from mmm.trainer.run.core import Run


def parallelize(run: Run, resolved: ResolvedPlan) -> Mesh:
    """Make the mesh, and on it the model with its initial weights, by the package; log it. A collective."""
    return on_mesh(run, resolved.model, resolved.plan, resolved.techniques)[0]
