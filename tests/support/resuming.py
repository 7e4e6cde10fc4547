"""Runs of the trainers on ranks of the pool, which end in the middle and go on."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import mmm.history
from mmm.checkpoint.manifest import read_manifest
from mmm.checkpoint.storage import Reader, read_metadata
from mmm.errors import UserError
from mmm.parallel import build_mesh
from mmm.run.command_line import configure
from support.pool import program_on

# Seconds for a save to end.
PATIENCE = 60.0


class Ended(Exception):
    """What ends a run in the middle."""


def before_step(seed: int, step: int, coordinate: int) -> None:
    """For a test to patch."""


def ending_before(ends_at: int, checkpoint: Path, seed_step: Callable[..., None]) -> Callable[..., None]:
    """What the loop calls before each step, in place of its `seed_step`: it raises `Ended` before one, once the
    checkpoint is complete."""

    def ending(seed: int, step: int, coordinate: int) -> None:
        if step == ends_at:
            deadline = time.monotonic() + PATIENCE
            while not checkpoint.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise Ended
        seed_step(seed, step, coordinate)

    return ending


def train(rank, program: str, flags: dict, ends_at: int | None = None) -> str:
    """Run a trainer; what a user's error says, or nothing.

    Args:
        ends_at: the step before which the run ends, on all ranks, once the checkpoint before it is complete.
    """
    module = importlib.import_module(program)
    seed_step = mmm.run.run.seed_step

    def announced(seed, step, coordinate):
        before_step(seed, step, coordinate)
        seed_step(seed, step, coordinate)

    ending = announced
    if ends_at is not None:
        every = flags["checkpoint_every"]
        ending = ending_before(ends_at, flags["outdir"] / f"checkpoints/step-{ends_at // every * every}", announced)
    with ExitStack() as stack:
        stack.enter_context(program_on(rank))
        stack.enter_context(patch("mmm.runtime.agreement.FIRST_WORD", 0.0))
        stack.enter_context(patch("mmm.run.run.seed_step", ending))
        try:
            module.train(configure(module.Config, device="cpu", plots=False, flush_every=3, **flags))
        except Ended:
            return "ended"
        except UserError as error:
            return str(error)
    return ""


def train_in_turn(rank, program: str, runs: list[tuple]) -> list[str]:
    """Runs on one layout, one after the other: what `train` says of each.

    They share their mesh. DTensor finds only once how an operator goes on it, which takes longer than these runs.

    Args:
        runs: of each the flags, and `ends_at`.
    """
    with patch("mmm.run.sharded.build_mesh", cache(build_mesh)):
        return [train(rank, program, flags, ends_at) for flags, ends_at in runs]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, full."""
    state: dict = {}
    reader = Reader(folder, read_metadata(folder, read_manifest(folder).files))
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    by_name = dict(state["model"])
    for name, of in state.get("optimizer", {}).items():
        by_name |= {f"{name} {key}": tensor for key, tensor in of.items()}
    return by_name


def curve(folder: Path, name: str = "loss") -> list[float]:
    return mmm.history.load(folder)[name].values.tolist()
