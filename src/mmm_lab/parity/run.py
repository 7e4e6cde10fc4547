"""One case after the other: prepare, reference, ranks, verdict. This process starts ranks and computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mmm_lab.parity.report import ERRORS, Comparison, evaluate, failed
from mmm_lab.parity.train import PreparedCase, plan_problems, prepare, train
from mmm_verify.ranks import RanksFailed, fork_ranks


def prepare_cases(
    cases: Sequence[ParityCase], training: Training
) -> tuple[list[PreparedCase], list[tuple[ParityCase, str]]]:
    """The cases that go, and those that do not with the reason."""
    import_dynamo()  # what DTensor and optimizers import at their first use, and each rank would pay for
    torch.set_num_threads(1)  # ranks are forked from here: no OpenMP threads, in them neither
    checked_models: set[str] = set()
    good: list[PreparedCase] = []
    refused: list[tuple[ParityCase, str]] = []
    for case in cases:
        try:
            parity = models.find(case.model)
            good.append(prepare(parity, case, replace(training, data=case.data)))
        except UserError as error:
            refused.append((case, str(error)))
            continue
        if case.model not in checked_models:
            checked_models.add(case.model)
            for text in plan_problems(parity):
                print(f"--model {case.model}: {text}", flush=True)
    return good, refused


def count_devices(device_type: str) -> int:
    """How many ranks can have a device of their own here; of the CPU as many as are asked for. A process that is then
    gone looks: ranks cannot be forked from one that has touched a device.

    Raises:
        DeviceError: there is none.
    """
    if device_type == "cpu":
        return sys.maxsize

    def count(rank: Rank) -> int | str:
        try:
            choose_device(device_type, rank)
        except DeviceError as error:
            return str(error)
        return getattr(torch, device_type).device_count()

    (devices,) = fork_ranks(count, 1, timeout=60)
    if isinstance(devices, str):
        raise DeviceError(devices)
    return devices


def compare(
    ready: Sequence[PreparedCase], timeout: float, folder: Path, say: Callable[[str], None], device_type: str = "cpu"
) -> Iterator[Comparison]:
    """Train every case and hold it against the reference of its model and optimizer, which is trained once, on the CPU.

    Args:
        timeout: seconds that a case may take. folder: for the tracebacks of ranks that failed.
        device_type: of the ranks.
    """
    references: dict[tuple[str, str, str], Reference | RanksFailed] = {}
    for index, prepared in enumerate(ready):
        case = prepared.case
        for optimizer in case.optimizers:
            key = case.model, case.data, optimizer
            if key not in references:
                references[key] = _reference(prepared, optimizer, timeout)
        known = {optimizer: references[case.model, case.data, optimizer] for optimizer in case.optimizers}
        rows = _compare_one(prepared, known, timeout, folder, device_type)
        results = ", ".join(f"{row.optimizer} {row.result}" for row in rows)
        say(f"[{index + 1}/{len(ready)}] {case}: {results}")
        yield from rows


def _compare_one(
    prepared: PreparedCase, known: Mapping[str, Reference | RanksFailed], timeout: float, folder: Path, device_type: str
) -> list[Comparison]:
    case, training = prepared.case, prepared.training
    references: dict[str, Reference] = {}
    try:
        for optimizer, expected in known.items():
            if isinstance(expected, RanksFailed):
                raise expected
            references[optimizer] = expected
        answers = fork_ranks(train, case.ranks, prepared, references, timeout, device_type, timeout=timeout)
    except RanksFailed as error:
        with open(folder / ERRORS, "a", encoding="utf-8") as file:
            file.write(f"{case}: {error}\n{error.details}\n")
        return [failed(case, optimizer, training, str(error)) for optimizer in known]
    by_optimizer = zip(references.items(), zip(*answers, strict=True), strict=True)
    return [evaluate(case, optimizer, training, reference, curves) for (optimizer, reference), curves in by_optimizer]


def _reference(prepared: PreparedCase, optimizer: str, timeout: float) -> Reference | RanksFailed:
    def alone(rank: Rank) -> Reference:
        return reference.train(prepared.parity, prepared.training, optimizer, make_optimizer)

    try:
        return fork_ranks(alone, 1, timeout=timeout)[0]
    except RanksFailed as error:
        return RanksFailed(f"the reference: {error}", error.details)
