"""Translates names that are local to a rank, such as a rank's experts or layers counted from 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mmm_verify.difference import same_elements
from mmm_verify.observe import LocalTensor, Observed
from mmm_verify.rank import RankObserved
from mmm_verify.relations import place_of

INDEX = re.compile(r"\b\d+\b")


def with_global_names(
    ranks: Sequence[RankObserved], weights: Mapping[str, LocalTensor]
) -> tuple[list[RankObserved], str]:
    """Rename what the ranks saw to the names on one device.

    A module with another index there is recognized by its weights, if exactly one other module has them. If that is
    wrong all the same, as when two ranks have swapped their experts, the loss shows it.

    Args:
        ranks: what each rank saw.
        weights: the weights on one device, by name.

    Returns:
        The same with global names, and a note that gives an example; the note is empty if no name is local to a rank.
    """
    renamed = []
    note = ""
    for index, rank in enumerate(ranks):
        moves = _moves(rank.parallel, weights)
        for module, other in moves.items():
            if not note:
                note = f"names are local to a rank: {module} of rank {index} has the weights of {other} on one device"
        if moves:
            parallel = rank.parallel.renamed(partial(_rename, moves=moves))
            rank = replace(rank, parallel=parallel)
        renamed.append(rank)
    return renamed, note


def is_part(tensor: LocalTensor, full: LocalTensor) -> bool:
    """Whether a rank's tensor is some part of a full one, bit for bit."""
    place = place_of(tensor, full.local)
    if place is None:
        return False
    expected = place.of(full.local)
    own = place.unpadded(tensor.local)
    # An empty shard is a part of every tensor, and identifies none.
    if own.shape != expected.shape or not own.numel():
        return False
    return same_elements(own.to(expected.dtype), expected)


def _moves(observed: Observed, weights: Mapping[str, LocalTensor]) -> dict[str, str]:
    """Module of the rank → its name on one device, for modules that have another name there."""
    # Pattern → how many parameters of the rank have it, and the names on one device.
    own_counts = Counter(map(_pattern, observed.parameters))
    names_by_pattern: dict[str, list[str]] = {}
    for name in weights:
        names_by_pattern.setdefault(_pattern(name), []).append(name)
    moves: dict[str, str] = {}
    for name in sorted(observed.parameters):
        tensor = observed.weights[name]
        pattern = _pattern(name)
        candidates = names_by_pattern.get(pattern, [])
        # A rank that has all modules of this pattern has no reason to count its own.
        if own_counts[pattern] >= len(candidates):
            continue
        if name in weights and is_part(tensor, weights[name]):
            continue
        same = [other for other in candidates if is_part(tensor, weights[other])]
        if len(same) == 1:
            module, other_module = _modules(name, same[0])
            # A module with weights of two others is not one of them under a local name: nothing is renamed.
            if moves.setdefault(module, other_module) != other_module:
                return {}
    renamed = {_rename(name, moves) for name in observed.parameters}
    # Two parameters with one new name: the names are not local to the rank after all.
    if len(renamed) < len(observed.parameters):
        return {}
    return moves


def _pattern(name: str) -> str:
    """A name with its indices replaced: ``layers.*.weight``."""
    return INDEX.sub("*", name)


def _modules(name: str, other: str) -> tuple[str, str]:
    """Two names up to the last component in which they differ: the modules that correspond."""
    # ("experts.0.up.weight", "experts.2.up.weight") → ("experts.0", "experts.2")
    own = name.split(".")
    theirs = other.split(".")
    while own[-1] == theirs[-1]:
        own.pop()
        theirs.pop()
    return ".".join(own), ".".join(theirs)


def _rename(name: str, moves: Mapping[str, str]) -> str:
    """The new name of a module, or of a tensor in one that is renamed."""
    for module, other in moves.items():
        if name == module or name.startswith(f"{module}."):
            return other + name[len(module) :]
    return name
