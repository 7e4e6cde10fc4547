"""One case after another: prepare, reference, ranks, verdict. This process starts ranks and computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mmm.errors import DeviceError, UserError
from mmm.runtime.device import choose_device
from mmm.runtime.ranks import Rank
from mmm.torch_private.dynamo import import_dynamo
from mmm_lab.parity import models, reference
from mmm_lab.parity.layouts import ParityCase
from mmm_lab.parity.optimizers import make_optimizer
from mmm_lab.parity.reference import Reference, Training
from mmm_lab.parity.report import ERRORS, Comparison, comparison, evaluate
from mmm_lab.parity.train import PreparedCase, plan_problems, prepare, train
from mmm_verify.ranks import RanksFailed, fork_ranks

# By model, data and optimizer: the reference, or why there is none.
References = dict[tuple[str, str, str], Reference | RanksFailed]


def prepare_cases(
    cases: Sequence[ParityCase], training: Training
) -> tuple[list[PreparedCase], list[tuple[ParityCase, str]]]:
    """Check all cases. Returns those that can be trained, and the others with the reason."""
    # DTensor and optimizers import it at their first use, and each rank would pay for that.
    import_dynamo()
    # Ranks are forked from here, and OpenMP's threads do not survive a fork.
    torch.set_num_threads(1)
    checked_models = set()
    ready = []
    refused = []
    for case in cases:
        try:
            parity = models.find(case.model)
            ready.append(prepare(parity, case, replace(training, data=case.data)))
        except UserError as error:
            refused.append((case, str(error)))
            continue
        # Once: the plan of a model is the same on all layouts.
        if case.model not in checked_models:
            checked_models.add(case.model)
            for text in plan_problems(parity):
                print(f"--model {case.model}: {text}", flush=True)
    return ready, refused


def count_devices(device_type: str) -> int:
    """Returns how many ranks can have a device of their own here: on the CPU any number.

    Raises:
        DeviceError: there is none.
    """
    # A rank needs no core of its own: it is slower without.
    if device_type == "cpu":
        return sys.maxsize

    def count(rank: Rank) -> int | str:
        try:
            choose_device(device_type, rank)
        except DeviceError as error:
            return str(error)
        return getattr(torch, device_type).device_count()

    # A process that ends looks: ranks cannot be forked from one that has touched a device.
    (devices,) = fork_ranks(count, 1, timeout=60)
    if isinstance(devices, str):
        raise DeviceError(devices)
    return devices


def compare(
    ready: Sequence[PreparedCase], timeout: float, folder: Path, device_type: str = "cpu"
) -> Iterator[Comparison]:
    """Train every case and compare it with the reference of its model and optimizer. Prints a line for each case.

    Args:
        timeout: seconds that a case may take.
        folder: gets the tracebacks of ranks that failed.
        device_type: device type of the ranks. The reference is trained on the CPU.
    """
    references: References = {}
    for index, prepared in enumerate(ready, 1):
        try:
            rows = _compare_one(prepared, references, timeout, device_type)
        except RanksFailed as error:
            with open(folder / ERRORS, "a", encoding="utf-8") as file:
                file.write(f"{prepared.case}: {error}\n{error.details}\n")
            # No training of the case has an answer then. The cases after it are trained all the same.
            rows = []
            for optimizer in prepared.case.optimizers:
                rows.append(comparison(prepared.case, optimizer, prepared.training, reason=str(error)))
        results = ", ".join(f"{row.optimizer} {row.result}" for row in rows)
        print(f"[{index}/{len(ready)}] {prepared.case}: {results}", flush=True)
        yield from rows


def _compare_one(prepared: PreparedCase, references: References, timeout: float, device_type: str) -> list[Comparison]:
    """Train a case, and compare it. Raises RanksFailed."""
    case = prepared.case
    expected = {}
    for optimizer in case.optimizers:
        expected[optimizer] = _reference(prepared, optimizer, references, timeout)
    # Of each rank, a curve for each optimizer.
    curves = fork_ranks(train, case.ranks, prepared, expected, timeout, device_type, timeout=timeout)
    rows = []
    for place, optimizer in enumerate(case.optimizers):
        curves_of_ranks = [curves_of_rank[place] for curves_of_rank in curves]
        rows.append(evaluate(case, optimizer, prepared.training, expected[optimizer], curves_of_ranks))
    return rows


def _reference(prepared: PreparedCase, optimizer: str, references: References, timeout: float) -> Reference:
    """Train the reference, once for all layouts. Raises RanksFailed, again for each of them."""

    def on_one_rank(rank: Rank) -> Reference:
        return reference.train(prepared.parity, prepared.training, optimizer, make_optimizer)

    key = prepared.case.model, prepared.case.data, optimizer
    if key not in references:
        try:
            (references[key],) = fork_ranks(on_one_rank, 1, timeout=timeout)
        except RanksFailed as error:
            references[key] = RanksFailed(f"the reference: {error}", error.details)
    known = references[key]
    if isinstance(known, RanksFailed):
        raise known
    return known
