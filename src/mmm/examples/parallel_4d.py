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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mmm.data.datasets import load_images
from mmm.models.cnn import CNN, CNNConfig
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.models.vit import PRESETS, ViT
from mmm.parallel import Layout, batch_sizes
from mmm.parallel.assemble import partition_model
from mmm.parallel.plan import Plan
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.transformer import check_transformer, transformer_plan
from mmm.parallel.plans.vit import check_vit, vit_plan
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.needs import Need, check_needs
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import RunOptions, TextOptions, parse
from mmm.trainer.parallelize import parallelize
from mmm.trainer.report import model_summary, print_once
from mmm.trainer.run import Run, start_run
from mmm.trainer.tasks import ImageTask, Task, TokenTask
from mmm.trainer.text import check_tokens
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
MakeTask = Callable[[Run], Task]


@dataclass(frozen=True, kw_only=True)
class Config(LayoutOptions, RunOptions):
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
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"

    def chooses(self) -> bool:
        return self.parallel == "fsdp" and self.axes() == LayoutOptions().axes()

    def layout(self, world_size: int) -> Layout:
        """The mesh for that many ranks. Chosen: 2 along each axis in turn, as long as the ranks divide; dp the rest."""
        if not self.chooses():
            return super().layout(world_size)
        sizes = dict.fromkeys(("pp", "tp", "dp_shard", *(["cp"] if self.model == "transformer" else [])), 1)
        for axis in sizes:
            if world_size % 2 == 0:
                sizes[axis], world_size = 2, world_size // 2
        layout = Layout(**{**sizes, "dp_shard": sizes["dp_shard"] * world_size})
        check_needs(self, layout)
        return layout


def choose(
    config: Config, layout: Layout, batch: int, global_batch: int
) -> tuple[nn.Module, Plan, Tensor, dict[str, object], MakeTask]:
    """The model asked for; its plan; what its forward takes; what the record says of the data; what it trains on."""
    n_layers = 4 if config.n_layers is None else config.n_layers
    seq_length = 128 if config.seq_length is None else config.seq_length
    n_experts = 0 if config.n_experts is None else config.n_experts
    with torch.device("meta"):  # shapes without memory: no rank ever holds the whole model
        if config.model == "transformer":
            sizes = TransformerConfig(
                dim=64,
                n_layers=n_layers,
                n_heads=8,
                n_kv_heads=4,
                ffn_dim=192,
                n_experts=n_experts,
                top_k=1 if n_experts == 1 else 2,
            )
            check_transformer(sizes, layout, seq_length, config.cp_style or "ring")
            tokens, validation, about = TextOptions(seq_length=seq_length).load(sizes.vocab_size, config.seed)
            check_tokens(tokens, validation, global_batch)
            return (
                Transformer(sizes),
                transformer_plan(sizes),
                torch.zeros(batch, seq_length).long(),
                about,
                lambda run: TokenTask(run, tokens, validation, batch, global_batch, 4),
            )
        model: nn.Module
        if config.model == "vit":
            vit = replace(PRESETS["debug"], image_size=16, patch_size=4, channels=1, n_layers=n_layers)
            check_vit(vit, layout)
            model, plan = ViT(vit), vit_plan()
        else:
            model, plan = CNN(CNNConfig(image_size=16).without_dropout()), cnn_plan()
    digits, images = load_images("digits", image_size=16), torch.zeros(batch, 1, 16, 16, device="meta")
    check_images(digits, global_batch, layout.dp)
    return model, plan, images, digits.describe(), lambda run: ImageTask(run, digits, batch, global_batch)


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    config.check()
    layout, techniques = config.layout(whoami().world_size), config.techniques(config.compile)
    batch, global_batch = batch_sizes(config.batch_size, config.global_batch_size, layout.dp, default=8)
    model, plan, sample, about_data, make_task = choose(config, layout, batch, global_batch)
    partition = partition_model(model, plan, layout, techniques, sample, config.dtype)
    if config.summary:
        print_once(model_summary(model, sample))
        return

    holds = footprint(model, config.optimizer, techniques, partition, layout.pp)
    with start_run("parallel_4d", config, layout, about_data, holds) as run:
        if config.chooses():
            run.note(f"no axis was given a size: layout {layout} chosen for {layout.ranks} ranks")
        here = parallelize(
            run, model, plan, techniques, partition
        )  # cut into stages, each over tp, cp and dp; then the weights
        optimizer = make_optimizer(config.optimizer, here.parameters(), config.lr)
        task = make_task(run)
        steps, batches = config.steps(task.steps_per_epoch), task.all_batches()
        run.describe(global_batch_size=global_batch, steps=steps)
        for step in range(steps):
            run.clock.start()
            part = next(batches)  # of this dp coordinate: the same on each of its stages, and along cp and tp
            run.clock.lap("dtd")
            loss = here.step(part.inputs, part.targets, part.count)  # laps dtf, dtb and, with pp, dtw
            here.clip(MAX_NORM)  # of the whole gradient, over all stages and ranks
            optimizer.step()
            optimizer.zero_grad()
            here.balance_experts(measured=False)
            run.clock.lap("dto")
            more = task.evaluate(here) if (last := step == steps - 1) else {}
            run.step(step, loss, samples=global_batch, tokens=task.tokens, last=last, **more)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
