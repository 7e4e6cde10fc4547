"""Makes batches that a model of transformers may take, from its config and the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmm_verify.errors import ConfigError

# The lengths of sequences that are tried.
LENGTHS = (16, 8, 4)
# The numbers of samples of a waveform, and of frames of a spectrogram, that are tried.
WAVES = (3200, 16000, 400)
FRAMES = (64, 100, 32, 3000)
# The sides of images that are tried, if a config says none, and after the one that it says.
SIDES_WITHOUT_CONFIG = (224, 64, 32, 384)
SIDES_BESIDE_CONFIG = (64, 224, 32)
# Arguments that a forward may need although they are optional.
OPTIONAL = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")
# Names of a config's fields, the likelier ones first.
IMAGE_SIDES = ("image_size", "input_size", "img_size", "resolution")
IMAGE_CHANNELS = ("num_channels", "in_channels", "in_chans", "input_channels")
SPECTRAL_BINS = ("num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size", "input_dim")
VIDEO_FRAMES = ("num_frames", "frames_per_clip")

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
        ConfigError: the forward needs something that is not known to be made.
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
    most = list(dict.fromkeys([*fewest, *optional]))
    # Lists of arguments to try.
    choices = [fewest]
    if "decoder_input_ids" in parameters:
        choices.append([*fewest, "decoder_input_ids"])
    if most not in choices:
        choices.append(most)
    batches: list[Batch] = []
    with_labels = (True, False) if with_loss else (False,)
    for labelled in with_labels:
        for names in choices:
            for attempt in range(len(FRAMES)):
                batches += _batches(names, config, samples, attempt, labelled)
    if not batches:
        unknown = [name for name in fewest if not _makers(name, config, samples, 0)]
        listed = " and ".join(unknown)
        raise ConfigError(
            f"no --batch is given, and the forward of {kind.__name__} needs {listed}, which is not made "
            "here: give --batch MODULE:NAME"
        )
    return tuple(batches)


def _batches(names: Sequence[str], config: Any, samples: int, attempt: int, labelled: bool) -> list[Batch]:
    """Batches with these arguments; none if it is not known how one of them is made."""
    makers: dict[str, list[Batch]] = {}
    for name in names:
        makers[name] = _makers(name, config, samples, attempt)
        if not makers[name]:
            return []
    n_variants = max(map(len, makers.values()))
    batches: list[Batch] = []
    for variant in range(n_variants):

        def make(variant: int = variant) -> dict[str, Tensor]:
            batch = {}
            for name, choices in makers.items():
                # Arguments with fewer variants keep their last one.
                index = min(variant, len(choices) - 1)
                batch[name] = choices[index]()
            if labelled:
                batch["labels"] = _labels(batch, config, samples)
            return batch

        batches.append(make)
    return batches


def _labels(batch: dict[str, Tensor], config: Any, samples: int) -> Tensor:
    """A token for each token of the batch, or a class for each sample."""
    for name in ("decoder_input_ids", "input_ids"):
        if name in batch:
            return batch[name].clone()
    return torch.randint(config.num_labels, (samples,))


def _makers(name: str, config: Any, samples: int, attempt: int) -> list[Batch]:
    """Functions that make one argument of a forward, in the shapes to try.

    Args:
        attempt: the number of sizes that were tried before.
    """
    length = LENGTHS[min(attempt, len(LENGTHS) - 1)]
    if name.endswith("input_ids"):
        vocab_size = field_of(config, ("vocab_size",), 0)
        if not vocab_size:
            return []
        # (batch, seq)
        return [tokens(vocab_size, samples, length)]
    if name.startswith("pixel_values"):
        channels = field_of(config, IMAGE_CHANNELS, 3)
        side = field_of(config, IMAGE_SIDES, 0)
        sides = SIDES_WITHOUT_CONFIG
        if side:
            sides = (side, *SIDES_BESIDE_CONFIG)
        shape = [channels, sides[attempt], sides[attempt]]
        n_frames = field_of(config, VIDEO_FRAMES, 0)
        # (batch, channels, side, side)
        image = floats(samples, *shape)
        if not n_frames and name == "pixel_values":
            return [image]
        # (batch, frames, channels, side, side)
        video = floats(samples, n_frames or 4, *shape)
        return [video, image]
    if name == "input_values":
        wave = WAVES[min(attempt, len(WAVES) - 1)]
        # (batch, wave), or (batch, channels, wave)
        shapes = [floats(samples, wave), floats(samples, 1, wave)]
        bins = field_of(config, SPECTRAL_BINS, 0)
        longest = field_of(config, ("max_length",), 0)
        if bins and longest:
            shapes.insert(0, floats(samples, longest, bins))
        return shapes
    if name == "input_features":
        bins = field_of(config, SPECTRAL_BINS, 80)
        sources = field_of(config, ("max_source_positions",), 0)
        frames = FRAMES[attempt]
        if attempt == 0 and sources:
            frames = 2 * sources
        # (batch, bins, frames), or (batch, frames, bins)
        return [floats(samples, bins, frames), floats(samples, frames, bins)]
    if name == "inputs_embeds":
        width = field_of(config, ("hidden_size", "d_model"), 32)
        # (batch, seq, width)
        return [floats(samples, length, width)]
    if name == "past_values":
        return _series(config, samples)
    if name in ("past_observed_mask", "attention_mask"):
        length = _series_length(config)
        # Everything was observed.
        return [lambda: torch.ones(samples, length)]
    if name == "past_time_features":
        n_features = field_of(config, ("num_time_features",), 1)
        return [floats(samples, _series_length(config), n_features)]
    return []


def _series_length(config: Any) -> int:
    """How many past values of a series a model takes: those that it sees, and those that it looks back at."""
    lags = getattr(config, "lags_sequence", None) or [0]
    return field_of(config, ("context_length",), 32) + max(lags)


def _series(config: Any, samples: int) -> list[Batch]:
    """Past values of a series: (batch, length) or (batch, length, channels)."""
    length = _series_length(config)
    channels = field_of(config, ("num_input_channels", "input_size"), 1)
    plain = floats(samples, length)
    if channels == 1 and not hasattr(config, "num_input_channels"):
        return [plain]
    return [floats(samples, length, channels), plain]


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
