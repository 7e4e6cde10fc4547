"""Explains a wrong norm that a rank has clipped by: which gradients it left out of the norm, or counted twice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from mmm_verify.dtypes import widest
from mmm_verify.relations import Place
from mmm_verify.subject import Subject

# Relative: how near an explanation has to come to the norm.
NEAR = 1e-6


def explain_norm(
    factor: float,
    gradients: Mapping[str, Tensor],
    places: Sequence[Mapping[str, Place]],
    rank: int,
    subject: Subject,
    near: float = NEAR,
) -> str:
    """Say why a norm is `factor` times what it should be. Empty if nothing explains it.

    Args:
        factor: the rank's norm divided by the right one.
        gradients: name → the full gradient.
        places: by rank, name → which part of the gradient the rank has, for those that it has a part of.
        rank: the rank whose norm is wrong.
        subject: the program, with its mesh.
        near: how near the square of an explanation has to come to that of the norm, relative.
    """
    # Sums of squares: those of the shards add up to that of the full gradient, which norms do not.
    full = {name: _sum_of_squares(gradient) for name, gradient in gradients.items()}
    total = sum(full.values())
    # By rank, name → the sum of squares of the rank's part.
    parts: list[dict[str, float]] = []
    for places_of_rank in places:
        squares = {}
        for name, place in places_of_rank.items():
            if name in gradients:
                own_gradient = place.of(gradients[name])
                squares[name] = _sum_of_squares(own_gradient)
        parts.append(squares)
    own = parts[rank]
    unsharded = 0.0
    for name, square in own.items():
        if square == full[name]:
            unsharded += square
    explanations = {
        "counted only its own parts": sum(own.values()),
        "left out what is sharded": unsharded,
        "left out what is not sharded": total - unsharded,
    }
    for size in subject.axes.values():
        explanations[f"counted what is not sharded {size} times"] = total + (size - 1) * unsharded
    for name, square in full.items():
        explanations[f"left out {name}"] = total - square
    # A shard that is taken for a copy is counted on one rank only.
    for other, squares in enumerate(parts):
        for name, square in squares.items():
            explanations[f"counted only rank {other}'s part of {name}"] = total - full[name] + square
    observed = factor * factor * total
    for explanation, square in explanations.items():
        # An explanation that gives the right norm explains nothing.
        if math.isclose(square, total, rel_tol=near / 1000):
            continue
        if math.isclose(observed, square, rel_tol=near):
            return f"rank {rank} {explanation}"
    return ""


def _sum_of_squares(gradient: Tensor) -> float:
    """The square of a gradient's norm. For complex numbers, that of their magnitudes."""
    magnitudes = widest(gradient).abs()
    return magnitudes.square().sum().item()
