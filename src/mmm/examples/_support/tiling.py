"""Flags and table of the tiling example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmm.examples._support.by_hand import same_losses
from mmm.examples._support.text import PlainTextConfig
from mmm.run import options
from mmm.run.options import check_counts
from mmm.run.run import Run
from mmm.trainer.config import Model, Text

# Name of a way → the flags that it follows. The others are as if they were 1.
WAYS = {
    "full": (),
    "loss in chunks": ("loss_chunks",),
    "MLP in tiles": ("tile",),
    "both": ("loss_chunks", "tile"),
    "weights in tiles": ("tile_weights",),
}
# The second model sees only so many tokens of each sample, and its layer is so many times as wide.
SHORT = 16
WIDER = 8

# Peak in bytes, and losses.
Result = tuple[int, list[float]]


@dataclass(frozen=True, kw_only=True)
class Config(PlainTextConfig):
    """Loss in chunks, MLP and weights in tiles, on Transformers whose logits, MLPs or matrices are large; --max_iters
    steps (2 unless given) of each way."""

    loss_chunks: int = 8
    """Number of chunks of the sequence that logits and loss are computed in. The full logits never exist."""
    tile: int = 8
    """Number of tiles of the sequence that each MLP is computed in, and recomputed in backward. Only 1 / tile of its
    activations exist at once."""
    tile_weights: int = 8
    """Number of tiles that each large matrix is gathered in. Only 1 / tile_weights of a matrix exists at once."""
    model: Model = Model(preset="debug", ffn_dim=1024, vocab_size=8192)
    # Large logits need a vocabulary that is larger than the 256 bytes of a text.
    data: Text = Text(dataset="random", seq_length=1024)
    run: options.RunFlags = options.RunFlags()

    LEFT_OUT: ClassVar = (*PlainTextConfig.LEFT_OUT, "text")

    def check(self) -> None:
        """Raises ConfigError for a number of chunks or tiles below 1."""
        check_counts(loss_chunks=self.loss_chunks, tile=self.tile, tile_weights=self.tile_weights)


def report(run: Run, long: Mapping[str, Result], wide: Mapping[str, Result]) -> bool:
    """Log and record the peak of each way.

    Args:
        long: for each way, the result of the model with long sequences.
        wide: for each way, the result of the model with a wide layer.

    Returns:
        Whether the losses of every way are those of the first.
    """
    lines = ["peak, MB            long sequence   of full     wide layer   of full           loss"]
    peaks = {}
    for way in long:
        long_peak, losses = long[way]
        wide_peak, _ = wide[way]
        peaks[way] = (long_peak, wide_peak)
        long_share = long_peak / long["full"][0]
        wide_share = wide_peak / wide["full"][0]
        line = f"{way:18}{long_peak / 1e6:15.1f}{long_share:10.0%}"
        line += f"{wide_peak / 1e6:15.1f}{wide_share:10.0%}"
        lines.append(f"{line}{losses[-1]:15.9f}")
    run.log.info(
        "memory of a step beyond parameters, on the rank that needs most\n%s",
        "\n".join(lines),
        stacklevel=2,
    )
    run.describe(peak_bytes=peaks)
    long_losses = [losses for _, losses in long.values()]
    wide_losses = [losses for _, losses in wide.values()]
    return same_losses(run, long_losses, wide_losses)
