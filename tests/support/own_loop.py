"""A loop of one's own, of two models, two optimizers, two schedulers, averages of weights and an object of its own: it
saves, ends in the middle, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, Dataset

from mmm.errors import UserError
from mmm.parallel import EMA, Layout, Plan, batch_sizes, local_batches
from mmm.run import options
from mmm.run.options import replace_flags
from mmm.trainer import build_model, start_run
from support.pool import program_on
from support.resuming import Ended

WIDTH = 6


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 6
    tp: int = 1
    parallel: str = "fsdp"
    noise: bool = True
    of_critic: str = "SGD"
    lr: float = 0.05
    checkpoint: options.CheckpointFlags = options.CheckpointFlags()
    run: options.RunFlags = options.RunFlags()
    hidden: int = 8
    frozen: bool = False


class Network(nn.Module):
    def __init__(self, inputs, outputs, hidden=8):
        super().__init__()
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            # Another tensor each time.
            self.calls = self.calls + 1
        return self.down(torch.tanh(self.up(x)))


PLAN = Plan({"up": ColwiseParallel(), "down": RowwiseParallel()}, fsdp_units=("up", "down"))


class Points(Dataset):
    """By number, and with noise from the default generator."""

    def __init__(self, noise: bool):
        self.noise = noise

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        point = torch.randn(WIDTH, generator=rng, dtype=torch.float64)
        seed = torch.randn(WIDTH, generator=rng, dtype=torch.float64)
        return point + self.noise * 0.1 * torch.randn(WIDTH, dtype=torch.float64), seed


class Tally:
    """Plain numbers of several kinds, and a tensor that the first step makes."""

    def __init__(self):
        self.seen = 0
        self.best = float("inf")
        self.by_step = {}
        self.total = None

    def add(self, step: int, loss: float):
        self.seen = self.seen + 1
        self.best = min(self.best, loss)
        self.by_step[step] = (loss, f"step {step}")
        self.total = torch.tensor([loss], dtype=torch.float64) + (0 if self.total is None else self.total)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def objects(run, config: Config) -> dict:
    def network():
        return Network(WIDTH, WIDTH, config.hidden)

    generator = build_model(run, network, PLAN, name="generator", data_parallel=config.parallel)
    critic = build_model(run, lambda: Network(WIDTH, 1), PLAN, name="critic", data_parallel=config.parallel)
    updated = [p for name, p in generator.named_parameters() if name != "down.bias" or not config.frozen]
    opt_g = torch.optim.AdamW(updated, lr=config.lr)
    if config.of_critic == "SGD":
        opt_d = torch.optim.SGD(critic.parameters(), lr=config.lr, momentum=0.9)
    else:
        opt_d = torch.optim.NAdam(critic.parameters(), lr=config.lr)
    return {
        "generator": generator,
        "critic": critic,
        "opt_g": opt_g,
        "opt_d": opt_d,
        "ema": EMA(generator, 0.9),
        "rate_g": torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.9),
        "rate_d": torch.optim.lr_scheduler.OneCycleLR(opt_d, max_lr=0.1, total_steps=20),
        "tally": Tally(),
    }


def train(
    rank,
    flags: dict,
    ends_at: int | None = None,
    change: Callable[[dict], object] = lambda state: None,
    body: Callable[[int, dict], object] = lambda step, state: None,
) -> str:
    """Run it; what a user's error says, or nothing.

    Args:
        ends_at: the step in whose body the run ends, on all ranks.
        change: the objects, before they are given to ``run.state``.
        body: called at the end of each step's.
    """
    own = {"device": "cpu", "dtype": "fp64", "global_batch_size": 8, "flush_every": 2, **flags}
    config = replace_flags(Config(), **own)
    layout = Layout(tp=config.tp).fit(rank.world_size)
    batch, global_batch = batch_sizes(None, config.run.global_batch_size, layout.dp, default=8)
    first = layout.dp_coordinate(rank.rank) * batch
    try:
        with (
            program_on(rank),
            patch("mmm.runtime.agreement.FIRST_WORD", 0.0),
            start_run("gan", config, layout) as run,
        ):
            samples = local_batches(40, global_batch, first, batch, 0)
            loop(run, config, global_batch, samples, ends_at, change, body)
    except Ended:
        return "ended"
    except UserError as error:
        return str(error)
    return ""


def loop(run, config, global_batch, samples, ends_at, change, body):
    state = objects(run, config)
    generator, critic, opt_g, opt_d, ema, rate_g, rate_d, tally = state.values()
    loaded = dict(state)
    if (other := change(loaded)) is not None:
        loaded = other
    if loaded:
        run.state(**loaded)
    batches = DataLoader(Points(config.noise), batch_sampler=samples)
    for step in run.steps(batches, config.steps, samples=global_batch):
        if step.index == ends_at:
            raise Ended
        points, seeds = step.batch
        fake = generator(seeds + config.noise * 0.1 * torch.randn_like(seeds))
        loss_d = (F.softplus(-critic(points)) + F.softplus(critic(fake.detach()))).sum() / global_batch
        loss_d.backward()
        opt_d.step()
        loss = F.softplus(-critic(fake)).sum() / global_batch
        step.log(loss)
        loss.backward()
        opt_g.step()
        for optimizer in (opt_g, opt_d):
            optimizer.zero_grad()
        ema.update()
        rate_g.step()
        rate_d.step()
        tally.add(step.index, run.global_sum(loss))
        step.row["tally"] = float(tally.total.sum())
        body(step.index, state)


def flags_of(folder: Path, **more) -> dict:
    return {"checkpoint_every": 3, "checkpoint_mode": "blocking", "outdir": folder, **more}
