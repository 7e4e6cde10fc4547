"""``verify``: the model on one process, the program on the ranks of a mesh, and where the two part."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_verify.dropout import dropout_advice, dropout_findings
from mmm_verify.errors import ConfigError, is_for_user
from mmm_verify.evaluate import ROUNDED_AT_MOST, Evaluation
from mmm_verify.rank import run_rank
from mmm_verify.ranks.ranks import Rank, RanksFailed, blame, fork_ranks
from mmm_verify.reference import Reference, compute_reference, make_batch
from mmm_verify.subject import Subject, make_subject
from mmm_verify.torch_private import import_dynamo
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, Finding, Verdict

TIMEOUT = 120.0  # s that one device, and then the ranks, may take
CASTS = ("float", "to", "type", "type_as")
OF_A_LOSS = ("add", "sub", "mul", "div", "sum", "mean")  # what a step does with a loss, in whatever type that has
COMPILES = "torch/_dynamo"  # in the frames of a rank that compiles
MORE = 60.0  # s that a collective may take beyond it: where it hangs is said here, and not by gloo


def verify(
    model_fn: Callable[[], nn.Module],
    parallelize_fn: Callable[[Any, DeviceMesh], Any],
    batch_fn: Callable[[], Any],
    step_fn: Callable[..., Any] | None = None,
    mesh: str | Mapping[str, int] = "dp2",
    *,
    batch_axes: Sequence[str] | None = None,
    local_batch_fn: Callable[[Any, DeviceMesh], Any] | None = None,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    timeout: float = TIMEOUT,
) -> Verdict:
    """Whether a parallel program computes what its model does on one device.

    Both take two steps in float64, from the same weights and the same global batch, on CPU ranks of this host. Weights,
    batch, loss, every rank's gradients, and what a step makes of the weights decide; what modules return says where.
    Dropout is off for it; whether ranks agree on what is dropped is looked at by itself.

    Args:
        model_fn: () → the model on one device, on the CPU.
        parallelize_fn: (model, mesh) → what the ranks run: the model made parallel by PyTorch's means; None where it is
            changed in place; a tuple with the modules in it where a step needs more, such as a pipeline's schedule.
        batch_fn: () → the global batch: a tensor, or a tuple, list or dict of tensors, the samples along dim 0.
        step_fn: (model, batch) → the mean loss over the batch. With a third parameter it gets the mesh, None on one
            device. It may call ``backward``, and else does not need to. Default: `mmm_verify.subject.plain_step`.
        mesh: axes and sizes, such as ``"dp2,tp2"``.
        batch_axes: the axes whose ranks have different samples. Default: those called dp, data, fsdp, replicate, …
        local_batch_fn: (batch, mesh) → a rank's batch. Default: equal parts of the samples over `batch_axes`.
        optimizer_fn: parameters → the optimizer. Default: SGD.
        timeout: seconds that the step on one device may take, and that on the ranks.

    Returns:
        The verdict; true where the two are the same.

    Raises:
        UserError: the model, batch or step cannot be used on one device, or the mesh not with them.
    """
    subject = make_subject(
        model_fn,
        parallelize_fn,
        batch_fn,
        step_fn,
        mesh,
        batch_axes=batch_axes,
        local_batch_fn=local_batch_fn,
        optimizer_fn=optimizer_fn,
    )
    return verify_subject(subject, timeout)


def verify_subject(subject: Subject, timeout: float = TIMEOUT) -> Verdict:
    """As `verify`. This process starts others, and computes little."""
    import_dynamo()  # what each rank would import
    reference, batch = _on_one_process(subject, timeout)
    ranks = len(subject.places)
    verdict = Verdict(NOT_COMPARABLE, subject.layout, ranks, reason=reference.reason, notes=tuple(reference.notes))
    if reference.reason:
        return verdict
    try:
        observed = fork_ranks(run_rank, ranks, subject, reference, False, timeout + MORE, timeout=timeout)
    except RanksFailed as error:
        return _failed(verdict, error)
    evaluation = Evaluation(subject, reference, observed, batch)
    verdict = evaluation.verdict()
    small = all(finding.error <= ROUNDED_AT_MOST for finding in verdict.findings)
    if verdict.result == NOT_SAME and small and _rounds(subject, reference, timeout):
        evaluation = Evaluation(subject, reference, observed, batch, rounds=True)
        verdict = evaluation.verdict()
    alone = f"the same twice{reference.split}"
    verdict = replace(verdict, compared={"model": alone, **verdict.compared})
    if verdict.same and reference.has_dropout:
        verdict = _with_dropout(evaluation, verdict, timeout)
    return verdict


def _on_one_process(subject: Subject, timeout: float) -> tuple[Reference, Any]:
    """The reference and the batch, computed by a process that is then gone.

    Raises:
        UserError: as `compute_reference`. ConfigError: the process died, or took too long.
    """
    try:
        ((error, reference, batch, modules),) = fork_ranks(_reference, 1, subject, timeout=timeout)
    except RanksFailed as failure:
        raise ConfigError(f"the model on one device: {str(failure).removeprefix('rank 0: ')}") from None
    if error is not None:
        raise error
    for module in modules:  # of a model that is compiled, hundreds, which each rank would import by itself
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return reference, batch


def _reference(rank: Rank, subject: Subject) -> tuple[Exception | None, Reference | None, Any, list[str]]:
    before = set(sys.modules)
    try:
        reference, batch = compute_reference(subject), make_batch(subject)
    except Exception as error:
        if not is_for_user(error):
            raise
        return type(error)(str(error)), None, None, []
    modules = [name for name in sys.modules if name.startswith("torch.") and name not in before]
    return None, reference, batch, modules


def _why_not_comparable(error: RanksFailed) -> str:
    """Why the ranks' failure is none of the program's own. Empty where it is, or may be."""
    if any(COMPILES in frames for frames in error.frames.values()):
        return f"{error}: they were compiling; --timeout gives them more"
    words = str(error).lower()
    if "dtype" in words and ("double" in words or "float64" in words):
        return f"the parallel program fails: {error}. All is computed in float64, and something of it is not"
    return ""


def _failed(verdict: Verdict, error: RanksFailed) -> Verdict:
    reason = _why_not_comparable(error)
    if reason:
        return replace(verdict, reason=reason, details=error.details)
    why = f"{error}: {blame(error.frames, verdict.ranks)}" if error.frames else str(error)
    finding = Finding("program", "the parallel program", None, f"fails: {why}")
    return replace(
        verdict, result=NOT_SAME, findings=(finding,), first=f"the program itself: {why}", details=error.details
    )


def _rounds(subject: Subject, reference: Reference, timeout: float) -> bool:
    """Whether the parallel program computes something in float32 that the model does not: it runs once more for it."""
    ranks = len(subject.places)
    try:
        observed = fork_ranks(run_rank, ranks, subject, reference, False, timeout + MORE, True, timeout=timeout)
    except RanksFailed:
        return False
    return any(_rounds_more(rank.parallel.types, reference.types) for rank in observed)


def _rounds_more(types: Counter[tuple[str, torch.dtype]], expected: Counter[tuple[str, torch.dtype]]) -> bool:
    """Whether there are more casts to float32 than on one device, or functions in it that compute in float64 there."""
    for function, dtype in types:
        if dtype != torch.float32:
            continue
        known = expected[function, dtype]
        if function in CASTS and types[function, dtype] > known:
            return True
        if not known and expected[function, torch.float64] and function not in OF_A_LOSS:
            return True
    return False


def _with_dropout(evaluation: Evaluation, verdict: Verdict, timeout: float) -> Verdict:
    """Once more, with dropout."""
    subject, reference = evaluation.subject, evaluation.reference
    try:
        observed = fork_ranks(run_rank, verdict.ranks, subject, reference, True, timeout + MORE, timeout=timeout)
    except RanksFailed as error:
        return _failed(verdict, error)
    dropped = [rank.parallel for rank in observed]
    findings = dropout_findings(subject, evaluation.loss_axes, dropped)
    if findings:
        return replace(verdict, result=NOT_SAME, findings=tuple(findings), first=findings[0].name)
    compared = {**verdict.compared, "dropout": "ranks with the same samples drop the same"}
    advice = dropout_advice(subject, reference, [rank.parallel for rank in evaluation.ranks], dropped)
    return replace(verdict, compared=compared, advice=tuple(advice))
