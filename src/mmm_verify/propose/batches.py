"""Makes batches that a model of transformers may take: tokens and images, by the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmm_verify.errors import ConfigError

# The lengths of sequences that are tried.
LENGTHS = (16, 8, 4)
# The sides of images that are tried, if a config says none, and after the one that it says.
SIDES_WITHOUT_CONFIG = (224, 64, 32)
SIDES_BESIDE_CONFIG = (64, 32)
# Arguments that a forward may need although they are optional.
OPTIONAL = ("input_ids", "pixel_values", "decoder_input_ids")
# Names of a config's fields, the likelier ones first.
IMAGE_SIDES = ("image_size", "input_size", "img_size", "resolution")
IMAGE_CHANNELS = ("num_channels", "in_channels", "in_chans", "input_channels")

# Makes a batch.
Batch = Callable[[], Any]


def floats(*shape: int) -> Batch:
    """A function that makes normally distributed floats of this shape."""
    return lambda: torch.randn(shape)


def tokens(vocab_size: int, *shape: int) -> Batch:
    """A function that makes tokens of the upper half of a vocabulary: special ones are among the first."""
    return lambda: torch.randint(vocab_size // 2, vocab_size, shape)


def hugging_face_batches(kind: Any, config: Any, samples: int, with_loss: bool) -> tuple[Batch, ...]:
    """The batches to try for a model of transformers, the likeliest first.

    Args:
        kind: the model's class.
        config: its config.
        samples: number of samples in a batch.
        with_loss: whether the class computes a loss. Then batches with labels come first.

    Raises:
        ConfigError: the forward needs something else than tokens and images.
    """
    parameters = inspect.signature(kind.forward).parameters
    required = []
    # The first parameter is self.
    for name, parameter in list(parameters.items())[1:]:
        is_named = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_named and parameter.default is parameter.empty:
            required.append(name)
    main_names = kind.main_input_name
    if isinstance(main_names, str):
        main_names = [main_names]
    # A dict in place of a list has each name once, in order.
    fewest = list(dict.fromkeys([*main_names, *required]))
    optional = [name for name in OPTIONAL if name in parameters]
    # Lists of arguments to try.
    choices = [fewest]
    if "decoder_input_ids" in parameters:
        choices.append([*fewest, "decoder_input_ids"])
    choices.append(list(dict.fromkeys([*fewest, *optional])))
    batches: list[Batch] = []
    with_labels = (True, False) if with_loss else (False,)
    for labelled in with_labels:
        for names in choices:
            for attempt in range(len(LENGTHS)):
                makers = {}
                for name in names:
                    make = _maker(name, config, samples, attempt)
                    if make is not None:
                        makers[name] = make
                if len(makers) == len(names):
                    batches.append(partial(_batch, makers, config, samples if labelled else 0))
    if not batches:
        unknown = [name for name in fewest if _maker(name, config, samples, 0) is None]
        listed = " and ".join(unknown)
        raise ConfigError(
            f"no --batch is given, and the forward of {kind.__name__} needs {listed}, which is not made "
            "here: give --batch MODULE:NAME"
        )
    return tuple(batches)


def _batch(makers: Mapping[str, Batch], config: Any, labels: int) -> dict[str, Tensor]:
    """Make a batch, with labels for so many samples: a token for each token, or a class for each sample."""
    batch = {name: make() for name, make in makers.items()}
    if labels:
        of_tokens = batch.get("decoder_input_ids", batch.get("input_ids"))
        if of_tokens is None:
            of_tokens = torch.randint(config.num_labels, (labels,))
        batch["labels"] = of_tokens.clone()
    return batch


def _maker(name: str, config: Any, samples: int, attempt: int) -> Batch | None:
    """A function that makes one argument of a forward. None if that is neither tokens nor images.

    Args:
        attempt: the number of sizes that were tried before.
    """
    if name.endswith("input_ids"):
        vocab_size = field_of(config, ("vocab_size",), 0)
        # (batch, seq)
        return tokens(vocab_size, samples, LENGTHS[attempt]) if vocab_size else None
    if name == "pixel_values":
        side = field_of(config, IMAGE_SIDES, 0)
        sides = (side, *SIDES_BESIDE_CONFIG) if side else SIDES_WITHOUT_CONFIG
        # (batch, channels, side, side)
        return floats(samples, field_of(config, IMAGE_CHANNELS, 3), sides[attempt], sides[attempt])
    return None


def field_of(config: Any, names: Sequence[str], default: int) -> int:
    """The first of these fields that a config has as a number, or the configs inside it."""
    for name in names:
        value = getattr(config, name, None)
        # (height, width)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    for inner in vars(config).values():
        # Only configs of transformers have a model_type.
        if not hasattr(inner, "model_type"):
            continue
        value = field_of(inner, names, 0)
        if value:
            return value
    return default
