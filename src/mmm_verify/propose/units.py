"""Finds FSDP units: the repeated blocks of a model, and its large modules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.graph import Node

from mmm_verify.propose.channels import ACCUMULATE
from mmm_verify.propose.trace import Trace, has_parameters, pattern_of
from mmm_verify.torch_private import BatchNorm

# The share of all parameters that makes a module without children a unit.
LARGE = 0.1
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Units:
    """What was found for FSDP.

    Attributes:
        blocks: paths of repeated blocks, in the order of the model.
        large: paths of large modules.
        root: modules that look like units and yet go with the root: the pattern of their paths → why.
        batch_norms: paths of modules that normalize over the batch.
        own_batch_norms: paths of batch norms whose class has a forward of its own.
    """

    blocks: list[str] = field(default_factory=list)
    large: list[str] = field(default_factory=list)
    root: dict[str, str] = field(default_factory=dict)
    batch_norms: list[str] = field(default_factory=list)
    own_batch_norms: list[str] = field(default_factory=list)


def find_units(trace: Trace) -> Units:
    """Find the FSDP units of a model. A unit is called once per forward and shares no parameter with other modules."""
    model = trace.model
    units = Units()
    candidates = _blocks(model)
    for path in candidates:
        _place(trace, path, units, units.blocks)
    # Large modules that are in no block, such as embeddings.
    total = sum(parameter.numel() for parameter in model.parameters())
    for path, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters())
        has_children = any(module.children())
        in_block = any(path.startswith(f"{block}.") for block in candidates)
        if not path or has_children or in_block:
            continue
        if size >= LARGE * total:
            _place(trace, path, units, units.large)
    for path, module in model.named_modules():
        if not isinstance(module, BatchNorm):
            continue
        # Another forward may not use what sync_batch_norm replaces.
        names = [kind.__name__ for kind in type(module).__mro__]
        # timm's BatchNormAct2d is known to sync_batch_norm.
        if type(module).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward) or "BatchNormAct2d" in names:
            units.batch_norms.append(path)
        else:
            units.own_batch_norms.append(path)
    return units


def ties_of(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tie for tie in names.values() if len(tie) > 1]


def _blocks(model: nn.Module) -> list[str]:
    """The outermost elements of lists whose class occurs several times in lists."""
    elements: list[tuple[str, type]] = []

    # The search does not go into an element: blocks of blocks are gathered as one.
    def search(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}".lstrip(".")
            in_list = isinstance(module, CONTAINERS)
            is_list = isinstance(child, CONTAINERS)
            has_children = any(child.children())
            if in_list and not is_list and has_children and has_parameters(child):
                elements.append((child_path, type(child)))
            else:
                search(child_path, child)

    search("", model)
    counts = Counter(kind for _, kind in elements)
    blocks = []
    for path, kind in elements:
        if counts[kind] > 1:
            blocks.append(path)
    return blocks


def _place(trace: Trace, path: str, units: Units, paths: list[str]) -> None:
    """Note a module as a unit, or why it goes with the root."""
    why = _why_root(trace, path)
    if why:
        units.root.setdefault(pattern_of(path), why)
    else:
        paths.append(path)


def _why_root(trace: Trace, path: str) -> str:
    """Why a module goes with the root; empty if it can be a unit."""
    # FSDP gathers a unit at each call, and frees it after the call.
    n_calls = len(trace.calls.get(path, ()))
    if n_calls == 0:
        return "not called by itself"
    if n_calls > 1:
        return f"called {n_calls} times a forward"
    prefix = f"{path}."
    # The gradients of a tied parameter are summed in one place, which must be one unit.
    for names in ties_of(trace.model):
        inside = [name for name in names if name.startswith(prefix)]
        outside = [name for name in names if not name.startswith(prefix)]
        if inside and outside:
            name = inside[0].removeprefix(prefix)
            return f"{name} is tied to {outside[0]}"
    used = _used_outside(trace, path)
    if used:
        return f"{used} is used outside of its forward too"
    return ""


def _used_outside(trace: Trace, path: str) -> str:
    """A parameter of a module that something uses while the module is not called; empty if there is none.

    FSDP has freed such a parameter at that time.
    """
    module = trace.model.get_submodule(path)
    # A tensor compares element by element, so it is found by its id.
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    (call,) = trace.calls[path]
    # The nodes of its own forward.
    inside = trace.inside(call)
    for node, users in trace.users.items():
        if node.name() != ACCUMULATE:
            continue
        name = own.get(id(node.variable))  # type: ignore[attr-defined]
        if name is None:
            continue
        if any(user not in inside for user in users):
            return name
    return ""


def parameter_of(trace: Trace, node: Node) -> str:
    """The name of the parameter that a node accumulates the gradient of; empty if it is not one of the model's."""
    if node.name() != ACCUMULATE:
        return ""
    variable = node.variable  # type: ignore[attr-defined]
    for name, parameter in trace.model.named_parameters():
        if parameter is variable:
            return name
    return ""
