"""Takes the steps of a program and records what it sees: weights, loss, gradients and what each module returned.

Nothing is judged here. What is recorded of a tensor is this rank's own memory and what a DTensor says about it.
Recording needs no communication: a wrong program is not held up by it, and cannot hold it up.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from mmm_verify.adapter import NO_ADAPTER, Adapter, shard_of, tensors_by_name
from mmm_verify.difference import same_elements, size_of
from mmm_verify.dtypes import by_default
from mmm_verify.errors import ConfigError
from mmm_verify.shards import LocalShard, canonical_name, local_shard, to_local
from mmm_verify.subject import Subject
from mmm_verify.torch_private import flat_pieces, in_backward, replaced, replaced_clipping, tensors_in

# Calls of one module whose outputs are kept.
MAX_CALLS = 64


@dataclass(frozen=True)
class Reduction:
    """A reduction over ranks that a partial DTensor still needs.

    Attributes:
        ranks: the ranks that have a summand each.
        operation: ``sum``, ``avg``, ``max`` or ``min``.
        norm: the p of a p-norm over the ranks' values, which replaces `operation`; None if it is not a norm.
    """

    ranks: tuple[int, ...]
    operation: str
    norm: float | None = None


@dataclass(frozen=True)
class LocalTensor:
    """What a rank has of a tensor.

    Attributes:
        local: its own elements, on the CPU.
        shard: which shard of the full tensor they are; None for a plain tensor, which does not say.
        partial: the reductions that a DTensor still needs, one for each partial axis of its mesh.
    """

    local: Tensor
    shard: LocalShard | None = None
    partial: tuple[Reduction, ...] = ()


@dataclass
class Observed:
    """What was seen of one step, on one rank. Keys are names of parameters, buffers or modules.

    Attributes:
        weights: parameters and buffers before the step.
        parameters: the names in `weights` that are parameters, each with the index of the program's module that has it.
        ties: for each parameter with several names, these names.
        loss: the loss of the batch; None if the rank has none.
        gradients: the gradient of each parameter that requires one; None if it has none.
        main_gradients: parameters whose gradient is only in their attribute ``main_grad``.
        stepped: parameters that have changed by the end of backward, before the optimizer's step.
        after: parameters and buffers after the optimizer's step.
        unclipped: gradients before they were scaled down to a largest norm, where that has changed them.
        norms: the norms that the step clipped by, in the order of its calls.
        left: gradients that the optimizer's step has changed, as it leaves them: it may average them over ranks itself.
        outputs: by module, in the order of the first calls: for each call, the tensors that it returned.
        drops: by dropout module, where its first output is 0.
        dtypes: (function, type of its result) → number of calls, for functions that the loss's gradient goes through.
        autocast: whether autocast was on somewhere.
        optimizer: the class of the optimizer that the program brings along; empty if it brings none.
        second: the second step, with its loss, gradients, after, unclipped, norms and left.
    """

    weights: dict[str, LocalTensor] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    loss: LocalTensor | None = None
    gradients: dict[str, LocalTensor | None] = field(default_factory=dict)
    main_gradients: set[str] = field(default_factory=set)
    stepped: set[str] = field(default_factory=set)
    after: dict[str, LocalTensor] = field(default_factory=dict)
    unclipped: dict[str, LocalTensor] = field(default_factory=dict)
    norms: list[LocalTensor] = field(default_factory=list)
    left: dict[str, LocalTensor] = field(default_factory=dict)
    outputs: dict[str, list[list[LocalTensor]]] = field(default_factory=dict)
    drops: dict[str, Tensor] = field(default_factory=dict)
    dtypes: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    autocast: bool = False
    optimizer: str = ""
    second: Observed | None = None

    def before_clipping(self, name: str) -> LocalTensor | None:
        """A gradient as it was after backward and its reduction over ranks, before the step clipped it."""
        return self.unclipped.get(name, self.gradients.get(name))

    def renamed(self, rename: Callable[[str], str]) -> Observed:
        """A copy in which every parameter, buffer and module has another name.

        Args:
            rename: name → the name in the copy.
        """
        changes: dict[str, Any] = {}
        ties = []
        for group in self.ties:
            ties.append(tuple(rename(name) for name in group))
        changes["ties"] = ties
        for field_name in ("weights", "parameters", "gradients", "after", "unclipped", "left", "outputs", "drops"):
            by_name = getattr(self, field_name)
            changes[field_name] = {rename(name): value for name, value in by_name.items()}
        for field_name in ("main_gradients", "stepped"):
            names = getattr(self, field_name)
            changes[field_name] = {rename(name) for name in names}
        if self.second is not None:
            changes["second"] = self.second.renamed(rename)
        return replace(self, **changes)


def observe(
    subject: Subject,
    program: Any,
    batch: Any,
    mesh: DeviceMesh | None,
    step: bool = True,
    dtypes: bool = False,
) -> Observed:
    """Take a step of a program, and a second one, and record both.

    Args:
        subject: whose step function, optimizer and type are used.
        program: what the step function gets: a module, or a tuple, list or dict with modules in it. If there are
            optimizers in it, these take the steps.
        batch: this rank's batch.
        mesh: the mesh of the parallel program; None on one device, where the adapter is not used.
        step: whether to take the optimizer's step, and then the second step.
        dtypes: whether to count functions by their results' types.

    Raises:
        ConfigError: the program has no module, or the step does not return a number. On one device also if the step has
            called ``backward`` on something else than the loss that it returns.
    """
    with by_default(subject.dtype):
        return _observe(subject, program, batch, mesh, step, dtypes)


def _observe(subject: Subject, program: Any, batch: Any, mesh: DeviceMesh | None, step: bool, dtypes: bool) -> Observed:
    """See `observe`."""
    adapter = NO_ADAPTER
    optimizers: list[Any] = []
    if mesh is not None:
        adapter = subject.adapter
        optimizers = optimizers_of(program)
    modules = modules_of(program)
    seen = Observed()
    weights, seen.ties = tensors_of(modules, adapter)
    seen.weights = _with_values(weights, adapter, program, weights)
    trained: dict[int, nn.Parameter] = {}
    for index, module in enumerate(modules):
        for name, parameter in named_parameters(module):
            seen.parameters |= dict.fromkeys(names_in(name, parameter), index)
            # By identity: a tied parameter is in the optimizer once.
            if parameter.requires_grad:
                trained[id(parameter)] = parameter
    parameters = list(trained.values())
    # Before the first forward, as programs do: during a step FSDP puts other parameters in place of its shards.
    if optimizers:
        seen.optimizer = type(optimizers[0]).__name__
    elif step and parameters:
        optimizers = [subject.optimizer_fn(parameters)]
    watches = contextlib.ExitStack()
    watches.enter_context(watched(modules, seen))
    if dtypes:
        watches.enter_context(_CountDtypes(seen.dtypes))
    # All ranks: the program's own collectives run in here, and in the optimizer's step.
    _compute_gradients(subject, adapter, program, batch, mesh, parameters, seen, seen.weights, watches)
    if not step:
        return seen
    seen.after = _after_step(optimizers, adapter, program, seen, seen.weights)
    # The second step is compared by gradients and weights only: outputs explain nothing that the first has not shown.
    seen.second = Observed()
    _compute_gradients(subject, adapter, program, batch, mesh, parameters, seen.second, seen.after)
    seen.second.after = _after_step(optimizers, adapter, program, seen.second, seen.weights)
    return seen


def _compute_gradients(
    subject: Subject,
    adapter: Adapter,
    program: Any,
    batch: Any,
    mesh: DeviceMesh | None,
    trained: list[nn.Parameter],
    seen: Observed,
    weights: Mapping[str, LocalTensor],
    watches: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Compute the loss and gradients of the batch, and record them in `seen`. See `observe` for errors.

    Args:
        subject, program, batch, mesh: see `observe`.
        adapter: where the program has its gradients.
        trained: the parameters that require a gradient.
        seen: where to record.
        weights: the parameters and buffers before this step, with the values that the adapter returns.
        watches: what else watches the step.
    """
    unclipped: dict[int, Tensor] = {}
    # What the parameters themselves hold: the values that an adapter returns may be rounded.
    before = weights
    if adapter.weights is not None:
        before, _ = tensors_of(modules_of(program), adapter)
    # An optimizer of the program may leave gradients of 0 instead of none.
    has_old_gradients = any(p.grad is not None for p in trained)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watches or contextlib.nullcontext())
        stack.enter_context(watched_clipping(seen, unclipped))
        stack.enter_context(watched_autocast(seen))
        backwards = stack.enter_context(watched_backward())
        loss = subject.step(program, batch, mesh)
    if not isinstance(loss, Tensor | float | int | None):
        raise ConfigError(f"the step's function returns {type(loss).__name__}: it has to return the loss, one number")
    if loss is not None:
        seen.loss = local_tensor(loss)
    if isinstance(loss, Tensor) and loss.requires_grad:
        # The step's function may have called backward itself. Where gradients are elsewhere, or are left from the step
        # before, only the call shows it.
        is_elsewhere = adapter.gradients is not None or any(_has_main_grad(p) for p in trained)
        if is_elsewhere or has_old_gradients:
            was_backward = bool(backwards)
        else:
            was_backward = any(p.grad is not None for p in trained)
        if not was_backward:
            loss.backward()
        # Only on one device: on a rank, this second backward would start collectives that other ranks may not join.
        elif mesh is None and _is_left(loss, trained):
            raise ConfigError(
                "the step calls backward, and the loss that it returns can go backward once more: its gradients would "
                "not be seen. Leave backward to verify, or call it on all of the loss and return loss.detach()"
            )
    keep_gradients(modules_of(program), seen, before, unclipped)
    gradients = _from_adapter(adapter.gradients, "gradients", program, weights)
    seen.gradients |= gradients
    seen.main_gradients -= set(gradients)


def _after_step(
    optimizers: list[Any], adapter: Adapter, program: Any, seen: Observed, before: Mapping[str, LocalTensor]
) -> dict[str, LocalTensor]:
    """Take the optimizers' steps, and return parameters and buffers after it.

    Args:
        optimizers: the program's own, or the one that verify has made.
        adapter: where the program has its weights.
        program: what the ranks run.
        seen: has the gradients before the step, and gets those that it changes.
        before: parameters and buffers before the step.
    """
    modules = modules_of(program)
    for optimizer in optimizers:
        optimizer.step()
        # An adapter's gradients are not those in `grad`.
        if adapter.gradients is None:
            keep_changed_gradients(modules, seen, [parameter for _, parameter in parameters_of(program)])
        optimizer.zero_grad()
    after, _ = tensors_of(modules, adapter)
    return _with_values(after, adapter, program, before)


def _with_values(
    tensors: dict[str, LocalTensor],
    adapter: Adapter,
    program: Any,
    known: Mapping[str, LocalTensor],
) -> dict[str, LocalTensor]:
    """Parameters and buffers, with the values of those that only the adapter can read.

    Args:
        tensors: what the modules themselves have.
        adapter: where the program has its weights.
        program: what the ranks run.
        known: the names that the adapter may use.
    """
    with_values = dict(tensors)
    for name, weight in _from_adapter(adapter.weights, "weights", program, known).items():
        if weight is not None:
            with_values[name] = weight
    return with_values


def _from_adapter(
    function: Callable[[Any], Mapping[str, Tensor | None]] | None,
    kind: str,
    program: Any,
    known: Mapping[str, LocalTensor],
) -> dict[str, LocalTensor | None]:
    """What is local of the tensors that a function of the adapter returns. See `tensors_by_name`."""
    local: dict[str, LocalTensor | None] = {}
    for name, tensor in tensors_by_name(function, kind, program, list(known)).items():
        local[name] = None
        if tensor is not None:
            local[name] = local_tensor(tensor)
    return local


@contextlib.contextmanager
def watched_clipping(seen: Observed, unclipped: dict[int, Tensor]) -> Iterator[None]:
    """Inside, record each norm that the step clips by, and the gradients before they are scaled down.

    Args:
        seen: where the norms are recorded.
        unclipped: id of a parameter → its gradient before clipping; entries are added.
    """

    def watch(
        clip: Callable[..., None], parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        if isinstance(parameters, Tensor):
            clipped = [parameters]
        else:
            clipped = list(parameters)
        before = {}
        for p in clipped:
            if p.grad is not None:
                before[id(p)] = p.grad.clone()
        clip(clipped, max_norm, total_norm, foreach)
        # A largest norm of infinity only measures: nothing is clipped.
        if math.isfinite(max_norm):
            seen.norms.append(local_tensor(total_norm))
        for p in clipped:
            if p.grad is None:
                continue
            gradient = before[id(p)]
            if not same_elements(to_local(gradient), to_local(p.grad)):
                # Of several calls, the first has seen what backward left.
                unclipped.setdefault(id(p), gradient)

    with replaced_clipping(watch):
        yield


@contextlib.contextmanager
def watched_backward() -> Iterator[list[str]]:
    """Inside, note each call of backward. Gives the list to which the calls are added."""
    backward = torch.autograd.backward
    calls: list[str] = []

    # Tensor.backward calls this function too.
    def noted(*args: Any, **settings: Any) -> None:
        calls.append("backward")
        backward(*args, **settings)

    with replaced(torch.autograd, "backward", noted):
        yield calls


@contextlib.contextmanager
def watched_autocast(seen: Observed) -> Iterator[None]:
    """Inside, record whether autocast is switched on. It does nothing to float64: a comparison would not notice it."""
    enter = torch.autocast.__enter__

    def entered(self: torch.autocast) -> Any:
        result = enter(self)
        if self.device != "cpu" or torch.is_autocast_enabled("cpu"):
            seen.autocast = True
        return result

    with replaced(torch.autocast, "__enter__", entered):
        yield


def keep_gradients(
    modules: list[nn.Module],
    seen: Observed,
    before: Mapping[str, LocalTensor],
    unclipped: Mapping[int, Tensor],
    own: Collection[int] | None = None,
) -> None:
    """Record the gradients as the step leaves them, and which parameters it has changed itself.

    Args:
        modules: whose parameters are looked at.
        seen: where to record.
        before: the parameters before the step.
        unclipped: see `watched_clipping`.
        own: ids of the parameters that are looked at. Default: all.
    """
    for module in modules:
        for full_name, parameter in named_parameters(module):
            if own is not None and id(parameter) not in own:
                continue
            weights = local_tensors(full_name, parameter)
            for name, weight in weights.items():
                # A wrapper may have replaced a parameter by one of another shape, which says nothing.
                value = before.get(name, weight).local
                if value.shape == weight.local.shape and not same_elements(value, weight.local):
                    seen.stepped.add(name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                seen.gradients |= dict.fromkeys(weights)
                if _has_main_grad(parameter):
                    seen.main_gradients |= set(weights)
            else:
                seen.gradients |= local_tensors(full_name, parameter, parameter.grad)
            if id(parameter) in unclipped:
                seen.unclipped |= local_tensors(full_name, parameter, unclipped[id(parameter)])


def keep_changed_gradients(modules: list[nn.Module], seen: Observed, trained: Iterable[nn.Parameter]) -> None:
    """Record those gradients that an optimizer's step has changed, but neither freed nor set to 0.

    Args:
        modules: have the parameters' names.
        seen: has the gradients before the step; where to record.
        trained: the optimizer's parameters.
    """
    own = {id(parameter) for parameter in trained}
    for module in modules:
        for full_name, parameter in named_parameters(module):
            if id(parameter) not in own or parameter.grad is None:
                continue
            for name, gradient in local_tensors(full_name, parameter, parameter.grad).items():
                before = seen.gradients.get(name)
                if before and size_of(gradient.local) and not same_elements(before.local, gradient.local):
                    seen.left[name] = gradient


def _has_main_grad(parameter: nn.Parameter) -> bool:
    """Whether its gradient is accumulated in ``main_grad`` in place of ``grad``, as Megatron and others do."""
    return isinstance(getattr(parameter, "main_grad", None), Tensor)


def modules_of(program: Any) -> list[nn.Module]:
    """The modules in what a step function gets.

    Raises:
        ConfigError: there is none.
    """
    modules = [element for element in _elements(program) if isinstance(element, nn.Module)]
    if not modules:
        raise ConfigError(
            f"--parallelize returns {type(program).__name__} without a module: it has to return the module, a tuple, "
            f"list or dict with modules in it, or nothing if the model is changed in place"
        )
    return modules


def parameters_of(program: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a program's modules, with the names that these give them. See `modules_of`."""
    for module in modules_of(program):
        yield from module.named_parameters()


def _elements(program: Any) -> list[Any]:
    """What is in a tuple, list or dict; or the one thing that a program is."""
    if isinstance(program, Mapping):
        return list(program.values())
    if isinstance(program, list | tuple):
        return list(program)
    return [program]


def optimizers_of(program: Any) -> list[Any]:
    """The optimizers in what a step function gets: whatever has `step` and `zero_grad`, and is not a module."""
    optimizers = []
    for element in _elements(program):
        # A module of the user may have such methods too.
        if isinstance(element, nn.Module):
            continue
        step = getattr(element, "step", None)
        zero_grad = getattr(element, "zero_grad", None)
        if callable(step) and callable(zero_grad):
            optimizers.append(element)
    return optimizers


def _is_left(loss: Tensor, trained: list[nn.Parameter]) -> bool:
    """Whether a loss can still go backward: its graph has the buffers that a backward frees."""
    try:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    # "Trying to backward through the graph a second time".
    except RuntimeError:
        return False
    return any(gradient is not None for gradient in gradients)


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's parameters with their names; a tied parameter is listed once for each of its names."""
    named = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named.append((canonical_name(name), parameter))
    return named


def tensors_of(
    modules: list[nn.Module], adapter: Adapter = NO_ADAPTER
) -> tuple[dict[str, LocalTensor], list[tuple[str, ...]]]:
    """Parameters and buffers by name; and, for each parameter with several names, these names.

    Args:
        modules: whose tensors they are.
        adapter: what says which part a plain tensor is.
    """
    tensors: dict[str, LocalTensor] = {}
    # Identity of a parameter → its names.
    names: dict[int, set[str]] = {}
    for module in modules:
        for name, parameter in named_parameters(module):
            tensors |= local_tensors(name, parameter)
            if name in tensors:
                tensors[name] = _placed(name, parameter, tensors[name], adapter)
            names.setdefault(id(parameter), set()).add(name)
        for full_name, buffer in module.named_buffers(remove_duplicate=False):
            name = canonical_name(full_name)
            tensors[name] = _placed(name, buffer, local_tensor(buffer), adapter)
    ties = []
    for group in names.values():
        if len(group) > 1:
            ties.append(tuple(sorted(group)))
    return tensors, ties


def _placed(name: str, tensor: Tensor, local: LocalTensor, adapter: Adapter) -> LocalTensor:
    """What is local of a parameter or buffer, with the part that the adapter says it is."""
    # A DTensor says itself which part it is.
    if local.shard is not None:
        return local
    shard = shard_of(adapter, name, tensor)
    if shard is None:
        return local
    return replace(local, shard=shard)


def names_in(name: str, parameter: nn.Parameter) -> list[str]:
    """The names of the model's parameters in one parameter: several if FSDP1 has flattened them into one."""
    pieces = flat_pieces(parameter)
    if pieces is None:
        return [name]
    # The pieces' names are relative to the module that has the flat parameter.
    prefix = name.removesuffix(name.rpartition(".")[2])
    return [canonical_name(prefix + piece.name) for piece in pieces]


@torch.no_grad()
def local_tensors(name: str, parameter: nn.Parameter, tensor: Tensor | None = None) -> dict[str, LocalTensor]:
    """What is local of a parameter, or of its gradient `tensor`, by the names of the model's parameters in it."""
    if tensor is None:
        tensor = parameter
    pieces = flat_pieces(parameter)
    if pieces is None:
        return {name: local_tensor(tensor)}
    # (elements of the flat shard,): a gradient is flat in the same way.
    tensors = {}
    piece_names = names_in(name, parameter)
    for piece_name, piece in zip(piece_names, pieces, strict=True):
        tensors[piece_name] = local_tensor(tensor[piece.start : piece.end])
    return tensors


@torch.no_grad()
def local_tensor(tensor: Any) -> LocalTensor:
    """Copy what is local of a tensor. A Python number becomes a scalar tensor."""
    if not isinstance(tensor, Tensor):
        return LocalTensor(torch.tensor(tensor, dtype=torch.float64))
    local = to_local(tensor.detach())
    # The gradient of an embedding may be sparse.
    if local.layout != torch.strided:
        local = local.to_dense()
    local = local.clone().cpu()
    if not isinstance(tensor, DTensor):
        return LocalTensor(local)
    partial = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            group = tensor.device_mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
            # Only the placement of a norm (_NormPartial) has a norm_type.
            norm = getattr(placement, "norm_type", None)
            reduction = Reduction(tuple(ranks), placement.reduce_op, norm)  # type: ignore[attr-defined]
            partial.append(reduction)
    shard = local_shard(tensor)
    return LocalTensor(local, shard, tuple(partial))


@contextlib.contextmanager
def watched(modules: list[nn.Module], seen: Observed) -> Iterator[None]:
    """Inside, record what modules return. A forward that is recomputed during backward is not recorded again."""
    handles = []
    for root in modules:
        for full_name, module in root.named_modules():
            # torch.jit's modules take no hooks.
            if isinstance(module, torch.jit.ScriptModule):
                continue
            name = canonical_name(full_name)

            # Otherwise torch.compile would compile the hooks into the program, once for each module.
            @torch.compiler.disable
            def keep(module: nn.Module, args: object, output: Any, name: str = name) -> None:
                calls = seen.outputs.setdefault(name, [])
                if in_backward() or len(calls) >= MAX_CALLS:
                    return
                tensors = [local_tensor(tensor) for tensor in tensors_in(output)]
                calls.append(tensors)
                if is_dropout(module) and tensors and name not in seen.drops:
                    seen.drops[name] = tensors[0].local == 0

            @torch.compiler.disable
            def reserve(module: nn.Module, args: object, name: str = name) -> None:
                # Modules are then listed in the order in which their calls begin, not end.
                seen.outputs.setdefault(name, [])

            handles.append(module.register_forward_pre_hook(reserve))
            handles.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _CountDtypes(TorchFunctionMode):
    """Counts functions by the types of their results, for results that the loss's gradient may go through."""

    def __init__(self, counts: Counter[tuple[str, torch.dtype]]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", repr(func))
        dtypes = set()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                dtypes.add(tensor.dtype)
        # Once for each call, even if it returns several tensors of a type.
        for dtype in dtypes:
            self.counts[name, dtype] += 1
        return output


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is a kind of dropout, by the name of its class."""
    return "drop" in type(module).__name__.lower()


def without_dropout(model: nn.Module) -> bool:
    """Set every dropout rate to 0, in place: in PyTorch's modules, and any attribute with "drop" in its name.

    Returns:
        Whether a rate was above 0.
    """
    had_dropout = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            # PyTorch's modules call their rate `p`.
            is_rate = "drop" in name.lower() or (name == "p" and is_dropout(module))
            if is_rate and isinstance(value, float) and 0 < value <= 1:
                setattr(module, name, 0.0)
                had_dropout = True
    return had_dropout


def innermost_first(observed: Observed) -> list[str]:
    """The modules that were called, in the order in which their first calls end: inner ones before those around them.

    A wrong output is wrong first in the module that ends first. Every module around it, or after it, then returns
    something wrong too.
    """
    ended: list[str] = []
    # Modules whose call has begun and not ended, outermost first.
    running: list[str] = []
    # Outputs are listed in the order in which calls begin.
    for name in observed.outputs:
        while running and not _is_inside(name, running[-1]):
            ended.append(running.pop())
        running.append(name)
    return ended + running[::-1]


def _is_inside(name: str, module: str) -> bool:
    """Whether a module is inside another, by their names. The model's own name is empty."""
    return not module or name.startswith(f"{module}.")
