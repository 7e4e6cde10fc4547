"""Mistakes for the fuzzer to find. Each function breaks the rank that calls it, as far as it is that rank's turn."""

import torch

from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm.trainer.run.startup import StartUp
from support import parity_bugs


def gradients_averaged(rank):
    parity_bugs.gradients_averaged_over_dp()


def other_samples(rank):
    right = Layout.dp_coordinate
    Layout.dp_coordinate = lambda self, number: 1 - right(self, number) if number == 1 else right(self, number)


def crash(rank):
    if rank.rank == 1:
        _at_the_end(_raise(IndexError("planted")))


def refused_alone(rank):
    if rank.rank == 1:
        _at_the_end(_raise(ConfigError("planted")))


def late_refusal(rank):
    _at_the_end(_raise(ConfigError("planted")))


def leftover(rank):
    if rank.is_main:
        _at_the_end(lambda run: (run.outdir / "notes.txt").write_text("planted"))


def another_scale(rank):
    if rank.rank == 1:
        right = torch.amp.GradScaler.__init__

        def init(self, *args, **named):
            right(self, *args, init_scale=1024.0, **named)

        torch.amp.GradScaler.__init__ = init


def _raise(error):
    def act(run):
        raise error

    return act


def _at_the_end(act):
    """After what the run has cost is gathered, which is the last thing that ranks do together."""
    right = StartUp.end

    def end(self, run, error):
        right(self, run, error)
        act(run)

    StartUp.end = end
