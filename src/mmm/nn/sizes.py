"""What the configurations of all models check alike."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """The sizes of `config`, by name, that are below 1: one sentence each. One that is None follows from the others."""
    sizes = {name: getattr(config, name) for name in names}
    return [f"{name} is {size}: it must be at least 1" for name, size in sizes.items() if size is not None and size < 1]


def check_images(images: Tensor, channels: int, size: int, model: str) -> None:
    """Raises ValueError where images, (batch, channels, size, size), are of other sizes than a model was made for."""
    wanted = (channels, size, size)
    if tuple(images.shape[1:]) != wanted:
        raise ValueError(
            f"images of shape {tuple(images.shape[1:])}, but this {model} is made for {wanted}: change channels and "
            f"image_size, or the images"
        )
