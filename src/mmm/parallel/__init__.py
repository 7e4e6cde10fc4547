"""Meshes, plans, and one folder for each technique.

The names below are for your own programs (docs/your-script.md, docs/models.md). They are stable.
`mmm.models` says how each of our models is parallelized.
"""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.data.local_batches import local_batches as local_batches
    from mmm.layout import DATA_PARALLEL as DATA_PARALLEL
    from mmm.layout import Layout as Layout
    from mmm.layout import Techniques as Techniques
    from mmm.layout import batch_sizes as batch_sizes
    from mmm.layout import check_data_parallel as check_data_parallel
    from mmm.nn.meta import meta_parameters as meta_parameters
    from mmm.parallel.clip import clip_grad_norm as clip_grad_norm
    from mmm.parallel.compile import check_compile as check_compile
    from mmm.parallel.cp.space.strips import own_rows as own_rows
    from mmm.parallel.cp.space.strips import own_slice as own_slice
    from mmm.parallel.dp.microbatches import sync_gradients as sync_gradients
    from mmm.parallel.ema import EMA as EMA
    from mmm.parallel.ep.balance import balance_experts as balance_experts
    from mmm.parallel.ep.balance import imbalance as imbalance
    from mmm.parallel.initial_weights import check_weights as check_weights
    from mmm.parallel.initial_weights import draw_weights as draw_weights
    from mmm.parallel.initial_weights import materialize as materialize
    from mmm.parallel.local import to_local as to_local
    from mmm.parallel.loss import cross_entropy as cross_entropy
    from mmm.parallel.memory.chunked_loss import loss_of as loss_of
    from mmm.parallel.mesh import Mesh as Mesh
    from mmm.parallel.mesh import build_mesh as build_mesh
    from mmm.parallel.parallel_model import ParallelModel as ParallelModel
    from mmm.parallel.partition import Partition as Partition
    from mmm.parallel.partition import partition_model as partition_model
    from mmm.parallel.plan import Field as Field
    from mmm.parallel.plan import Plan as Plan
    from mmm.parallel.state_dict import loaded_values as loaded_values
    from mmm.parallel.techniques import parallelize as parallelize
    from mmm.parallel.tp.replicated import PartialGradient as PartialGradient
    from mmm.parallel.tp.replicated import Replicated as Replicated

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.data.local_batches": "local_batches",
        "mmm.layout": "DATA_PARALLEL Layout Techniques batch_sizes check_data_parallel",
        "mmm.nn.meta": "meta_parameters",
        "mmm.parallel.clip": "clip_grad_norm",
        "mmm.parallel.compile": "check_compile",
        "mmm.parallel.cp.space.strips": "own_rows own_slice",
        "mmm.parallel.dp.microbatches": "sync_gradients",
        "mmm.parallel.ema": "EMA",
        "mmm.parallel.ep.balance": "balance_experts imbalance",
        "mmm.parallel.local": "to_local",
        "mmm.parallel.loss": "cross_entropy",
        "mmm.parallel.initial_weights": "check_weights draw_weights materialize",
        "mmm.parallel.memory.chunked_loss": "loss_of",
        "mmm.parallel.mesh": "Mesh build_mesh",
        "mmm.parallel.plan": "Field Plan",
        "mmm.parallel.parallel_model": "ParallelModel",
        "mmm.parallel.techniques": "parallelize",
        "mmm.parallel.partition": "Partition partition_model",
        "mmm.parallel.tp.replicated": "PartialGradient Replicated",
        "mmm.parallel.state_dict": "loaded_values",
    },
)
