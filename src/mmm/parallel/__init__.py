"""Meshes, and one file a technique; ``plans/`` says how each model is cut.

The names below are what a program of one's own uses (docs/your-script.md, docs/models.md), and stay.
"""

from mmm.models.meta import meta_parameters
from mmm.parallel.apply import apply, check_compile, check_weights, materialize
from mmm.parallel.clip import clip_grad_norm
from mmm.parallel.data.apply import DATA_PARALLEL, check_data_parallel, sync_gradients
from mmm.parallel.expert.apply import balance_experts, imbalance
from mmm.parallel.loss import cross_entropy, local_value
from mmm.parallel.memory.chunked_loss import loss_of
from mmm.parallel.mesh import Layout, batch_sizes, build_mesh
from mmm.parallel.plan import Plan
from mmm.parallel.tensor.replicated import Replicated

__all__ = [
    "DATA_PARALLEL",
    "Layout",
    "Plan",
    "Replicated",
    "apply",
    "balance_experts",
    "batch_sizes",
    "build_mesh",
    "check_compile",
    "check_data_parallel",
    "check_weights",
    "clip_grad_norm",
    "cross_entropy",
    "held_elements",
    "imbalance",
    "local_value",
    "loss_of",
    "materialize",
    "meta_parameters",
    "sync_gradients",
]
