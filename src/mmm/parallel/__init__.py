"""Meshes, and one file a technique; ``plans/`` says how each model is cut."""

from mmm.parallel.apply import apply, materialize
from mmm.parallel.loss import cross_entropy, local_value
from mmm.parallel.mesh import Layout, batch_sizes, build_mesh

__all__ = ["Layout", "apply", "batch_sizes", "build_mesh", "cross_entropy", "local_value", "materialize"]
