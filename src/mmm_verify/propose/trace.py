"""Watches one forward of a model: the modules that it calls, and autograd's graph between them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from mmm_verify.errors import ConfigError
from mmm_verify.plain import failure_of
from mmm_verify.torch_private import Convolution, tensors_in, version_of

# By position and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        path: path of the module.
        arguments: what it was called with, by position and by name.
        entered: edge of the graph at its first tensor; None if that needs no gradient.
        shape: shape of its first tensor.
        left: edge of the graph at each tensor that it returned; None for one that needs no gradient.
        output: for a matrix, a copy of the first tensor that it returned.
        returned: the tensors that it returned.
        version: version of the first of them when it was returned. Writing in place increases it.
    """

    path: str
    arguments: Arguments
    entered: GradientEdge | None
    shape: tuple[int, ...]
    left: list[GradientEdge | None] = field(default_factory=list)
    output: Tensor | None = None
    returned: list[Tensor] = field(default_factory=list)
    version: int = 0

    @property
    def written(self) -> bool:
        """Whether its first returned tensor was written in place."""
        if not self.returned:
            return False
        return version_of(self.returned[0]) != self.version


@dataclass
class Trace:
    """What a forward did.

    Attributes:
        model: the model.
        calls: the calls of each module that was called, by path, in the order of the first calls.
        users: for each node of the graph, those that take what its operator returns: they are nearer to the loss.
        by_channel: paths of norms that look in the graph as if they kept channels apart.
    """

    model: nn.Module
    calls: dict[str, list[Call]]
    users: dict[Node, list[Node]]
    by_channel: Set[str] = frozenset()

    def is_used(self, call: Call, tensor: Tensor) -> bool:
        """Whether a tensor that a module returned is used outside it: in the graph, or by a module called with it."""
        edge = edge_of(tensor)
        if edge is not None:
            inside = self.inside(call)
            users = self.users.get(edge.node, [])
            if any(user not in inside for user in users):
                return True
        return id(tensor) in self.argument_ids

    @cached_property
    def argument_ids(self) -> set[int]:
        """The ids of all tensors that modules were called with. They stay valid because the calls hold the tensors."""
        ids: set[int] = set()
        for calls in self.calls.values():
            for call in calls:
                ids.update(map(id, tensors_in(call.arguments)))
        return ids

    def inside(self, call: Call) -> set[Node]:
        """The nodes that a module computed in a call: those between what it returned and what it took."""
        stop = set()
        if call.entered is not None:
            stop.add(call.entered.node)
        outputs = [edge.node for edge in call.left if edge is not None]
        return set(backward_from(outputs, stop))


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies channels by a matrix of its own.

    Such modules are nn.Linear, Hugging Face's Conv1D, whose weight is (in, out), and convolutions in one group.
    """
    if is_convolution(module):
        return True
    return (isinstance(module, nn.Linear) or is_transposed(module)) and _has_plain_weight(module)


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution in which each output channel takes all input channels."""
    if not isinstance(module, Convolution) or module.transposed:
        return False
    return module.groups == 1 and _has_plain_weight(module)


def _has_plain_weight(module: nn.Module) -> bool:
    """Whether a module has a weight, perhaps a bias, and nothing else, as one with a parametrized weight has."""
    names = own_names(module)
    return "weight" in names and names <= {"weight", "bias"}


def own_names(module: nn.Module) -> set[str]:
    """The names of a module's own parameters."""
    return {name for name, _ in module.named_parameters(recurse=False)}


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D. Only its name is compared, so transformers need not be installed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def widths(module: nn.Module) -> tuple[int, int]:
    """The number of input and output channels of a matrix."""
    # nn.Linear keeps (out, in), a convolution (out, in, …), Conv1D (in, out).
    rows, columns = module.get_parameter("weight").shape[:2]
    if is_transposed(module):
        return rows, columns
    return columns, rows


def channel_dim(module: nn.Module) -> int:
    """The dim of the channels of what a matrix takes and gives, from the last: -1, or -3 for images."""
    if isinstance(module, Convolution):
        return -1 - len(module.kernel_size)
    return -1


def has_parameters(module: nn.Module) -> bool:
    """Whether a module, or one inside it, has a parameter."""
    return next(module.parameters(), None) is not None


def backward_from(nodes: list[Node], stop: set[Node]) -> Iterator[Node]:
    """Walk the graph from `nodes` towards the inputs, breadth first. Yields each node once, `nodes` included.

    Args:
        stop: nodes that are not yielded, and beyond which the walk does not go.
    """
    seen = set(stop)
    level = nodes
    while level:
        deeper: list[Node] = []
        for node in level:
            if node in seen:
                continue
            seen.add(node)
            yield node
            deeper += [before for before, _ in node.next_functions if before is not None]
        level = deeper


def edge_of(tensor: Any) -> GradientEdge | None:
    """Where a tensor stands in the graph; None if it is not in the graph or is a parameter."""
    if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
        return None
    return get_gradient_edge(tensor)


def trace(model: nn.Module, step: Any, by_channel: Set[str] = frozenset()) -> Trace:
    """Run one forward and watch it.

    Args:
        step: a function that takes the model and returns the loss.
        by_channel: paths of norms that are to look in the graph as if they kept channels apart.

    Raises:
        ConfigError: the forward raises, or the loss depends on no parameter.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{path} is compiled by torch.jit: no plan is found for it; give --parallelize")
    calls: dict[str, list[Call]] = {}
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():
        handles += _watch(path, module, calls, path in by_channel)
    try:
        loss = step(model)
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(f"a step on one device raises {failure_of(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise ConfigError("the loss on one device depends on no parameter: does the step use the model?")
    # Autograd's nodes know their inputs only; here their users are noted as well.
    users: dict[Node, list[Node]] = {loss.grad_fn: []}
    for node in backward_from([loss.grad_fn], set()):
        for before, _ in node.next_functions:
            if before is not None:
                users.setdefault(before, []).append(node)
    return Trace(model, calls, users, by_channel)


def _watch(path: str, module: nn.Module, calls: dict[str, list[Call]], by_channel: bool) -> list[RemovableHandle]:
    """Register hooks that note each call of a module in `calls`. See `trace` for `by_channel`."""
    # A stack: a module may call itself.
    open_calls: list[Call] = []
    is_a_matrix = is_matrix(module)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        # Masks of integers or booleans may come before the activations.
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        candidates = floats or tensors
        call = Call(path, (args, kwargs), entered=None, shape=())
        if candidates:
            call.entered = edge_of(candidates[0])
            call.shape = tuple(candidates[0].shape)
        calls.setdefault(path, []).append(call)
        open_calls.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = open_calls.pop()
        if is_a_matrix and isinstance(output, Tensor):
            # F.linear returns a view. Written in place, it would come from another node than the one noted here.
            output = output.clone()
        if by_channel:
            # The same value, and the gradient of each channel goes to that channel only.
            (x, *_) = tensors_in(args)
            output = output.detach() + (x - x.detach())
        tensors = tensors_in(output)
        call.left = [edge_of(tensor) for tensor in tensors]
        # They are kept alive, so that ids stay valid and versions can be compared.
        call.returned = tensors
        if tensors:
            call.version = version_of(tensors[0])
            if is_a_matrix:
                call.output = tensors[0].detach().clone()
        return output

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def pattern_of(path: str) -> str:
    """Put a star in place of each number in a path: ``layers.0.mlp`` → ``layers.*.mlp``."""
    names = path.split(".")
    return ".".join("*" if name.isdigit() else name for name in names)


def parent_of(path: str) -> str:
    """The path of the module around another: ``layers.0.mlp`` → ``layers.0``. That of the model itself is empty."""
    return path.rpartition(".")[0]
