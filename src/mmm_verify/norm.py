"""Explains the norm by which a rank has clipped its gradients: which of them it left out, or counted twice."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from mmm_verify.relations import Place
from mmm_verify.subject import Subject

NEAR = 1e-6  # relative: an explanation gives the norm


def explain_norm(
    factor: float, gradients: Mapping[str, Tensor], places: Mapping[str, Place], rank: int, subject: Subject
) -> str:
    """Say why a norm is `factor` times what it should be. Empty where nothing explains it.

    Args:
        gradients: by name, in full. places: by name, which part of it the rank has.
    """
    squares = {name: gradient.abs().square().sum().item() for name, gradient in gradients.items()}
    own = {name: places[name].of(gradients[name]).abs().square().sum().item() for name in gradients if name in places}
    total = sum(squares.values())
    whole = sum(square for name, square in squares.items() if own.get(name) == square)
    explanations = {
        "counted its own parts alone": sum(own.values()),
        "left out what is sharded": whole,
        "left out what is not sharded": total - whole,
    }
    for size in subject.axes.values():
        explanations[f"counted what is not sharded {size} times"] = total + (size - 1) * whole
    for name, square in squares.items():
        explanations[f"left out {name}"] = total - square
    for explanation, square in explanations.items():
        if math.isclose(factor * factor * total, square, rel_tol=NEAR) and not math.isclose(square, total):
            return f"rank {rank} {explanation}"
    return ""
