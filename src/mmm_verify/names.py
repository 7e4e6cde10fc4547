"""Names of the parallel program that are local to a rank, as a rank's experts or layers counted from 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from mmm_verify.difference import same_elements
from mmm_verify.observe import LocalTensor, Observed
from mmm_verify.relations import place_of

NUMBER = re.compile(r"\b\d+\b")


Value = TypeVar("Value")


def with_global_names(observed: Observed, weights: Mapping[str, LocalTensor]) -> tuple[Observed, dict[str, str]]:
    """What a rank saw, by the names on one device.

    A module whose number is another one there is known by its weights, which are those of one other module alone. What
    is wrong in spite of that, as where two ranks have changed their experts, shows in the loss.

    Args:
        weights: those on one device, by name.

    Returns:
        The same, renamed, and the modules that are: the rank's name → that on one device.
    """
    moves = _moves(observed, weights)
    if not moves:
        return observed, {}
    return _renamed(observed, moves), moves


def is_part(tensor: LocalTensor, full: LocalTensor) -> bool:
    """Whether a rank's tensor is some part of a full one, to the last bit."""
    place = place_of(tensor, full.local)
    if place is None:
        return False
    ought = place.of(full.local)
    own = place.unpadded(tensor.local)
    return own.shape == ought.shape and own.numel() > 0 and same_elements(own.to(ought.dtype), ought)


def _moves(observed: Observed, weights: Mapping[str, LocalTensor]) -> dict[str, str]:
    """By module of the rank, its name on one device, of those that have another one there."""
    moves: dict[str, str] = {}
    own_counts = Counter(_pattern(name) for name in observed.parameters)
    alike: dict[str, list[str]] = {}
    for name in weights:
        alike.setdefault(_pattern(name), []).append(name)
    for name in sorted(observed.parameters):
        tensor, others = observed.weights[name], alike.get(_pattern(name), [])
        all_of_them = own_counts[_pattern(name)] >= len(others)
        if all_of_them or (name in weights and is_part(tensor, weights[name])):
            continue
        same = [other for other in others if is_part(tensor, weights[other])]
        if len(same) == 1:
            module, other_module = _modules(name, same[0])
            if moves.setdefault(module, other_module) != other_module:
                return {}  # it has parts of several
    renamed = {_rename(name, moves) for name in observed.parameters}
    return moves if len(renamed) == len(observed.parameters) else {}


def _pattern(name: str) -> str:
    """A name without its numbers."""
    return NUMBER.sub("*", name)


def _modules(name: str, other: str) -> tuple[str, str]:
    """Two names up to the last component in which they differ."""
    components, others = name.split("."), other.split(".")
    last = max(index for index, pair in enumerate(zip(components, others, strict=True)) if pair[0] != pair[1])
    return ".".join(components[: last + 1]), ".".join(others[: last + 1])


def _rename(name: str, moves: Mapping[str, str]) -> str:
    for module, other in moves.items():
        if name == module or name.startswith(f"{module}."):
            return other + name[len(module) :]
    return name


def _renamed(observed: Observed, moves: Mapping[str, str]) -> Observed:
    def keys(of_names: Mapping[str, Value]) -> dict[str, Value]:
        return {_rename(name, moves): value for name, value in of_names.items()}

    def names(of_names: set[str]) -> set[str]:
        return {_rename(name, moves) for name in of_names}

    return replace(
        observed,
        weights=keys(observed.weights),
        parameters=names(observed.parameters),
        ties=[tuple(_rename(name, moves) for name in group) for group in observed.ties],
        gradients=keys(observed.gradients),
        main_gradients=names(observed.main_gradients),
        stepped=names(observed.stepped),
        after=keys(observed.after),
        unclipped=keys(observed.unclipped),
        second=None if observed.second is None else _renamed(observed.second, moves),
        outputs=keys(observed.outputs),
        drops=keys(observed.drops),
    )
