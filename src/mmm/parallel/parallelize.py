"""How parallelism is applied: every technique in the one order in which they compose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.layout import UNSHARDED, Techniques
from mmm.nn import draw
from mmm.nn.meta import keep_values
from mmm.parallel.checks import check_techniques
from mmm.parallel.compile import compile_modules
from mmm.parallel.cp.context_parallel import apply_context_parallel
from mmm.parallel.dp.batch_norm import apply_batch_norm
from mmm.parallel.dp.buffers import cast_buffers
from mmm.parallel.dp.data_parallel import apply_data_parallel
from mmm.parallel.ep.expert_parallel import apply_expert_parallel
from mmm.parallel.memory.checkpointing import apply_checkpointing
from mmm.parallel.memory.chunked_loss import apply_chunked_loss, keep_output_gathered
from mmm.parallel.mesh import Mesh, meshes_made_once
from mmm.parallel.plan import Plan, warn_unmatched
from mmm.parallel.ties import check_tied, find_ties, retie
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel
from mmm.parallel.values import check_parameters
from mmm.runtime.device import Precision


def apply(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    plan: Plan,
    precision: Precision,
    techniques: Techniques | None = None,
    **fields: Any,
) -> nn.Module:
    """Parallelize `model` over `mesh`, in place, and return what to train.

    Args:
        model: or one stage of it. Parameters that are not on the meta device move there (`meta_parameters`), and
            `materialize` then gives the model memory and weights.
        mesh: of `build_mesh`, or of PyTorch's ``init_device_mesh`` with axes named as there.
        precision: data types of weights and of compute.
        techniques, fields: what the layout leaves open; single fields of `Techniques` by name take precedence.

    Returns:
        `model`, or for ddp, zero1 and zero2 a wrapper around it: this is what to materialize, call and optimize.

    Raises:
        UserError: techniques that do not go together, or not with the layout or the model.
    """
    mesh, techniques = Mesh.of(mesh), replace(techniques or Techniques(), **fields)
    layout = mesh.layout
    check_techniques(model, plan, layout, techniques, precision.name)
    if layout.pp == 1:  # a stage lacks modules on purpose: `ParallelModel` has checked the full model
        warn_unmatched(plan, model)
    ties = find_ties(model)
    check_parameters(model)
    keep_values(model)
    draw.convert(model, precision.storage)

    # 0. A chunked loss changes the output's input and output, so it precedes TP, which adapts those.
    plan = apply_chunked_loss(model, plan, techniques.loss_chunks, precision.compute)
    _apply_to_buffers(model, mesh, precision, techniques)  # before checkpointing, whose forward contains theirs
    # 1. Tensor parallel: finds modules by name, and decides which heads and hidden units are local to this rank.
    if layout.tp > 1:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        apply_tensor_parallel(model, mesh["tp"], plan)
        retie(model, ties, f"tp {layout.tp}")
        for name in frozen:  # some of PyTorch's styles forget it
            model.get_parameter(name).requires_grad_(False)
    # 2. Context parallel: replaces the attention over these local heads.
    if layout.cp > 1:
        apply_context_parallel(model, mesh, plan, techniques.ulysses_size(layout.cp))
    # 3. Expert parallel: shards the experts. Before checkpointing, which then recomputes the all-to-all with its block.
    apply_expert_parallel(model, mesh, plan)
    # 4. Activation checkpointing: around sharded modules, so that what it recomputes is sharded too.
    apply_checkpointing(model, plan, techniques.checkpointing)
    # 5. Compile: before FSDP adds its hooks, so that its all-gathers stay outside the graphs.
    if techniques.compile:
        compile_modules(model, plan, layout)
    # 6. Data parallel: last, because it shards what all the others have left of each parameter.
    with meshes_made_once():
        trained = apply_data_parallel(model, mesh, plan, precision, techniques)
    check_tied(model, ties, f"the layout {layout}")
    keep_output_gathered(trained)
    return trained


def _apply_to_buffers(model: nn.Module, mesh: Mesh, precision: Precision, techniques: Techniques) -> None:
    """Statistics of a batch are those of the global batch; buffers are cast as FSDP casts parameters."""
    apply_batch_norm(model, mesh, techniques, precision.mixed)
    if precision.mixed and techniques.data_parallel not in UNSHARDED and not mesh.no_data_parallel:
        cast_buffers(model, precision.compute)
