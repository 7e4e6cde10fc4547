"""FSDP units, found: the repeated blocks of a model, and its large matrices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.graph import Node

from mmm_verify.propose.channels import ACCUMULATE
from mmm_verify.propose.trace import Trace, parent_of, pattern_of
from mmm_verify.torch_private import BatchNorm

LARGE = 0.1  # of all parameters: what a module alone has to have to be a unit
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Units:
    """What was found for FSDP.

    Attributes:
        blocks: paths of repeated blocks, in the order of the model. large: of large modules.
        root: what goes with the root though it looks like a unit: the pattern of its path → why.
        batch_norms: paths of modules that normalize over the batch. own_batch_norms: of a class with its own forward.
    """

    blocks: list[str] = field(default_factory=list)
    large: list[str] = field(default_factory=list)
    root: dict[str, str] = field(default_factory=dict)
    batch_norms: list[str] = field(default_factory=list)
    own_batch_norms: list[str] = field(default_factory=list)


def find_units(trace: Trace) -> Units:
    """The FSDP units of a model. A unit is called once a forward, and shares no parameter with what is outside."""
    units, model = Units(), trace.model
    candidates = _blocks(model)
    for path in candidates:
        _place(trace, path, units, units.blocks)
    total = sum(p.numel() for p in model.parameters())
    for path, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters())
        alone = not any(module.children()) and not any(path.startswith(f"{block}.") for block in candidates)
        if path and alone and size >= LARGE * total:
            _place(trace, path, units, units.large)
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm):
            own = type(module).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward)
            (units.own_batch_norms if own else units.batch_norms).append(path)
    return units


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tie for tie in names.values() if len(tie) > 1]


def _blocks(model: nn.Module) -> list[str]:
    """The outermost elements of lists that are of a class of which there are several, in lists."""
    found: list[tuple[str, type]] = []

    def search(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            element = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS) and any(child.children())
            if element and any(True for _ in child.parameters()):
                found.append((inner, type(child)))
            else:
                search(inner, child)

    search("", model)
    counts = Counter(kind for _, kind in found)
    return [path for path, kind in found if counts[kind] > 1]


def _place(trace: Trace, path: str, units: Units, paths: list[str]) -> None:
    """Note a module as a unit, or why it goes with the root."""
    why = _why_root(trace, path)
    if why:
        units.root.setdefault(pattern_of(path), why)
    else:
        paths.append(path)


def _why_root(trace: Trace, path: str) -> str:
    calls = len(trace.calls.get(path, ()))
    if calls != 1:
        return f"called {calls} times a forward" if calls else "not called by itself"
    for names in _ties(trace.model):
        inside = [name for name in names if name.startswith(f"{path}.")]
        outside = [name for name in names if name not in inside]
        if inside and outside:
            return f"{inside[0].removeprefix(f'{path}.')} is tied to {outside[0]}"
    if used := _used_outside(trace, path):
        return f"{used} is used outside of its forward too"
    return ""


def _used_outside(trace: Trace, path: str) -> str:
    """A parameter of a module that something else uses while the module is not called: FSDP has freed it then."""
    module = trace.model.get_submodule(path)
    own = {id(p): name for name, p in module.named_parameters()}
    inside = trace.inside(trace.calls[path][0])
    for node, users in trace.users.items():
        if node.name() != ACCUMULATE or id(node.variable) not in own:  # type: ignore[attr-defined]
            continue
        if any(user not in inside for user in users):
            return own[id(node.variable)]  # type: ignore[attr-defined]
    return ""


def parameters_of(trace: Trace, node: Node) -> str:
    """The name of the parameter whose node it is; empty if it is none."""
    if node.name() != ACCUMULATE:
        return ""
    variable = node.variable  # type: ignore[attr-defined]
    return next((name for name, p in trace.model.named_parameters() if p is variable), "")


def lists_of(paths: list[str]) -> dict[str, list[str]]:
    """Paths by the list that they are elements of."""
    lists: dict[str, list[str]] = {}
    for path in paths:
        lists.setdefault(parent_of(path), []).append(path)
    return lists
