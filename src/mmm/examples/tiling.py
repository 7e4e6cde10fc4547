"""What is too large for one device, piece by piece: the loss in chunks, the MLP in tiles, the weights in tiles.

    launch -n 4 python3 -m mmm.examples.tiling

Sharding a model over ranks does not help where one layer is too large for each of them::

                     what is largest                            piece by piece
      output, loss   logits (seq, V), their softmax, gradient   ┌──┐ ▷ ▷ ▷   (seq / chunks, V), --loss_chunks
                                                                └──┘
      MLP            hidden activations (seq, ffn_dim),         ┌──┐ ▷ ▷ ▷   (seq / tiles, ffn_dim), --tile
                     four of them, kept for backward            └──┘
      weights        a layer's matrices (ffn_dim, dim), which   ┌──┐         (ffn_dim / tiles, dim), --tile_weights
                     FSDP gathers, and their gradients          └──┘ ▽ ▽ ▽

The first two cut the sequence: PyTorch's `checkpoint` around a piece keeps its input alone, and backward recomputes the
piece. The last cuts a matrix into several, each an FSDP unit: it is gathered, used and freed, forward and backward.

The same 2 steps go by each way, of a model with long sequences and of one with few tokens and a wide layer. A table
says how much memory a step takes at its peak beyond parameters, and that the losses are the same.

Sources: "ZeRO-Infinity", 2021 (weights); "Arctic long sequence training", 2025 (MLP); "Liger kernel", 2024 (loss).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from mmm.examples import _support as example
from mmm.examples._support.tiling import SHORT, WAYS, WIDER, Config, Result, report
from mmm.models.llama.model import Transformer
from mmm.parallel import cross_entropy, draw_weights
from mmm.parallel.memory.measure import Peak
from mmm.runtime.process_group import gather_floats


class TiledLinear(nn.Module):
    """A matrix (out, in) as several, of some of its rows each: each makes some columns of the output."""

    def __init__(self, linear: nn.Linear, tiles: int) -> None:
        super().__init__()
        self.tiles = nn.ModuleList()
        for rows in linear.weight.detach().chunk(tiles):
            tile = nn.Linear(linear.in_features, len(rows), bias=False, device="meta")
            tile.weight = nn.Parameter(rows.clone())
            self.tiles.append(tile)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)  # (batch, seq, out)


def in_tiles(mlp: Any, tiles: int) -> None:
    """An MLP treats each token by itself: its hidden activations (batch, seq, ffn_dim) exist for one tile only."""
    full_forward = mlp.forward

    def forward(x: Tensor) -> Tensor:
        pieces = [checkpoint(full_forward, piece, use_reentrant=False) for piece in x.chunk(tiles, dim=1)]
        return torch.cat(pieces, dim=1)  # (batch, seq, dim)

    mlp.forward = forward


class LanguageModel(nn.Module):
    """A Transformer and its loss, in so many pieces; 1 leaves a thing whole."""

    def __init__(self, full: Transformer, loss_chunks: int = 1, tile: int = 1, tile_weights: int = 1) -> None:
        super().__init__()
        self.output: Any = full.output
        full.output = None  # its forward then ends with the hidden states
        self.body = full
        self.chunks = loss_chunks
        for layer in full.layers.values():
            for name in ("w1", "w2", "w3") if tile_weights > 1 else ():
                setattr(layer.feed_forward, name, TiledLinear(getattr(layer.feed_forward, name), tile_weights))
            if tile > 1:
                in_tiles(layer.feed_forward, tile)

    def forward(self, tokens: Tensor, targets: Tensor, count: int) -> Tensor:
        """The losses of targets (batch, seq), summed, over their count in the global batch."""
        hidden = self.body(tokens)  # (batch, seq, dim)
        if self.chunks == 1:
            return self.loss(hidden, targets, count)
        pieces = zip(hidden.chunk(self.chunks, dim=1), targets.chunk(self.chunks, dim=1), strict=True)
        losses = [checkpoint(self.loss, h, t, count, use_reentrant=False) for h, t in pieces]
        return torch.stack(losses).sum()

    def loss(self, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
        # The logits of a piece, (batch, piece, V), are freed once its loss is known.
        return cross_entropy(self.output(hidden), targets, count)


def shard(model: LanguageModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """FSDP of every tile of a matrix, every layer, and the rest: each of these is gathered as one."""
    tiles = [tile for module in model.modules() if isinstance(module, TiledLinear) for tile in module.tiles]
    for unit in [*tiles, *model.body.layers.values(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    example.sum_gradients(model)


def train_way(run: example.Run, mesh: DeviceMesh, job: example.Job, way: str, wide: bool) -> Result:
    """A few steps from the initial weights: the peak of the last forward and backward in bytes, and the losses."""
    config = run.config
    assert isinstance(config, Config)
    sizes = replace(job.sizes, ffn_dim=job.sizes.ffn_dim * (WIDER if wide else 1))
    with torch.device("meta"):
        full = Transformer(sizes).to(run.precision.storage)
    draw_weights(full, run.device, config.run.seed)
    model = LanguageModel(full, **{flag: getattr(config, flag) for flag in WAYS[way]})
    shard(model, mesh, MixedPrecisionPolicy(run.precision.compute, run.precision.storage, cast_forward_inputs=False))
    optimizer = config.optimizer.make(model.parameters())
    losses = []
    run.state(model=model, optimizer=optimizer)
    for step in example.text_steps(run, job, place={"way": [*WAYS].index(way), "wide": int(wide)}):
        tokens = slice(SHORT if wide else None)
        with Peak(run.device, model) as peak:
            loss = model(step.batch.inputs[:, tokens], step.batch.targets[:, tokens], step.batch.count)
            step.log(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.row["peak"] = max(row[0] for row in gather_floats([float(peak.bytes)], run.device))
        losses.append(step.local_loss)
    return int(step.row["peak"]), run.global_sums(torch.stack(losses))


def train(config: Config) -> bool:
    """Every way, and the table. Whether the losses are the same."""
    job = example.resolve_own(config, example.fit(), batch_size=1, max_iters=2)
    with example.start_run("tiling", config, job) as run:
        mesh = init_device_mesh(run.device.type, (run.layout.dp,), mesh_dim_names=("dp_shard",))
        long = {way: train_way(run, mesh, job, way, wide=False) for way in WAYS}
        wide = {way: train_way(run, mesh, job, way, wide=True) for way in WAYS}
        return report(run, long, wide)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
