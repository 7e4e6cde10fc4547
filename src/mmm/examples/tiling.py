"""A layer too large for one device: the loss in chunks and the MLP in tiles of the sequence.

    launch python3 -m mmm.examples.tiling

Sharding a model over ranks does not help where one layer of one sequence is too large. Two layers are larger than all
others, and both work token by token, so that they need not be computed for the whole sequence at once::

                     what is largest                            piece by piece
      output, loss   logits (seq, V), their softmax             ┌──┐ ▷ ▷ ▷   (seq / chunks, V), --loss_chunks
                     and gradient                               └──┘
      MLP            hidden activations (seq, ffn_dim),         ┌──┐ ▷ ▷ ▷   (seq / tiles, ffn_dim), --tile
                     four of them, kept for backward            └──┘

Of a chunk only the loss is kept, and of a tile nothing: backward recomputes each, makes its gradients, and goes on to
the next. Gradients of the weights are summed over the pieces, and reduced over the ranks once.

The same 2 steps, from the same weights on the same samples, go by each of four ways. A table says how much memory a
step takes at its peak beyond parameters (measured: `mmm.parallel.memory.measure`), and that the losses are the same.

Sources: Bekman et al., "Arctic long sequence training", 2025; Hsu et al., "Liger kernel", 2024.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
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

WAYS = ("full", "loss in chunks", "MLP in tiles", "both")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-1}  # relative, of the losses: sums go in another order


SIZES = example.TransformerOptions(preset="debug", ffn_dim=1024, vocab_size=8192)


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
    """Loss in chunks and MLP in tiles on a Transformer whose logits and MLPs are large; --max_iters steps (2 unless
    given) by each way."""

    loss_chunks: int = 8
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist."""
    tile: int = 8
    """Tiles of the sequence that each MLP is computed in, and recomputed in backward: 1 / tile of its activations."""
    model: example.TransformerOptions = SIZES
    data: TilingText = TilingText(seq_length=1024)
    run: example.RowOptions = example.RowOptions(plots=False)


def train(config: Config) -> bool:
    """Every way, and the table. Whether the losses are the same."""
    resolved = example.resolve(
        config, example.fit(tp=config.tpsize), example.techniques_of(config), batch_size=1, max_iters=2
    )
    if config.run.summary:
        example.print_on_rank0(resolved.summary())
        return True

    hooks = [example.Agreement(), example.StartUp(), example.Record()]
    with example.start_run("tiling", config, resolved, hooks) as run:
        mesh = build_mesh(resolved.layout, run.device.type, config.run.timeout)
        peaks, curves = zip(*(train_way(run, mesh, resolved, way) for way in range(4)), strict=True)
        apart = worst(relative_error(*pair) for curve in curves for pair in zip(curve, curves[0], strict=True))
        limit = TOLERANCE[run.precision.name]
        lines = [f"{'':16}{'peak, MB':>10}{'of full':>10}{'loss at the end':>18}"]
        for way, peak, curve in zip(WAYS, peaks, curves, strict=True):
            lines.append(f"{way:16}{peak / 1e6:10.1f}{peak / peaks[0]:10.0%}{curve[-1]:18.9f}")
        run.log.info("memory of a step beyond parameters, on the rank that needs most\n%s", "\n".join(lines))
        run.log.info("the losses differ by %.1e at most (allowed: %.0e)", apart, limit)
        run.describe(peak_bytes=dict(zip(WAYS, peaks, strict=True)), losses_differ=apart)
    return apart <= limit


def train_way(run: example.Run, mesh: Mesh, resolved: example.ParallelSpec, way: int) -> tuple[int, list[float]]:
    """A few steps from the initial weights: the peak of the last forward and backward in bytes, and the losses."""
    config = run.config
    assert isinstance(config, Config)
    with torch.device("meta"):
        model: nn.Module = Transformer(resolved.sizes)
    loss_chunks, tile = config.loss_chunks if way in (1, 3) else 1, config.tile if way in (2, 3) else 1
    model = apply(model, mesh, resolved.plan, run.precision, loss_chunks=loss_chunks, tile=tile)
    materialize(model, run.device, config.run.seed)
    loss_fn = loss_of(model)
    optimizer = config.optimizer.make(model.parameters())
    losses = []
    for step in example.text_steps(run, resolved, model, optimizer, at={"way": way}):
        with Peak(run.device, model) as peak, loss_parallel():
            loss = loss_fn(model(step.batch.inputs), step.batch.targets, step.batch.count)
            step.log(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.row["peak"] = max(row[0] for row in gather_floats([float(peak.bytes)], run.device))
        losses.append(step.local_loss)
    return int(step.row["peak"]), run.global_sums(torch.stack(losses))


if __name__ == "__main__":
    example.run_main(lambda: sys.exit(not train(example.parse(Config, __doc__))))
