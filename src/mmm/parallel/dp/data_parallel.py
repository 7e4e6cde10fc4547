"""Data parallelism: every coordinate of the dp axes has its own samples of the global batch.

What each rank keeps of a model of P parameters on N ranks, and about how many elements it sends in a step::

              parameters   gradients   optimizer state   a step
    ddp       P            P           k P               2 P      all-reduce
    zero1     P            P           k P / N           3 P      all-reduce, all-gather of what was updated
    zero2     P            P / N       k P / N           2 P      reduce-scatter, all-gather of what was updated
    fsdp      P / N        P / N       k P / N           3 P      all-gather twice, reduce-scatter (ZeRO-3)
    hsdp      P / S        P / S       k P / S           fsdp over the S ranks of dp_shard, then an all-reduce of P / S

k is 2 for AdamW, and 0 for plain SGD. All of them shard a tensor along dim 0, as evenly as full rows allow.

Gradients are *summed* over the dp axes, not averaged. Each rank differentiates its local loss: the sum over its own
targets, divided by the *global* count of targets. So uneven counts stay right.

Source: Rajbhandari et al., "ZeRO", 2020.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.parallel.dp.ddp import DDP
from mmm.parallel.dp.fsdp import RESHARD_AFTER_FORWARD, apply_expert_fsdp, apply_fsdp
from mmm.parallel.dp.zero import Zero, replicas_of
from mmm.parallel.ep.expert_parallel import experts_of
from mmm.parallel.exact.gradients import sum_gradients_by_tree
from mmm.parallel.mesh import Mesh
from mmm.parallel.plan import Plan
from mmm.runtime.device import Precision


def check_reshard(techniques: Techniques, layout: Layout) -> None:
    """Check that FSDP can free its units as asked for. Needs no process group.

    Raises:
        ConfigError: there is no such choice, or no FSDP.
        LayoutError: there is a pipeline; the message says what to change.
    """
    choice = techniques.reshard_after_forward
    name = config_field("reshard_after_forward")
    if choice not in RESHARD_AFTER_FORWARD:
        choices = ", ".join(RESHARD_AFTER_FORWARD)
        raise ConfigError(f"{name} {choice!r} is not one of {choices}")
    if choice != "auto" and techniques.data_parallel in UNSHARDED:
        raise ConfigError(
            f"{name} {choice}: with {techniques.data_parallel} every rank keeps all parameters; leave it out, or use "
            f"fsdp"
        )
    if choice == "always" and layout.pp > 1:
        raise LayoutError(
            f"{name} {choice}: a stage of pp {layout.pp} is gathered once a step, not once a micro-batch; use auto"
        )


def check_offload(data_parallel: str, dtype: str = "") -> None:
    """Check that a data-parallel technique, and a precision, go with offload. Needs no process group.

    Raises:
        ConfigError: they do not; the message says what to change.
    """
    name = config_field("offload")
    if data_parallel in UNSHARDED:
        raise ConfigError(f"{name} with {data_parallel}: only FSDP keeps what a rank updates on the host; use fsdp")
    if dtype == "fp16":
        raise ConfigError(
            f"{name} with {config_field('dtype')} fp16: scaling gradients that lie on the host has not been shown to "
            f"be right; use bf16 or fp32"
        )


def dp_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh that FSDP works over: (dp_shard,), or for HSDP (dp_replicate, dp_shard). With cp, dp_shard × cp takes
    the place of dp_shard.

    The ranks of a cp group have the same parameters and different tokens: their gradients are terms of one sum.
    """
    shard = "dp_shard_cp" if mesh.layout.cp > 1 else "dp_shard"
    if mesh.layout.dp_replicate == 1:
        return mesh[shard]
    # The joined axis dp_shard_cp has to exist before the mesh below can be sliced by its name.
    mesh[shard]
    # PyTorch 2.13 warns of names of joined axes here, and has no other public way.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh.device_mesh["dp_replicate", shard]


def needs_no_fsdp(layout: Layout, mixed: bool, techniques: Techniques) -> bool:
    """Whether FSDP would only copy parameters and gradients through its buffers.

    So it is on a single rank, if FSDP does not cast parameters or move them to the host. The trainers then leave the
    model as it is (`Mesh.no_data_parallel`).

    Args:
        mixed: whether weights are cast to another dtype for compute.
    """
    is_fsdp = techniques.data_parallel not in UNSHARDED
    return layout.ranks == 1 and is_fsdp and not mixed and not techniques.offload


def apply_data_parallel(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    precision: Precision,
    techniques: Techniques,
) -> nn.Module:
    """The model to train: `model` itself, sharded in place, or for ddp, zero1 and zero2 a wrapper around it.

    Raises:
        ConfigError: offload on MPS, whose memory is that of the host.
    """
    technique = techniques.data_parallel
    if mesh.no_data_parallel:
        if techniques.offload:
            raise ConfigError(f"{config_field('offload')} on mps: it has the host's memory; leave it out")
        return model
    if technique not in UNSHARDED:
        if mesh.experts is not None:
            # Before the units that contain them: FSDP leaves out of a unit what is a unit already.
            apply_expert_fsdp(model, mesh.experts, plan, precision, techniques.offload)
        apply_fsdp(model, dp_mesh(mesh), plan, precision, techniques)
        if techniques.exact is not None:
            replicas = mesh["dp_replicate"].get_group() if mesh.layout.dp_replicate > 1 else None
            sum_gradients_by_tree(model, replicas)
        return model
    if technique == "ddp":
        return DDP(model, replicas_of(mesh), precision)
    experts = experts_of(model, plan) if mesh.experts is not None else []
    return Zero(model, mesh, precision, experts, keep_gradients=technique == "zero1")
