"""Checks that the configurations of all models have in common."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """One sentence for each size of `config` that is below 1. A size that is None follows from the others.

    Args:
        names: the fields of `config` to look at.
    """
    problems = []
    for name in names:
        size = getattr(config, name)
        if size is not None and size < 1:
            problems.append(f"{name} is {size}: it must be at least 1")
    return problems


def check_images(
    images: Tensor,
    channels: int,
    size: int,
    model: str,
) -> None:
    """Raises ValueError where images do not have the sizes that a model was made for.

    Args:
        images: (batch, channels, size, size).
        model: what the model is called, for the message.
    """
    shape = tuple(images.shape[1:])
    expected = (channels, size, size)
    if shape != expected:
        raise ValueError(
            f"images of shape {shape}, but this {model} is made for {expected}: change channels and image_size, or the "
            f"images"
        )
