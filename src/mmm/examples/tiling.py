"""What is too large for one device, piece by piece: the loss in chunks, the MLP in tiles, the weights in tiles.

    launch -n 4 python3 -m mmm.examples.tiling

Sharding a model over ranks does not help where one layer is too large for each of them. Three things can be, and
none of them is needed all at once::

                     what is largest                            piece by piece
      output, loss   logits (seq, V), their softmax             ┌──┐ ▷ ▷ ▷   (seq / chunks, V), --loss_chunks
                     and gradient                               └──┘
      MLP            hidden activations (seq, ffn_dim),         ┌──┐ ▷ ▷ ▷   (seq / tiles, ffn_dim), --tile
                     four of them, kept for backward            └──┘
      weights        a layer's matrices (ffn_dim, dim), which   ┌──┐         (ffn_dim / tiles, dim), --tile_weights
                     FSDP gathers, and their gradients          └──┘ ▽ ▽ ▽

The first two cut the sequence and save activations; the last cuts matrices and saves what is gathered of parameters.
Of a chunk only the loss is kept, and of a tile nothing: backward recomputes a tile of the sequence, and gathers a tile
of the weights once more. Gradients of the weights are those of the whole.

The same 2 steps, from the same weights on the same samples, go by each way, of two models: one with long sequences, and
one with few tokens and a wide layer. A table says how much memory a step takes at its peak beyond parameters (measured:
`mmm.parallel.memory.measure`), and that the losses are the same.

Sources: Rajbhandari et al., "ZeRO-Infinity", 2021 (weights); Bekman et al., "Arctic long sequence training", 2025; Hsu
et al., "Liger kernel", 2024.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.comparison import relative_error, worst
from mmm.data import RandomTokens
from mmm.examples import _support as example
from mmm.models.transformer import Transformer
from mmm.parallel import Mesh, apply, build_mesh, loss_of, materialize
from mmm.parallel.memory.measure import Peak
from mmm.runtime.process_group import gather_floats

CHUNKS, TILES, WEIGHTS = "loss_chunks", "tile", "tile_weights"
WAYS = {
    "full": (),
    "loss in chunks": (CHUNKS,),
    "MLP in tiles": (TILES,),
    "both": (CHUNKS, TILES),
    "weights in tiles": (WEIGHTS,),
}
SHORT, WIDER = 16, 8  # tokens of the second model, whose layer is that many times as wide
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-1}  # relative, of the losses: sums go in another order


@dataclass(frozen=True, kw_only=True)
class TilingText(example.PlainTextOptions):
    """Where the tokens come from."""

    dataset: Literal["text", "random"] = "random"
    """random: uniform tokens. text: bytes; large logits need a vocabulary that is larger than text's 256."""

    def load(self, vocab_size: int, seed: int) -> example.TextData:
        if self.dataset == "text":
            return super().load(vocab_size, seed)
        train, validation = (RandomTokens(vocab_size, self.seq_length, each) for each in (seed, seed + 1))
        return example.TextData(train, validation, {"dataset": "random"})


@dataclass(frozen=True, kw_only=True)
class Config(example.TensorParallelOptions, example.PlainTextConfig):
    """Loss in chunks, MLP and weights in tiles on Transformers whose logits, MLPs or matrices are large; --max_iters
    steps (2 unless given) by each way."""

    loss_chunks: int = 8
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist."""
    tile: int = 8
    """Tiles of the sequence that each MLP is computed in, and recomputed in backward: 1 / tile of its activations."""
    tile_weights: int = 8
    """Tiles that each large matrix is gathered in: 1 / tile_weights of a matrix is there at once."""
    model: example.TransformerOptions = example.TransformerOptions(preset="debug", ffn_dim=1024, vocab_size=8192)
    data: TilingText = TilingText(seq_length=1024)
    run: example.RowOptions = example.RowOptions(plots=False)


def train(config: Config) -> bool:
    """Every way, and the table. Whether the losses are the same."""
    layout, techniques = example.fit(tp=config.tpsize), example.techniques_of(config)
    gathers = layout.dp_shard > 1  # else a rank has all its weights, and there are none to gather
    techniques = techniques if gathers else replace(techniques, tile_weights=1)
    resolved = example.resolve(config, layout, techniques, batch_size=1, max_iters=2)
    if config.run.summary:
        example.print_on_rank0(resolved.summary())
        return True

    hooks = [example.Agreement(), example.StartUp(), example.Record()]
    with example.start_run("tiling", config, resolved, hooks) as run:
        mesh = build_mesh(resolved.layout, run.device.type, config.run.timeout)
        ways = [way for way, pieces in WAYS.items() if gathers or WEIGHTS not in pieces]
        long, wide = ([train_way(run, mesh, resolved, way, wide) for way in ways] for wide in (False, True))
        curves = [(curve, results[0][1]) for results in (long, wide) for _, curve in results]
        apart = worst(relative_error(*pair) for curve, full in curves for pair in zip(curve, full, strict=True))
        limit = TOLERANCE[run.precision.name]
        lines = [f"{'peak, MB':18}{'long sequence':>15}{'of full':>10}{'wide layer':>15}{'of full':>10}{'loss':>15}"]
        for way, (a, curve), (b, _) in zip(ways, long, wide, strict=True):
            peaks = "".join(f"{x / 1e6:15.1f}{x / results[0][0]:10.0%}" for x, results in ((a, long), (b, wide)))
            lines.append(f"{way:18}{peaks}{curve[-1]:15.9f}")
        run.log.info("memory of a step beyond parameters, on the rank that needs most\n%s", "\n".join(lines))
        run.log.info("the losses differ by %.1e at most (allowed: %.0e)", apart, limit)
        peaks_of = {way: (a[0], b[0]) for way, a, b in zip(ways, long, wide, strict=True)}
        run.describe(peak_bytes=peaks_of, losses_differ=apart)
    return apart <= limit


def train_way(
    run: example.Run, mesh: Mesh, resolved: example.ParallelSpec, way: str, wide: bool
) -> tuple[int, list[float]]:
    """A few steps from the initial weights: the peak of the last forward and backward in bytes, and the losses."""
    config = run.config
    assert isinstance(config, Config)
    sizes = replace(resolved.sizes, ffn_dim=WIDER * resolved.sizes.ffn_dim) if wide else resolved.sizes
    with torch.device("meta"):
        model: nn.Module = Transformer(sizes)
    pieces = {name: getattr(config, name) for name in WAYS[way]}
    model = apply(model, mesh, resolved.plan, run.precision, **pieces)
    materialize(model, run.device, config.run.seed)
    loss_fn = loss_of(model)
    optimizer = config.optimizer.make(model.parameters())
    losses = []
    at = {"way": [*WAYS].index(way), "wide": int(wide)}
    for step in example.text_steps(run, resolved, model, optimizer, at=at):
        tokens = slice(SHORT if wide else None)
        inputs, targets = step.batch.inputs[:, tokens], step.batch.targets[:, tokens]
        with Peak(run.device, model) as peak, loss_parallel():
            loss = loss_fn(model(inputs), targets, step.batch.count)
            step.log(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.row["peak"] = max(row[0] for row in gather_floats([float(peak.bytes)], run.device))
        losses.append(step.local_loss)
    return int(step.row["peak"]), run.global_sums(torch.stack(losses))


if __name__ == "__main__":
    example.run_main(lambda: sys.exit(not train(example.parse(Config, __doc__))))
