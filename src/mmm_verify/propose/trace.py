"""One forward of a model, watched: the modules that it calls, and autograd's graph between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from mmm_verify.errors import ConfigError
from mmm_verify.reference import failure_of
from mmm_verify.torch_private import tree_leaves, version_of


@dataclass
class Call:
    """One call of a module.

    Attributes:
        path: of the module. arguments: what it was called with, by position and by name. shape: of its first tensor.
        entered, left: the edges of the graph at its first tensor, and at each tensor that it returned; None where that
            needs no gradient. output: the elements of the first that it returned, of matrices alone.
        returned: the tensors that it returned. version: of the first of them, as it was returned.
    """

    path: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    entered: GradientEdge | None
    shape: tuple[int, ...]
    left: list[GradientEdge | None] = field(default_factory=list)
    output: Tensor | None = None
    returned: list[Tensor] = field(default_factory=list)
    version: int = 0

    @property
    def written(self) -> bool:
        """Whether what it returned was written in place."""
        return bool(self.returned) and version_of(self.returned[0]) != self.version


@dataclass
class Trace:
    """What a forward did.

    Attributes:
        model: that it was of. calls: of each module that was called, by path, in the order of the first calls.
        users: by node of the graph, those that take what its operator gives: nearer to the loss. root: the loss.
    """

    model: nn.Module
    calls: dict[str, list[Call]]
    users: dict[Node, list[Node]]
    root: Node

    def is_used(self, call: Call, tensor: Tensor) -> bool:
        """Whether a tensor that a module returned is used outside: in the graph, or by a module called with it."""
        edge = edge_of(tensor)
        if edge is not None:
            inside = self.inside(call)
            if any(user not in inside for user in self.users.get(edge.node, [])):
                return True
        return id(tensor) in self.taken

    @cached_property
    def taken(self) -> set[int]:
        """The ids of all tensors that modules were called with; the calls hold them."""
        arguments = [call.arguments for calls in self.calls.values() for call in calls]
        return {id(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}

    def inside(self, call: Call) -> set[Node]:
        """The nodes of what a module computed in a call: between what it returned and what it took."""
        stop = {call.entered.node} if call.entered is not None else set()
        return set(backward_from([edge.node for edge in call.left if edge is not None], stop))


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix of its own: nn.Linear, or Hugging Face's Conv1D, whose weight is (in,
    out)."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is Hugging Face's Conv1D: known by its name, so that transformers need not be there."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def widths(module: nn.Module) -> tuple[int, int]:
    """Input and output channels of a matrix."""
    weight = module.get_parameter("weight")
    return (weight.shape[0], weight.shape[1]) if is_transposed(module) else (weight.shape[1], weight.shape[0])


def backward_from(nodes: list[Node], stop: set[Node]) -> Iterator[Node]:
    """The nodes from which `nodes` come, themselves among them, breadth first; not `stop`, and not beyond."""
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
    """Where a tensor stands in the graph; None where it is in none, or is a parameter."""
    if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
        return None
    return get_gradient_edge(tensor)


def trace(model: nn.Module, step: Any) -> Trace:
    """Take a forward.

    Args:
        step: model → the loss.

    Raises:
        ConfigError: it raises, or the loss depends on no parameter.
    """
    calls: dict[str, list[Call]] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{path} is compiled by torch.jit: no plan is found for it; give --parallelize")
    handles = [handle for path, module in model.named_modules() for handle in _watch(path, module, calls)]
    try:
        loss = step(model)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"a step on one device raises {failure_of(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise ConfigError("the loss on one device depends on no parameter: does the step use the model?")
    users: dict[Node, list[Node]] = {loss.grad_fn: []}
    for node in backward_from([loss.grad_fn], set()):
        for before, _ in node.next_functions:
            if before is not None:
                users.setdefault(before, []).append(node)
    return Trace(model, calls, users, loss.grad_fn)


def _watch(path: str, module: nn.Module, calls: dict[str, list[Call]]) -> list[RemovableHandle]:
    """Note each call of a module in `calls`."""
    open_calls: list[Call] = []
    matrix = is_matrix(module)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = next((leaf for leaf in tensors if leaf.is_floating_point()), tensors[0] if tensors else None)
        call = Call(path, (args, kwargs), edge_of(first), tuple(first.shape) if first is not None else ())
        calls.setdefault(path, []).append(call)
        open_calls.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = open_calls.pop()
        if matrix and isinstance(output, Tensor):
            # What F.linear gives is a view: written in place, it would come of another node than the one noted here.
            output = output.clone()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        call.left = [edge_of(tensor) for tensor in tensors]
        call.returned = tensors
        call.version = version_of(tensors[0]) if tensors else 0
        if matrix and tensors:
            call.output = tensors[0].detach().clone()
        return output

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]


def first_line(error: BaseException) -> str:
    """An error's message in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def pattern_of(path: str) -> str:
    """A path with a star for each number: ``layers.0.mlp`` → ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
