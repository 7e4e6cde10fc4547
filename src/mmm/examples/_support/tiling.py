"""The flags of the tiling example, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmm.data import RandomTokens
from mmm.data.text.text_data import TextData
from mmm.examples._support.by_hand import same_losses
from mmm.examples._support.options import TransformerOptions
from mmm.examples._support.text import PlainTextConfig
from mmm.run import options
from mmm.run.run import Run

# way → the flags that it follows
WAYS = {
    "full": (),
    "loss in chunks": ("loss_chunks",),
    "MLP in tiles": ("tile",),
    "both": ("loss_chunks", "tile"),
    "weights in tiles": ("tile_weights",),
}
SHORT, WIDER = 16, 8  # tokens of the second model, whose layer is that many times as wide

Result = tuple[int, list[float]]  # peak in bytes, losses


@dataclass(frozen=True, kw_only=True)
class TilingTokens:
    """Uniform random tokens: large logits need a vocabulary that is larger than text's 256 bytes."""

    seq_length: int = 1024
    """Tokens a sample."""

    def load(self, vocab_size: int, seed: int) -> TextData:
        train = RandomTokens(vocab_size, self.seq_length, seed)
        validation = RandomTokens(vocab_size, self.seq_length, seed + 1)
        return TextData(train, validation, {"dataset": "random"})


@dataclass(frozen=True, kw_only=True)
class Config(PlainTextConfig):
    """Loss in chunks, MLP and weights in tiles on Transformers whose logits, MLPs or matrices are large; --max_iters
    steps (2 unless given) by each way."""

    loss_chunks: int = 8
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist."""
    tile: int = 8
    """Tiles of the sequence that each MLP is computed in, and recomputed in backward: 1 / tile of its activations."""
    tile_weights: int = 8
    """Tiles that each large matrix is gathered in: 1 / tile_weights of a matrix is there at once."""
    model: TransformerOptions = TransformerOptions(preset="debug", ffn_dim=1024, vocab_size=8192)
    data: TilingTokens = TilingTokens()  # type: ignore[assignment]
    run: options.Run = options.Run()


def report(run: Run, long: Mapping[str, Result], wide: Mapping[str, Result]) -> bool:
    """Log and record the peaks of each way. Whether its losses are those of the first way.

    Args:
        long: the model with long sequences. wide: the model with a wide layer.
    """
    lines = [f"{'peak, MB':18}{'long sequence':>15}{'of full':>10}{'wide layer':>15}{'of full':>10}{'loss':>15}"]
    for way in long:
        line = f"{way:18}"
        for model in (long, wide):
            peak = model[way][0]
            line += f"{peak / 1e6:15.1f}{peak / model['full'][0]:10.0%}"
        lines.append(f"{line}{long[way][1][-1]:15.9f}")
    run.log.info("memory of a step beyond parameters, on the rank that needs most\n%s", "\n".join(lines), stacklevel=2)
    run.describe(peak_bytes={way: (long[way][0], wide[way][0]) for way in long})
    return same_losses(run, *([losses for _, losses in model.values()] for model in (long, wide)))
