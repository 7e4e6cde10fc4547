"""Meshes, plans, and a folder a technique; ``plans/`` says how each model is parallelized.

The names below are what a program of one's own uses (docs/your-script.md, docs/models.md), and stay.
"""

from mmm.data.local_batches import local_batches
from mmm.models.meta import meta_parameters
from mmm.parallel.apply import apply
from mmm.parallel.clip import clip_grad_norm
from mmm.parallel.compile import check_compile
from mmm.parallel.data.apply import DATA_PARALLEL, check_data_parallel, sync_gradients
from mmm.parallel.ema import EMA
from mmm.parallel.expert.balance import balance_experts, imbalance
from mmm.parallel.local import to_local
from mmm.parallel.loss import cross_entropy
from mmm.parallel.materialize import check_weights, materialize
from mmm.parallel.memory.chunked_loss import loss_of
from mmm.parallel.mesh import Layout, Mesh, batch_sizes, build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import Plan
from mmm.parallel.techniques import Techniques
from mmm.parallel.tensor.replicated import PartialGradient, Replicated
from mmm.parallel.values import loaded_values

__all__ = [
    "DATA_PARALLEL",
    "EMA",
    "Layout",
    "Mesh",
    "ParallelModel",
    "PartialGradient",
    "Partition",
    "Plan",
    "Replicated",
    "Techniques",
    "apply",
    "balance_experts",
    "batch_sizes",
    "build_mesh",
    "check_compile",
    "check_data_parallel",
    "check_weights",
    "clip_grad_norm",
    "cross_entropy",
    "imbalance",
    "loaded_values",
    "local_batches",
    "loss_of",
    "materialize",
    "meta_parameters",
    "partition_model",
    "sync_gradients",
    "to_local",
]
