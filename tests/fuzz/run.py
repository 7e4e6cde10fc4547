"""Run a case on ranks that are forked for it, and tell what came of it: one outcome for all of them.

The process that forks has imported everything and computed nothing. The ranks see what launch would have set, and call
the program's own `train` on the configuration that its own command line gives.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import h5netcdf  # noqa: F401  what each rank would import at its first use, and pay for, as the next
import h5py
import torch
import torch._dynamo
import torch.distributed as dist
import torchinfo  # noqa: F401
import xarray  # noqa: F401

from fuzz.draw import Case
from fuzz.flags import PROGRAMS, arguments
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DivergedError, UserError
from mmm.history.record.folder import TRACES
from mmm.run import run as loop
from mmm.run.command_line import parse
from mmm.runtime.ranks import Rank
from mmm_verify.testing import RanksFailed, fork_ranks
from support.published import expected_cifar
from support.resuming import Ended, ending_before

# Seconds that a case may take: a hang, also on a machine that is busy with something else.
TIMEOUT = 200.0
COMPILE_TIMEOUT = 400.0
# Curves that have to be those of one rank.
SERIES = ("loss", "train_loss", "val_loss", "test_loss", "test_acc", "imbalance")
# All that a run may write to its folder.
RECORD = {"config.json", "train_dataset.h5", "log.txt", "model.pt", "checkpoints", TRACES}
# Makes a rank wrong on purpose, to see that the fuzzer finds it.
Plant = Callable[[Rank], None]


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        kind: ``ran``, ``ended`` (in the middle, as it was to), ``diverged``, ``refused``, ``left`` (printed what was
            asked for, and left) or ``crashed``.
        reason: of what is no run, one line. details: a traceback, or the end of what the ranks printed.
        series: numbers of the record by name, a row each (NaN where a row lacks it). weights: a digest of the saved
            model, by tensor. facts: of config.json. scales: of the loss under fp16, after each step.
        resumed_at: steps at which the record went on.
    """

    kind: str
    reason: str = ""
    details: str = ""
    series: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    seconds: float = 0.0


def run_case(case: Case, scratch: Path, plant: Plant | None = None) -> Outcome:
    """Run `case`, its record in a folder of `scratch` that is gone afterwards.

    Args:
        plant: called on each rank before it trains: a bug that is to be found.
    """
    began = time.monotonic()
    folder = scratch / f"case-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if case.before is None:
        outcome = _run(case, folder, plant)
    else:
        first = _run(case.before, folder, plant)
        outcome = first
        if first.kind == "ended":
            outcome = _run(case, folder, plant)
            outcome.scales = first.scales[: case.before.saved] + outcome.scales
        if outcome.kind == "ran" and outcome.resumed_at != [case.before.saved]:
            outcome = Outcome("crashed", f"it went on from {outcome.resumed_at}, not from step {case.before.saved}")
    shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    return outcome


def _run(case: Case, folder: Path, plant: Plant | None) -> Outcome:
    outdir = folder / "out"
    argv = [*arguments(case.program, case.flags), "--outdir", str(outdir)]
    argv += ["--resume", "auto"] if case.before is not None else []
    module = PROGRAMS[case.program]
    try:
        config = parse(module.Config, line=argv)
    except UserError as error:
        return Outcome("refused", str(error))
    limit = COMPILE_TIMEOUT if case.flags.get("compile") == "on" else TIMEOUT
    try:
        answers = fork_ranks(_train, case.ranks, case, config, argv, folder, plant, timeout=limit)
    except RanksFailed as error:
        outcome = Outcome("crashed", str(error), _short(error.details))
    else:
        outcome = _together(answers, outdir, goes_on=case.before is not None)
    if outcome.kind == "crashed" and not outcome.details:
        outcome.details += _printed(folder)
    return outcome


def _train(rank: Rank, case: Case, config: Any, argv: list[str], folder: Path, plant: Plant | None) -> Outcome:
    """The life of a rank."""
    program = case.program
    out = os.open(folder / f"rank{rank.rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    if rank.world_size > 1:
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank.rank))
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(rank.world_size))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank.port)}
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    sys.argv = [PROGRAMS[program].__name__, *argv]
    # A refusal names the program that was started.
    sys.modules["__main__"].__spec__ = ModuleSpec(PROGRAMS[program].__name__, None)
    torch.set_num_threads(1)
    scales: list[float] = []
    update = torch.amp.GradScaler.update

    def updated(scaler: Any, *args: Any) -> None:
        update(scaler, *args)
        if scaler.is_enabled():
            scales.append(scaler.get_scale())

    torch.amp.GradScaler.update = updated  # type: ignore[method-assign]
    expect_hashes(case)
    if plant is not None:
        plant(rank)
    if case.ends_at is not None:
        loop.seed_step = ending_before(case.ends_at, folder / f"out/checkpoints/step-{case.saved}", loop.seed_step)  # type: ignore[assignment]
    outcome = Outcome("ran")
    try:
        PROGRAMS[program].train(config)
    except Ended:
        return Outcome("ended", scales=scales)
    except DivergedError as error:
        outcome = Outcome("diverged", str(error))
    except UserError as error:
        outcome = Outcome("refused", str(error), traceback.format_exc())
    except SystemExit as leaving:
        # An example that was asked for its summary.
        if leaving.code != 0:
            raise
        outcome = Outcome("left")
    outcome.scales = scales
    outdir = folder / "out"
    if rank.is_main and outcome.kind in ("ran", "diverged"):
        outcome = _read(outcome, outdir) if outdir.exists() else Outcome("left")
    if outcome.kind == "ran" and dist.is_initialized():
        return Outcome("crashed", "the process group is still up after the run")
    if multiprocessing.active_children():
        # Of data loaders that nobody holds any more.
        gc.collect()
    if left := multiprocessing.active_children():
        for child in left:
            child.kill()
        if outcome.kind == "ran":
            return Outcome("crashed", f"{len(left)} processes are left after the run: {left}")
    return outcome


def expect_hashes(case: Case) -> None:
    """Let torchvision accept the case's files, which are made up and so have other hashes than the published ones."""
    # Only of CIFAR-10 hashes are compared; other cases do without torchvision's import.
    if case.flags.get("dataset") != "cifar10":
        return
    dataset = import_torchvision("datasets").CIFAR10
    for attribute, value in expected_cifar(case.data / "cifar-10-batches-py").items():
        setattr(dataset, attribute, value)


def _together(answers: list[Outcome], outdir: Path, goes_on: bool) -> Outcome:
    """The outcome of all ranks, with the record's numbers; a crash where they do not agree.

    Args:
        goes_on: with a record that is there.
    """
    first = answers[0]
    # Rank 0 alone knows of the record.
    kinds = ["ran" if answer.kind == "left" else answer.kind for answer in answers]
    if len(set(kinds)) > 1:
        reasons = "\n".join(f"rank {rank}: {answer.reason}" for rank, answer in enumerate(answers))
        return Outcome("crashed", f"the ranks do not agree how it went: {kinds}", reasons)
    if first.kind == "refused":
        if len({answer.reason for answer in answers}) > 1:
            reasons = "\n".join(answer.reason for answer in answers)
            return Outcome("crashed", "the ranks are refused for different reasons", reasons)
        if not goes_on and outdir.exists() and any(outdir.iterdir()):
            return Outcome("crashed", f"refused after the record was begun: {first.reason}", first.details)
        return first
    scales = [answer.scales for answer in answers]
    if any(other != scales[0] for other in scales):
        of_ranks = "\n".join(f"rank {rank}: {some}" for rank, some in enumerate(scales))
        return Outcome("crashed", "the ranks' loss scales differ: they skip different steps", of_ranks)
    return first


def _read(outcome: Outcome, outdir: Path) -> Outcome:
    """What the run has left on disk."""
    names = {path.name for path in outdir.iterdir()}
    if outcome.kind == "ran" and (strange := {name for name in names - RECORD if not name.startswith("fingerprints-")}):
        return Outcome("crashed", f"the run has left {', '.join(sorted(strange))}")
    # A tenth of the time that xarray takes.
    with h5py.File(outdir / "train_dataset.h5") as data:
        outcome.resumed_at = [mark["step"] for mark in json.loads(data.attrs.get("resumed", "[]"))]
        outcome.series = {name: data[name][:].astype(float).tolist() for name in SERIES if name in data}
    outcome.facts = json.loads((outdir / "config.json").read_text())
    if "model.pt" in names:
        state = torch.load(outdir / "model.pt", weights_only=True)
        for name, tensor in state.items():
            wide = tensor.double().flatten()
            places = torch.arange(1, wide.numel() + 1, dtype=torch.float64).cos()
            outcome.weights[name] = (float(wide @ places), float(wide.abs().sum()))
    return outcome


def _short(details: str) -> str:
    """A traceback's entries of the package's own files, and its end."""
    entries = re.split(r"\n(?=  File )", details.strip())
    return "\n".join([entry for entry in entries[:-1] if "/mmm/" in entry][-6:] + entries[-1:])


def _printed(folder: Path, lines: int = 12) -> str:
    """The end of what each rank printed on its stderr and stdout, of ranks that said something unusual."""
    messages = []
    for path in sorted(folder.glob("rank*.txt")):
        text = path.read_text(errors="replace")
        if any(word in text for word in ("Error", "terminate", "Fatal", "abort")):
            messages.append(f"--- {path.stem}\n" + "\n".join(text.splitlines()[-lines:]))
    if messages:
        return "\n" + "\n".join(messages[:2])
    return ""
