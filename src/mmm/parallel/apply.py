"""Apply a layout to a model: each technique in its one right place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mmm.errors import ConfigError, LayoutError
from mmm.models import weights
from mmm.parallel.context.apply import apply_context_parallel
from mmm.parallel.data.apply import apply_data_parallel, check_data_parallel
from mmm.parallel.data.fsdp import is_offloaded
from mmm.parallel.data.replicas import Replicas
from mmm.parallel.expert.apply import apply_expert_parallel
from mmm.parallel.memory.checkpointing import apply_checkpointing
from mmm.parallel.memory.chunked_loss import apply_chunked_loss, keep_output_gathered
from mmm.parallel.memory.offload import check_offload
from mmm.parallel.memory.tiling import apply_tiles, check_tiles
from mmm.parallel.mesh import Layout, has_axis, layout_of
from mmm.parallel.plan import Plan, find, warn_unmatched
from mmm.parallel.tensor.apply import apply_tensor_parallel
from mmm.parallel.ties import check_tied, find_ties, tie_again
from mmm.runtime.device import Precision
from mmm.runtime.log import get_logger


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    precision: Precision,
    *,
    data_parallel: str = "fsdp",
    cp_style: str = "ring",
    checkpointing: str = "none",
    compile: bool = False,
    loss_chunks: int = 1,
    tile: int = 1,
    offload: bool = False,
) -> nn.Module:
    """Cut `model` over `mesh`, in place, and give back what to train.

    Args:
        model: its parameters on the meta device (`meta_parameters`), so that no rank ever holds it whole;
            `materialize` then gives it its weights.
        mesh: of `build_mesh`.
        precision: data types of weights and of compute.
        data_parallel: ``ddp``, ``zero1``, ``zero2``, ``fsdp`` (the same as ``zero3``) or ``hsdp``.
        cp_style: how attention goes over a cut sequence, where the mesh has cp: ``ring`` or ``ulysses``.
        checkpointing: of activations, of what the plan names: ``none``, ``full`` or ``selective``.
        compile: compile what the plan says can be compiled.
        loss_chunks: chunks of the sequence that logits and loss are worked out in; the loss is `loss_of` the model.
        tile: tiles of the sequence that MLPs are worked out in.
        offload: keep what the optimizer works on in the host's memory.

    Returns:
        `model`, or for ddp, zero1 and zero2 a wrapper around it: this is what to materialize, call and optimize.
    """
    layout = layout_of(mesh)
    check_data_parallel(data_parallel, layout)
    if compile:
        check_compile(plan, layout)
        check_compiled_experts(model, plan, checkpointing)
    if offload:
        check_offload(data_parallel, precision.name)
    if not has_axis(mesh, "pp"):  # a stage lacks modules rightly: `ParallelModel` looks at the whole model
        warn_unmatched(plan, model)
    ties = find_ties(model)
    weights.convert(model, precision.storage)
    # 0. What is worked out piece by piece, before anything is cut: its modules take and give something else under tp.
    plan = apply_chunked_loss(model, plan, loss_chunks, precision.compute)
    check_tiles(tile, checkpointing)
    plan = apply_tiles(model, plan, tile)
    # 1. Tensor parallel first: it decides which part of each matrix is this rank's, and finds modules by their names.
    tp = has_axis(mesh, "tp")
    if tp:
        apply_tensor_parallel(model, mesh["tp"], plan)
        tie_again(model, ties, f"tp {layout.tp}")
    # 2. Context parallel: attention over the heads that are left here, and over the other ranks' tokens.
    if has_axis(mesh, "cp"):
        apply_context_parallel(model, mesh["cp"], plan, cp_style)
    # 3. Expert parallel: which whole experts are this rank's. What it sends is repeated with the rest of a block in 4.
    apply_expert_parallel(model, mesh, plan)
    # 4. Activation checkpointing around the cut modules, so that what it repeats is the cut work.
    apply_checkpointing(model, plan, checkpointing)
    # 5. Compile what computes, before FSDP puts its hooks around it: gathering parameters stays outside the graphs.
    if compile:
        compile_modules(model, plan, plan.compiled_with_tp if tp else plan.compiled)
    # 6. Data parallel last: it takes what is left of each parameter, and must see the parameters as they will be used.
    trained = apply_data_parallel(model, mesh, plan, precision, data_parallel, offload)
    check_tied(model, ties, f"the layout {layout}")
    keep_output_gathered(trained)
    return trained


def check_compile(plan: Plan, layout: Layout) -> None:
    """Whether a model can be compiled on a layout; needs no process group.

    Raises:
        LayoutError: nothing of it has right gradients when compiled there.
    """
    if layout.tp > 1 and plan.compiled and not plan.compiled_with_tp:
        raise LayoutError(
            f"--compile with tp {layout.tp}: PyTorch compiles the layers of this model, which take DTensors there, to "
            f"silently wrong gradients; leave --compile out, or use tp 1"
        )
    if layout.cp > 1:
        raise LayoutError(
            f"--compile with cp {layout.cp}: attention that talks to other ranks has not been shown to compile to the "
            f"right gradients; leave --compile out, or use cp 1"
        )


def check_compiled_experts(model: nn.Module, plan: Plan, checkpointing: str) -> None:
    """Whether what is compiled may be checkpointed; needs no process group.

    Raises:
        ConfigError: it has experts, and PyTorch would compile nothing, without a word.
    """
    if checkpointing != "none" and any(find(model, pattern) for pattern in plan.experts):
        raise ConfigError(
            f"--compile with activation checkpointing {checkpointing!r} of layers with experts: PyTorch leaves experts "
            f"out of what it compiles (how many rows one has is known only once the router has chosen), and cannot "
            f"leave out a part of what is checkpointed: it would compile nothing; leave one of the two out"
        )


def compile_modules(model: nn.Module, plan: Plan, patterns: tuple[str, ...]) -> None:
    """``torch.compile`` the modules that fit `patterns`, each on its own, in place, but for mixtures of experts."""
    for pattern in plan.experts:  # how many rows an expert has is known only once the router has chosen
        for module in find(model, pattern):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    modules = [module for pattern in patterns for module in find(model, pattern)]
    get_logger().info("compile: %d modules (%s)", len(modules), ", ".join(patterns) or "the plan names none")
    for module in modules:
        module.compile()


def check_weights(model: nn.Module) -> None:
    """Whether every parameter of a model, and every buffer without values, has a rule; needs no process group.

    Raises:
        ConfigError: which has none, and what to change.
    """
    if wrong := weights.parameter_problems(model) + weights.buffer_problems(model):
        raise ConfigError("; ".join(wrong))


def materialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a model memory on `device` and its initial weights; each rank draws its own part. Buffers keep their values.

    Copies that are whole on every rank begin to talk here, because what they send must have memory first.

    Raises:
        ConfigError: as `check_weights`.
    """
    inner = model.module if isinstance(model, Replicas) else model
    check_weights(inner)
    kept, ties = dict(inner.named_buffers(remove_duplicate=False)), find_ties(inner)
    inner.to_empty(device="cpu" if is_offloaded(inner) else device)
    tie_again(inner, ties, "its memory")
    _put_back(inner, kept, device)
    empty = {name for name, buffer in kept.items() if buffer.is_meta}
    weights.initialize(inner, seed, box_of=local_box, local_of=local_part, empty=empty)
    if isinstance(model, Replicas):
        model.connect()


def _put_back(model: nn.Module, kept: Mapping[str, Tensor], device: torch.device) -> None:
    """Buffers as they were, on the compute device (also with offload, which moves parameters): those with values, and
    memory for those without. What several modules share stays shared."""
    moved = {
        id(buffer): torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        for buffer in kept.values()
    }
    for name, buffer in kept.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = moved[id(buffer)]


def local_part(parameter: Tensor) -> Tensor:
    """The tensor that this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_box(parameter: Tensor) -> weights.ShardBox:
    """Which part of the whole parameter this rank holds.

    A dim cut by several axes is cut by one after the other, each time as ``torch.chunk`` does: outer axes first, except
    that strided cuts (FSDP, applied over dp to what tensor parallel left) come last.
    """
    if not isinstance(parameter, DTensor):
        return weights.full_box(parameter)
    start, length = [0] * parameter.ndim, list(parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = [(axis, cut) for axis, cut in enumerate(parameter.placements) if getattr(cut, "dim", None) is not None]
    for axis, cut in sorted(cuts, key=lambda pair: type(pair[1]) is not Shard):
        dim = cut.dim  # type: ignore[attr-defined]
        chunk = -(-length[dim] // parameter.device_mesh.size(axis))
        first = min(coordinate[axis] * chunk, length[dim])
        start[dim] += first
        length[dim] = min(chunk, length[dim] - first)
    held = tuple(local_part(parameter).shape)
    assert held == tuple(length), f"holds {held}, worked out {length} of {tuple(parameter.shape)}"
    return weights.ShardBox(tuple(start), tuple(length), tuple(parameter.shape))
