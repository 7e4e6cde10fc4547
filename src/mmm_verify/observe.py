"""One step of a program, watched: its weights, loss, gradients and what each module returned. Nothing is judged here.

What is kept of a tensor is this rank's own memory and what a DTensor says of it; no rank communicates to keep it, so
that a program that is wrong is not held up, and holds up nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from mmm_verify.difference import same_elements
from mmm_verify.errors import ConfigError
from mmm_verify.shards import LocalPart, canonical_name, local_part, to_local
from mmm_verify.subject import Subject
from mmm_verify.torch_private import flat_pieces, in_backward, replaced, replaced_clipping, tree_leaves

MOST_CALLS = 64  # of one module that are kept


@dataclass(frozen=True)
class Reduction:
    """A reduction over ranks that is still to be made.

    Attributes:
        operation: ``sum``, ``avg``, ``max`` or ``min``. norm: the p of a p-norm, which it is in place of these.
    """

    ranks: tuple[int, ...]
    operation: str
    norm: float | None = None


@dataclass(frozen=True)
class LocalTensor:
    """What a rank has of a tensor.

    Attributes:
        local: its own elements, on the CPU.
        part: which part of the full tensor they are; None of a plain tensor, which does not say.
        partial: the reductions that a DTensor still needs, one for each such dim of its mesh.
    """

    local: Tensor
    part: LocalPart | None = None
    partial: tuple[Reduction, ...] = ()


@dataclass
class Observed:
    """What was seen of one step, on one rank.

    Attributes:
        weights: parameters and buffers before it, by name. ties: names of one and the same parameter.
        loss: of the batch; None where the rank has none.
        gradients: of what requires one; None where there is none. after: parameters and buffers after the step.
        main_gradients: names of parameters whose gradient is in their attribute ``main_grad`` alone.
        stepped: names of parameters that have other values when backward is over, before the optimizer's step.
        unclipped: those gradients that were scaled down to a largest norm, as they were before.
        norms: what the step clipped by, in the order of its calls.
        outputs: by module, in the order of the first calls: of each call its tensors.
        drops: by module of dropout, where its first output is 0.
        types: functions that the loss's gradient goes through, with a type that they returned → how often.
        autocast: whether autocast was on somewhere.
        second: the step after it, with loss, gradients, after, unclipped and norms.
    """

    weights: dict[str, LocalTensor] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    loss: LocalTensor | None = None
    gradients: dict[str, LocalTensor | None] = field(default_factory=dict)
    main_gradients: set[str] = field(default_factory=set)
    stepped: set[str] = field(default_factory=set)
    after: dict[str, LocalTensor] = field(default_factory=dict)
    unclipped: dict[str, LocalTensor] = field(default_factory=dict)
    norms: list[LocalTensor] = field(default_factory=list)
    outputs: dict[str, list[list[LocalTensor]]] = field(default_factory=dict)
    drops: dict[str, Tensor] = field(default_factory=dict)
    types: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    autocast: bool = False
    second: Observed | None = None

    def before_clipping(self, name: str) -> LocalTensor | None:
        """A gradient as backward and the ranks have made it."""
        return self.unclipped.get(name, self.gradients.get(name))


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """What a forward makes without a dtype, such as ``torch.zeros(n)``, is float64, as the weights are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@float64_by_default()
def observe(
    subject: Subject,
    program: Any,
    batch: Any,
    mesh: DeviceMesh | None,
    outputs: bool = True,
    step: bool = True,
    types: bool = False,
) -> Observed:
    """Take a step, and a second one.

    Args:
        program: what `step_fn` gets: a module, or a tuple, list or dict with modules in it.
        outputs: whether to keep what modules return. step: whether to take the optimizer's step, and the second one.
        types: whether to look at the types in which functions compute.

    Raises:
        ConfigError: the program has no module, or the step returns no number; on one device also where the step has
            called ``backward``, and not on the loss that it returns.
    """
    modules = modules_of(program)
    seen = Observed()
    seen.weights, seen.ties = tensors_of(modules)
    seen.parameters = {
        name for module in modules for full_name, p in named_parameters(module) for name in names_in(full_name, p)
    }
    # As programs do, before the first forward: FSDP has other parameters in place until it has sharded them again.
    trained = [p for p in {id(p): p for module in modules for p in module.parameters()}.values() if p.requires_grad]
    optimizer = subject.optimizer_fn(trained) if step and trained else None
    watches = contextlib.ExitStack()
    if outputs:
        watches.enter_context(watched(modules, seen))
    if types:
        watches.enter_context(_Types(seen.types))
    _compute_gradients(subject, program, batch, mesh, trained, seen, seen.weights, watches)
    if not step:
        return seen
    _update(optimizer, modules, seen)
    seen.second = Observed()
    _compute_gradients(subject, program, batch, mesh, trained, seen.second, seen.after)
    _update(optimizer, modules, seen.second)
    return seen


def _compute_gradients(
    subject: Subject,
    program: Any,
    batch: Any,
    mesh: DeviceMesh | None,
    trained: list[nn.Parameter],
    seen: Observed,
    weights: Mapping[str, LocalTensor],
    watches: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Loss and gradients of the batch. Arguments and errors as of `observe`.

    Args:
        weights: the parameters before it. watches: what else watches the step.
    """
    unclipped: dict[int, Tensor] = {}
    with watches or contextlib.nullcontext(), watched_clipping(seen, unclipped), watched_autocast(seen):
        loss = subject.step(program, batch, mesh)
    if not isinstance(loss, Tensor | float | int | None):
        raise ConfigError(f"the step's function returns {type(loss).__name__}: it has to return the loss, one number")
    seen.loss = None if loss is None else local_tensor(loss)
    if isinstance(loss, Tensor) and loss.requires_grad:
        if not any(p.grad is not None for p in trained):
            loss.backward()
        elif mesh is None and _is_left(loss, trained):
            raise ConfigError(
                "the step calls backward, and the loss that it returns can go backward once more: its gradients would "
                "not be seen. Leave backward to verify, or call it on all of the loss and return loss.detach()"
            )
    _keep_gradients(modules_of(program), seen, weights, unclipped)


def _update(optimizer: torch.optim.Optimizer | None, modules: list[nn.Module], seen: Observed) -> None:
    """Take the optimizer's step."""
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    seen.after, _ = tensors_of(modules)


@contextlib.contextmanager
def watched_clipping(seen: Observed, unclipped: dict[int, Tensor]) -> Iterator[None]:
    """Keep the norm that a step clips by, and gradients before it scales them down.

    Args:
        unclipped: by the parameter's id; is added to.
    """

    def watch(
        clip: Callable[..., None], parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before = {id(p): p.grad.clone() for p in clipped if p.grad is not None}
        clip(clipped, max_norm, total_norm, foreach)
        if math.isfinite(max_norm):
            seen.norms.append(local_tensor(total_norm))
        for p in clipped:
            if p.grad is None:
                continue
            gradient = before[id(p)]
            if not same_elements(to_local(gradient), to_local(p.grad)):
                unclipped.setdefault(id(p), gradient)

    with replaced_clipping(watch):
        yield


@contextlib.contextmanager
def watched_autocast(seen: Observed) -> Iterator[None]:
    """See whether autocast is on: it does nothing to float64."""
    enter = torch.autocast.__enter__

    def entered(self: torch.autocast) -> Any:
        result = enter(self)
        if self.device != "cpu" or torch.is_autocast_enabled("cpu"):
            seen.autocast = True
        return result

    with replaced(torch.autocast, "__enter__", entered):
        yield


def _keep_gradients(
    modules: list[nn.Module], seen: Observed, before: Mapping[str, LocalTensor], unclipped: Mapping[int, Tensor]
) -> None:
    """Keep the gradients as the step leaves them, and whether it has changed the parameters themselves.

    Args:
        before: the parameters before it. unclipped: as of `watched_clipping`.
    """
    for module in modules:
        for full_name, parameter in named_parameters(module):
            weights = local_tensors(full_name, parameter)
            for name, weight in weights.items():
                value = before.get(name, weight).local
                if value.shape == weight.local.shape and not same_elements(value, weight.local):
                    seen.stepped.add(name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                seen.gradients |= dict.fromkeys(weights)
            else:
                seen.gradients |= local_tensors(full_name, parameter, parameter.grad)
            if id(parameter) in unclipped:
                seen.unclipped |= local_tensors(full_name, parameter, unclipped[id(parameter)])
            if parameter.grad is None and isinstance(getattr(parameter, "main_grad", None), Tensor):
                seen.main_gradients |= set(weights)


def modules_of(program: Any) -> list[nn.Module]:
    """The modules of what a step gets.

    Raises:
        ConfigError: there is none.
    """
    elements = program.values() if isinstance(program, Mapping) else program
    modules = [element for element in elements if isinstance(element, nn.Module)] if _is_several(program) else [program]
    if not modules or not isinstance(modules[0], nn.Module):
        raise ConfigError(
            f"--parallelize returns {type(program).__name__} without a module: it has to return the module, a tuple, "
            f"list or dict with modules in it, or nothing where the model is changed in place"
        )
    return modules


def _is_several(program: Any) -> bool:
    return isinstance(program, list | tuple | Mapping)


def _is_left(loss: Tensor, trained: list[nn.Parameter]) -> bool:
    """Whether a loss has not gone backward yet: its graph has what a backward frees."""
    try:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError:  # backward through the graph a second time
        return False
    return any(gradient is not None for gradient in gradients)


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All names, those of tied parameters too."""
    return [(canonical_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)]


def tensors_of(modules: list[nn.Module]) -> tuple[dict[str, LocalTensor], list[tuple[str, ...]]]:
    """Parameters and buffers by name, and the names of those that are one tensor."""
    kept: dict[str, LocalTensor] = {}
    names: dict[int, list[str]] = {}
    for module in modules:
        for name, parameter in named_parameters(module):
            kept |= local_tensors(name, parameter)
            names.setdefault(id(parameter), []).append(name)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            kept[canonical_name(name)] = local_tensor(buffer)
    return kept, [tuple(sorted(set(group))) for group in names.values() if len(set(group)) > 1]


def names_in(name: str, parameter: nn.Parameter) -> list[str]:
    """The names of the parameters that one parameter has in it: of one that FSDP has made flat, several."""
    pieces = flat_pieces(parameter)
    if pieces is None:
        return [name]
    prefix = name.removesuffix(name.rpartition(".")[2])
    return [canonical_name(prefix + piece.name) for piece in pieces]


@torch.no_grad()
def local_tensors(name: str, parameter: nn.Parameter, tensor: Tensor | None = None) -> dict[str, LocalTensor]:
    """What is local of a parameter by the names that it has in it, or of its gradient `tensor`."""
    tensor = parameter if tensor is None else tensor
    pieces = flat_pieces(parameter)
    if pieces is None:
        return {name: local_tensor(tensor)}
    return {
        own: local_tensor(tensor[piece.start : piece.end])
        for own, piece in zip(names_in(name, parameter), pieces, strict=True)
    }


@torch.no_grad()
def local_tensor(tensor: Any) -> LocalTensor:
    """A copy of what is local, without gaps. A number becomes a scalar tensor."""
    if not isinstance(tensor, Tensor):
        return LocalTensor(torch.tensor(tensor, dtype=torch.float64))
    local = to_local(tensor.detach())
    if local.layout != torch.strided:  # the gradient of an embedding may be sparse
        local = local.to_dense()
    local = local.clone().cpu()
    if not isinstance(tensor, DTensor):
        return LocalTensor(local)
    partial = [
        Reduction(
            tuple(dist.get_process_group_ranks(tensor.device_mesh.get_group(index))),
            placement.reduce_op,  # type: ignore[attr-defined]
            getattr(placement, "norm_type", None),
        )
        for index, placement in enumerate(tensor.placements)
        if placement.is_partial()
    ]
    return LocalTensor(local, local_part(tensor), tuple(partial))


@contextlib.contextmanager
def watched(modules: list[nn.Module], seen: Observed) -> Iterator[None]:
    """Keep what modules return in a forward, also what they return when the forward is not repeated in a backward."""
    handles = []
    for root in modules:
        for full_name, module in root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            name = canonical_name(full_name)

            @torch.compiler.disable  # or the hooks are compiled into the program, once for each module
            def keep(module: nn.Module, args: object, output: Any, name: str = name) -> None:
                calls = seen.outputs.setdefault(name, [])
                if in_backward() or len(calls) >= MOST_CALLS:
                    return
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                calls.append([local_tensor(tensor) for tensor in tensors])
                if is_dropout(module) and tensors and name not in seen.drops:
                    seen.drops[name] = calls[-1][0].local == 0

            @torch.compiler.disable
            def reserve(module: nn.Module, args: object, name: str = name) -> None:
                seen.outputs.setdefault(name, [])  # in the order in which they begin

            handles.append(module.register_forward_pre_hook(reserve))
            handles.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Types(TorchFunctionMode):
    """Counts functions by the types of what they return, where the loss's gradient goes through it."""

    def __init__(self, seen: Counter[tuple[str, torch.dtype]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for dtype in {tensor.dtype for tensor in tensors}:
            self.seen[getattr(func, "__name__", repr(func)), dtype] += 1
        return output


def is_dropout(module: nn.Module) -> bool:
    return "drop" in type(module).__name__.lower()


def without_dropout(model: nn.Module) -> bool:
    """Set every rate of dropout to 0, in place: of PyTorch's modules, and any attribute named so. Returns whether any
    was above."""
    found = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            rate = "drop" in name.lower() or (name == "p" and is_dropout(module))
            if rate and isinstance(value, float) and 0 < value <= 1:
                setattr(module, name, 0.0)
                found = True
    return found
