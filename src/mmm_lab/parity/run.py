"""One case after another: prepare, one device, ranks, verdict. This process starts ranks and computes nothing."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mmm.errors import UserError
from mmm.history.record.folder import write_atomically
from mmm.runtime.device import choose_device
from mmm.runtime.ranks import whoami
from mmm.torch_private.dynamo import import_dynamo
from mmm_lab.parity import models
from mmm_lab.parity.layouts import ParityCase
from mmm_lab.parity.subject import PreparedCase, make_subject_of, plan_problems, prepare
from mmm_verify.errors import UserError as VerifyError
from mmm_verify.ranks.ranks import fork_one
from mmm_verify.run import OnOneDevice, on_one_process, verify_subject
from mmm_verify.verdict import Verdict

# One model on a layout with an optimizer, compared with one device, as ``--json`` writes it (`comparison`).
Row = dict[str, Any]


def prepare_cases(cases: Sequence[ParityCase], samples: int) -> tuple[list[PreparedCase], list[tuple[ParityCase, str]]]:
    """Check all cases. Returns those that can be compared, and the others with the reason."""
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
            ready.append(prepare(parity, case, samples))
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

    def count() -> int:
        choose_device(device_type, whoami())
        return getattr(torch, device_type).device_count()

    # A process that ends looks: ranks cannot be forked from one that has touched a device.
    devices: int = fork_one(f"--device {device_type}", count, timeout=60)
    return devices


def compare(
    ready: Sequence[PreparedCase], timeout: float, dtype: str = "fp64", device_type: str = "cpu"
) -> Iterator[Row]:
    """Compare every case with one device, by each of its optimizers. Prints a line for each.

    Args:
        timeout: seconds that one device may take, and again the ranks of a case.
        dtype: the type that both compute in.
        device_type: device type of the ranks. The one device is the CPU.
    """
    # By model, data and optimizer: what one device computes is the same for all layouts.
    known: dict[tuple[str, str, str], OnOneDevice] = {}
    for index, prepared in enumerate(ready, 1):
        case = prepared.case
        for optimizer in case.optimizers:
            began = time.perf_counter()
            key = case.model, case.data, optimizer
            subject = make_subject_of(prepared, optimizer, dtype, device_type)
            try:
                if key not in known:
                    known[key] = on_one_process(subject, timeout)
                verdict = verify_subject(subject, timeout, known[key])
            except VerifyError as error:
                # The others are compared all the same.
                verdict = Verdict("error", case.layout, case.ranks, reason=str(error))
            seconds = time.perf_counter() - began
            row = comparison(case, optimizer, verdict, seconds)
            distances = ", ".join(f"{stage} {error:.0e}" for stage, error in verdict.errors.items())
            print(f"[{index}/{len(ready)}] {case}, {optimizer}: {verdict.result} ({distances})", flush=True)
            if not verdict.same:
                print(f"{row['reason']}\n{verdict.details}", flush=True)
            yield row


def comparison(case: ParityCase, optimizer: str, verdict: Verdict, seconds: float) -> Row:
    """Make the row of a verdict: how far loss and worst gradient of the first step are off, and the whole verdict."""
    return {
        "layout": case.layout,
        "ranks": case.ranks,
        "max_rel_loss_diff": _finite(verdict, "loss"),
        "max_grad_diff": _finite(verdict, "gradients"),
        "passed": verdict.same,
        "model": case.model,
        "technique": case.technique,
        "optimizer": optimizer,
        "seconds": seconds,
        "reason": "" if verdict.same else str(verdict),
    }


def _finite(verdict: Verdict, stage: str) -> float | None:
    """How far a stage is off. None if it was not reached, or that is no number, which JSON has not."""
    error = verdict.errors.get(stage)
    if error is None or not math.isfinite(error):
        return None
    return error


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write all rows, as a list of mappings."""
    text = json.dumps(rows, indent=1, ensure_ascii=False)
    # Whole or not at all: a killed run leaves the file before.
    write_atomically(path, text.encode() + b"\n")
