"""Names of the parallel program that are local to a rank, as a rank's experts or layers counted from 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmm_verify.difference import same_elements
from mmm_verify.observe import LocalTensor, Observed
from mmm_verify.rank import RankObserved
from mmm_verify.relations import place_of

NUMBER = re.compile(r"\b\d+\b")


def with_global_names(
    ranks: Sequence[RankObserved], weights: Mapping[str, LocalTensor]
) -> tuple[list[RankObserved], str]:
    """What the ranks saw, by the names on one device.

    A module whose number is another one there is known by its weights, which are those of one other module alone. What
    is wrong in spite of that, as where two ranks have changed their experts, shows in the loss.

    Args:
        weights: those on one device, by name.

    Returns:
        The same, renamed, and a note on it; empty where no name is local to a rank.
    """
    renamed = []
    note = ""
    for number, rank in enumerate(ranks):
        moves = _moves(rank.parallel, weights)
        for module, other in moves.items():
            note = (
                note or f"names are local to a rank: {module} of rank {number} has the weights of {other} on one device"
            )
        if moves:
            rank = replace(rank, parallel=_renamed(rank.parallel, moves))
        renamed.append(rank)
    return renamed, note


def is_part(tensor: LocalTensor, full: LocalTensor) -> bool:
    """Whether a rank's tensor is some part of a full one, to the last bit."""
    place = place_of(tensor, full.local)
    if place is None:
        return False
    ought = place.of(full.local)
    own = place.unpadded(tensor.local)
    if own.shape != ought.shape or not own.numel():
        return False
    return same_elements(own.to(ought.dtype), ought)


def _moves(observed: Observed, weights: Mapping[str, LocalTensor]) -> dict[str, str]:
    """By module of the rank, its name on one device, of those that have another one there."""
    moves: dict[str, str] = {}
    own_counts = Counter(_pattern(name) for name in observed.parameters)
    alike: dict[str, list[str]] = {}
    for name in weights:
        alike.setdefault(_pattern(name), []).append(name)
    for name in sorted(observed.parameters):
        tensor = observed.weights[name]
        pattern = _pattern(name)
        others = alike.get(pattern, [])
        if own_counts[pattern] >= len(others):
            continue  # the rank has all of them
        if name in weights and is_part(tensor, weights[name]):
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
    components = name.split(".")
    others = other.split(".")
    while components[-1] == others[-1]:
        components.pop()
        others.pop()
    return ".".join(components), ".".join(others)


def _rename(name: str, moves: Mapping[str, str]) -> str:
    for module, other in moves.items():
        if name == module or name.startswith(f"{module}."):
            return other + name[len(module) :]
    return name


def _renamed(observed: Observed, moves: Mapping[str, str]) -> Observed:
    """The same with the names of some modules replaced, in all that has names."""
    changes: dict[str, Any] = {}
    changes["ties"] = [tuple(_rename(name, moves) for name in group) for group in observed.ties]
    for field in ("weights", "gradients", "after", "unclipped", "outputs", "drops"):
        by_name = getattr(observed, field)
        changes[field] = {_rename(name, moves): value for name, value in by_name.items()}
    for field in ("parameters", "main_gradients", "stepped"):
        changes[field] = {_rename(name, moves) for name in getattr(observed, field)}
    if observed.second is not None:
        changes["second"] = _renamed(observed.second, moves)
    return replace(observed, **changes)
