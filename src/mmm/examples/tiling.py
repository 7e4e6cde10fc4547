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

The first two cut the sequence. PyTorch's `checkpoint` around a piece keeps only the input of the piece, and backward
recomputes the rest. The last one cuts a matrix into several, each an FSDP unit of its own: it is gathered, used and
freed, in forward and in backward.

Each way trains for the same 2 steps, a model with long sequences and a model with few tokens and a wide layer. A table
shows how much memory a step takes at its peak beyond parameters, and that the losses are the same.

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
    """A matrix (out, in) cut into several matrices of some of its rows. Each makes some columns of the output."""

    def __init__(self, linear: nn.Linear, tiles: int) -> None:
        super().__init__()
        self.tiles = nn.ModuleList()
        for rows in linear.weight.detach().chunk(tiles):
            tile = nn.Linear(linear.in_features, len(rows), bias=False, device="meta")
            tile.weight = nn.Parameter(rows.clone())
            self.tiles.append(tile)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, seq, out): FSDP gathers one tile at a time.
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)


def in_tiles(mlp: Any, tiles: int) -> None:
    """Make an MLP compute its tokens tile by tile, in place.

    An MLP treats each token by itself. So its hidden activations (batch, seq, ffn_dim) need to exist for one tile only.
    """
    full_forward = mlp.forward

    def forward(x: Tensor) -> Tensor:
        # (batch, seq / tiles, dim) each
        pieces = [checkpoint(full_forward, piece, use_reentrant=False) for piece in x.chunk(tiles, dim=1)]
        return torch.cat(pieces, dim=1)

    mlp.forward = forward


class LanguageModel(nn.Module):
    """A Transformer and its loss, computed in pieces.

    Args:
        loss_chunks: number of chunks of the sequence that logits and loss are computed in.
        tile: number of tiles of the sequence that each MLP is computed in.
        tile_weights: number of tiles that each matrix of an MLP is cut into.
    """

    def __init__(
        self,
        full: Transformer,
        loss_chunks: int = 1,
        tile: int = 1,
        tile_weights: int = 1,
    ) -> None:
        super().__init__()
        self.output: Any = full.output
        # Without an output, the Transformer's forward returns the hidden states.
        full.output = None
        self.body = full
        self.chunks = loss_chunks
        for layer in full.layers.values():
            mlp = layer.feed_forward
            if tile_weights > 1:
                for name in ("w1", "w2", "w3"):
                    tiled = TiledLinear(getattr(mlp, name), tile_weights)
                    setattr(mlp, name, tiled)
            if tile > 1:
                in_tiles(mlp, tile)

    def forward(self, tokens: Tensor, targets: Tensor, count: int) -> Tensor:
        """The sum of the losses of targets (batch, seq), divided by `count`, the targets of the global batch."""
        # (batch, seq, dim)
        hidden = self.body(tokens)
        if self.chunks == 1:
            return self.loss(hidden, targets, count)
        losses = []
        hidden_chunks = hidden.chunk(self.chunks, dim=1)
        target_chunks = targets.chunk(self.chunks, dim=1)
        for hidden_chunk, target_chunk in zip(hidden_chunks, target_chunks, strict=True):
            losses.append(checkpoint(self.loss, hidden_chunk, target_chunk, count, use_reentrant=False))
        return torch.stack(losses).sum()

    def loss(self, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
        # The logits of a chunk, (batch, seq / chunks, V), are freed once its loss is known.
        return cross_entropy(self.output(hidden), targets, count)


def shard(model: LanguageModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """FSDP in place: every tile of a matrix, every layer, and the rest are a unit each."""
    tiles: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, TiledLinear):
            tiles += module.tiles
    for unit in [*tiles, *model.body.layers.values(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    example.sum_gradients(model)


def train_way(
    run: example.Run,
    mesh: DeviceMesh,
    job: example.Job,
    way: str,
    wide: bool,
) -> Result:
    """Train for a few steps from the initial weights. A collective of all ranks.

    Args:
        way: one of `WAYS`.
        wide: train the model with a wide layer on few tokens, not the one with long sequences.

    Returns:
        The peak of the last forward and backward in bytes, on the rank that needs most; and the loss of each step.
    """
    config = run.config
    assert isinstance(config, Config)
    sizes = job.sizes
    seq_length = config.data.seq_length
    if wide:
        sizes = replace(sizes, ffn_dim=sizes.hidden_dim * WIDER)
        seq_length = SHORT
    with torch.device("meta"):
        full = Transformer(sizes).to(run.precision.storage)
    draw_weights(full, run.device, config.run.seed)
    pieces = {flag: getattr(config, flag) for flag in WAYS[way]}
    model = LanguageModel(full, **pieces)
    policy = MixedPrecisionPolicy(run.precision.compute, run.precision.storage, cast_forward_inputs=False)
    shard(model, mesh, policy)
    optimizer = config.optimizer.make(model.parameters())
    losses = []
    run.state(model=model, optimizer=optimizer)
    place = {"way": [*WAYS].index(way), "wide": int(wide)}
    for step in example.text_steps(run, job, place=place):
        inputs = step.batch.inputs[:, :seq_length]
        targets = step.batch.targets[:, :seq_length]
        with Peak(run.device, model) as peak:
            loss = model(inputs, targets, step.batch.count)
            step.log(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.row["peak"] = max(row[0] for row in gather_floats([float(peak.bytes)], run.device))
        losses.append(step.local_loss)
    return int(step.row["peak"]), run.global_sums(torch.stack(losses))


def train(config: Config) -> bool:
    """Train both models every way, and log the table. Returns whether all ways have the same losses."""
    job = example.resolve_own(config, example.fit(), batch_size=1, max_iters=2)
    with example.start_run("tiling", config, job) as run:
        mesh = init_device_mesh(run.device.type, (run.layout.dp,), mesh_dim_names=("dp_shard",))
        long = {way: train_way(run, mesh, job, way, wide=False) for way in WAYS}
        wide = {way: train_way(run, mesh, job, way, wide=True) for way in WAYS}
        return report(run, long, wide)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
