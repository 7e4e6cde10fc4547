"""Four axes at once, from flags alone, for each model: pipeline × data × context × tensor parallel.

    launch python3 -m mmm.examples.parallel_4d --model vit
    launch -n 8 --device cpu python3 -m mmm.examples.parallel_4d --pp 2 --cp 2 --tp 2

N ranks stand on a mesh of pp × dp × cp × tp, tp varying fastest; the 16 of pp2·dp2·cp2·tp2::

                stage 0: first layers                  stage 1: last layers, loss
                 cp 0          cp 1                      cp 0          cp 1
              tp 0   tp 1   tp 0   tp 1               tp 0   tp 1   tp 0   tp 1
            ┌──────┬──────┬──────┬──────┐           ┌──────┬──────┬──────┬──────┐
      dp 0  │   0  │   1  │   2  │   3  │ ────────► │   8  │   9  │  10  │  11  │   samples 0 … b-1
            ├──────┼──────┼──────┼──────┤           ├──────┼──────┼──────┼──────┤
      dp 1  │   4  │   5  │   6  │   7  │ ────────► │  12  │  13  │  14  │  15  │   samples b … 2b-1
            └──────┴──────┴──────┴──────┘           └──────┴──────┴──────┴──────┘

Which ranks talk to rank 0, what about, and how often::

    tp   0 1        parts of the same matrices: activations, several times in every layer
    cp   0 2        parts of the same sequences: keys and values, once in every layer
    dp   0 2 4 6    the same layers (FSDP, over dp × cp): parameters and gradients, once a layer and step
    pp   0 8        other layers: the activations of a micro-batch, once a stage

What talks most stands innermost, on neighbours. An axis of size 1 costs nothing, and is not there. A model lacks the
axes it has nothing to be cut by: images have no cp. With --n_experts the Transformer has experts, and
--ep cuts them over ranks of dp. 20 steps. Same seed and same global batch give one device's losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mmm.data.datasets import load_images
from mmm.models.cnn import CNN, CNNConfig
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.models.vit import PRESETS, ViT
from mmm.parallel import batch_sizes
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.transformer import check_transformer, transformer_plan
from mmm.parallel.plans.vit import check_vit, vit_plan
from mmm.runtime.ranks import whoami
from mmm.trainer.flags import run_main
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import Need, parse
from mmm.trainer.parallelize import parallelize
from mmm.trainer.report import print_once
from mmm.trainer.resolve import Resolved, resolve_model
from mmm.trainer.run import start_run
from mmm.trainer.tasks import ImageTask, Task, TokenTask
from mmm.trainer.text import TextOptions
from mmm.trainer.vision import check_images

MAX_NORM = 1.0
TOKENS = Need(
    lambda config, _: config.model == "transformer",
    "--model transformer",
    "images have none of it",
    "--model transformer",
)
LAYERS = Need(
    lambda config, _: config.model != "cnn", "--model transformer or vit", "the CNN's layers are four", "--model vit"
)


@dataclass(frozen=True, kw_only=True)
class Config(LayoutOptions):
    """A small model on any layout, where no axis is given one chosen for the ranks there are."""

    NEEDS: ClassVar[dict[str, Need]] = {"n_layers": LAYERS, "seq_length": TOKENS, "n_experts": TOKENS}
    model: Literal["transformer", "vit", "cnn"] = "transformer"
    """The Transformer trains on the standard library's source, the others on the digits: both come with the package."""
    n_layers: int | None = None
    """Of the Transformer and the ViT. Default: 4."""
    seq_length: int | None = None
    """Tokens a sample, of the Transformer. Default: 128."""
    n_experts: int | None = None
    """Of each layer of the Transformer, for --ep to cut. Default: none."""
    default_max_iters = 20
    default_batch_size = 8
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"

    def chooses(self, ranks: int) -> bool:
        return self.parallel == "fsdp" and super().axes(ranks) == LayoutOptions().axes(ranks)

    def axes(self, ranks: int) -> dict[str, int]:
        """As given. Chosen: 2 along each axis in turn, as long as the ranks divide; dp the rest."""
        if not self.chooses(ranks):
            return super().axes(ranks)
        sizes = dict.fromkeys(("pp", "tp", "dp_shard", *(["cp"] if self.model == "transformer" else [])), 1)
        for axis in sizes:
            if ranks % 2 == 0:
                sizes[axis], ranks = 2, ranks // 2
        return {**sizes, "dp_shard": sizes["dp_shard"] * ranks}


def resolve(config: Config) -> Resolved:
    """The model asked for, its plan, and what it trains on; needs no process group."""
    config.check()
    ranks = whoami().world_size
    layout = config.layout(ranks)
    batch, global_batch = batch_sizes(config.batch_size, config.global_batch_size, layout.dp, config.default_batch_size)
    n_layers = 4 if config.n_layers is None else config.n_layers
    sizes: Any
    data: Any
    with torch.device("meta"):  # shapes without memory: no rank ever holds the full model
        if config.model == "transformer":
            sizes = TransformerConfig(
                dim=64,
                n_layers=n_layers,
                n_heads=8,
                n_kv_heads=4,
                ffn_dim=192,
                n_experts=config.n_experts or 0,
                top_k=1 if config.n_experts == 1 else 2,
            )
            seq_length = 128 if config.seq_length is None else config.seq_length
            check_transformer(sizes, layout, seq_length, config.techniques().cp_style)
            model: nn.Module = Transformer(sizes)
            plan, sample = transformer_plan(sizes), torch.zeros(batch, seq_length).long()
        else:
            sample = torch.zeros(batch, 1, 16, 16)
            if config.model == "vit":
                sizes = replace(PRESETS["debug"], image_size=16, patch_size=4, channels=1, n_layers=n_layers)
                check_vit(sizes, layout)
                model, plan = ViT(sizes), vit_plan()
            else:
                sizes = CNNConfig(image_size=16).without_dropout()
                model, plan = CNN(sizes), cnn_plan()
    if config.model == "transformer":
        data = TextOptions(seq_length=seq_length).load(sizes.vocab_size, config.seed)
        steps = config.steps(data.check(global_batch))
    else:
        data = load_images("digits", image_size=16)
        steps = config.steps(check_images(data, global_batch, layout.dp))
    notes = (f"no axis was given a size: layout {layout} chosen for {ranks} ranks",) if config.chooses(ranks) else ()
    return resolve_model(config, layout, sizes, model, plan, sample, data, steps, notes=notes)


def train(config: Config) -> None:
    resolved = resolve(config)  # everything here is checked before any rank talks to another
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("parallel_4d", config, resolved) as run:
        model = parallelize(run, resolved)  # split into stages, each sharded over tp, cp and dp; then the weights
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        text = config.model == "transformer"
        task: Task = TokenTask(run, resolved, eval_batches=4) if text else ImageTask(run, resolved)
        batches = task.all_batches()
        for step in range(resolved.steps):
            run.clock.start()
            batch = next(batches)  # of this dp coordinate: the same on each of its stages, and along cp and tp
            run.clock.lap("dtd")
            loss = model.step(batch.inputs, batch.targets, batch.count)  # laps dtf, dtb and, with pp, dtw
            model.clip(MAX_NORM)  # of the full gradient, over all stages and ranks
            optimizer.step()
            optimizer.zero_grad()
            model.balance_experts(measured=False)
            run.clock.lap("dto")
            more = task.evaluate(model) if (last := step == resolved.steps - 1) else {}
            run.step(step, loss, samples=task.global_batch_size, tokens=task.tokens, last=last, **more)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
