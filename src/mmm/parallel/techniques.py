"""How parallelism is applied to a model, or to one stage of a pipeline, which `parallel_model` has cut before.

Every technique is applied in the one order in which they compose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.layout import UNSHARDED, Techniques
from mmm.nn import init
from mmm.nn.meta import keep_values
from mmm.parallel.checks import check_techniques
from mmm.parallel.compile import compile_modules
from mmm.parallel.cp.context_parallel import apply_context_parallel
from mmm.parallel.cp.space.apply import apply_space
from mmm.parallel.cp.space.trial import read_fields
from mmm.parallel.cp.styles import splits_space
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


def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    plan: Plan,
    precision: Precision,
    techniques: Techniques | None = None,
    **fields: Any,
) -> nn.Module:
    """Parallelize `model` over `mesh`, in place, and return what to train.

    Args:
        model: the full model, or one pipeline stage of it, on the meta device or not. Its parameters are on the meta
            device afterwards; `materialize` then allocates this rank's shards and fills them.
        mesh: the mesh that `build_mesh` returned, or PyTorch's ``init_device_mesh`` with the same names of axes.
        plan: how this kind of model is sharded.
        precision: data types of weights and of compute.
        techniques: what the layout leaves open, such as the data-parallel technique and checkpointing.
        fields: single fields of `Techniques` by name. They take precedence over `techniques`.

    Returns:
        `model`, or for ddp, zero1 and zero2 a wrapper around it: this is what to materialize, call and optimize.

    Raises:
        UserError: the techniques exclude each other, or do not suit the layout or the model.
    """
    mesh = Mesh.of(mesh)
    techniques = replace(techniques or Techniques(), **fields)
    layout = mesh.layout
    device_type = "" if mesh.no_data_parallel else mesh.device_mesh.device_type
    check_techniques(model, plan, layout, techniques, precision.name, device_type)
    # A pipeline stage lacks modules on purpose: there, `ParallelModel` has checked the full model.
    if layout.pp == 1:
        warn_unmatched(plan, model)
    # Several of the steps below replace parameters, and would silently turn one tied weight into two.
    ties = find_ties(model)
    check_parameters(model)
    # From here on parameters have only shapes, so no device holds the full model. Values that the constructor made stay
    # on the host until `materialize` shards them.
    keep_values(model)
    # Weights are stored in this dtype; FSDP or autocast casts them for compute.
    init.convert(model, precision.storage)

    # 0. A chunked loss changes the inputs and outputs of the output layer. TP adapts to these, so it comes later.
    plan = apply_chunked_loss(model, plan, techniques.loss_chunks, precision.compute)
    # Fields: replaces the forwards of convolutions and others. TP replaces parameters around these forwards.
    if splits_space(layout, techniques):
        assert plan.space is not None
        if layout.pp == 1:
            read_fields(model, plan.space, layout.cp)
        apply_space(model, plan.space, mesh["cp"].get_group())
    # BatchNorm normalizes by the statistics of the global batch. It changes the forward of modules, and activation
    # checkpointing must wrap the changed forward.
    apply_batch_norm(model, mesh, techniques, precision.mixed)
    has_fsdp = techniques.data_parallel not in UNSHARDED and not mesh.no_data_parallel
    if precision.mixed and has_fsdp:
        # FSDP casts parameters, and not buffers.
        cast_buffers(model, precision.compute)

    # 1. Tensor parallel: finds modules by name, and decides which heads and hidden units are local to this rank.
    if layout.tp > 1:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        apply_tensor_parallel(model, mesh["tp"], plan)
        retie(model, ties, f"tp {layout.tp}")
        # Some of PyTorch's styles make new parameters that forget `requires_grad`.
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)

    # 2. Context parallel: replaces attention, which now has only this rank's heads.
    if layout.cp > 1 and not splits_space(layout, techniques):
        apply_context_parallel(model, mesh, plan, techniques.ulysses_size(layout.cp))

    # 3. Expert parallel: shards the experts. Before checkpointing, which then recomputes the all-to-all with its block.
    apply_expert_parallel(model, mesh, plan)

    # 4. Activation checkpointing: around sharded modules, so that what it recomputes is sharded too.
    apply_checkpointing(model, plan, techniques.checkpointing)

    # 5. Compile: before FSDP adds its hooks, so that its all-gathers stay outside the graphs.
    if techniques.compile:
        compile_modules(model, plan, layout)

    # 6. Data parallel: last, because it shards what the other techniques have left of each parameter. FSDP makes new
    # meshes for each parameter; `meshes_made_once` lets equal parameters share one.
    with meshes_made_once():
        trained = apply_data_parallel(model, mesh, plan, precision, techniques)
    check_tied(model, ties, f"the layout {layout}")
    # A chunked loss needs the output weight between forward and backward, when FSDP has usually freed it.
    keep_output_gathered(trained)
    return trained
