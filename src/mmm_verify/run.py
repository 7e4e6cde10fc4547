"""``verify``: runs the model on one process and the program on the ranks of a mesh, and says where the two differ."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_verify.adapter import FAULT, Adapter, inside_environment
from mmm_verify.difference import worst
from mmm_verify.dropout import dropout_advice, dropout_findings
from mmm_verify.dtypes import dtype_name
from mmm_verify.evaluate import evaluate, loss
from mmm_verify.plain import make_batch
from mmm_verify.rank import RankObserved, run_rank
from mmm_verify.ranks.ranks import RanksFailed, blame, fork_one, fork_ranks
from mmm_verify.reference import LOOSE, TOLERANCE, Reference
from mmm_verify.repeat import compute_reference
from mmm_verify.seen import ROUNDINGS, Seen, look
from mmm_verify.subject import Subject, make_subject
from mmm_verify.torch_private import import_dynamo
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, Finding, Verdict

# Seconds that one device, and then the ranks, may take.
TIMEOUT = 120.0
# Seconds that a collective may take beyond the time-out: then this process says where it hangs, before gloo does.
COLLECTIVE_MARGIN = 60.0
# Functions that change a tensor's type and do nothing else.
CASTS = ("float", "to", "type", "type_as")
# What a step does with a loss, in whatever type the loss has.
LOSS_ARITHMETIC = ("add", "sub", "mul", "div", "sum", "mean")
# A path in the frames of a rank that is compiling.
COMPILER = "torch/_dynamo"

# What one device computes, and the batch.
OnOneDevice = tuple[Reference, Any]


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
    adapter: Adapter | None = None,
    dtype: str | torch.dtype = "float64",
    timeout: float = TIMEOUT,
) -> Verdict:
    """Check whether a parallel program computes what its model does on one device.

    Both take two steps in `dtype`, from the same weights and the same global batch, on CPU ranks of this host. The
    verdict depends on weights, batch, loss, every rank's gradients, and the weights after each step. What modules
    return only helps to say where the two first differ. Dropout is off; a further run with dropout checks that ranks
    with the same samples drop the same elements.

    Args:
        model_fn: () → the model on one device, on the CPU.
        parallelize_fn: (model, mesh) → what the ranks run: the model made parallel by PyTorch's means; None if it is
            changed in place; a tuple with the modules in it if a step needs more, such as a pipeline's schedule. An
            optimizer in the tuple takes the ranks' steps.
        batch_fn: () → the global batch: a tensor, or a tuple, list or dict of tensors, the samples along dim 0.
        step_fn: (model, batch) → the mean loss over the batch. A third parameter receives the mesh, None on one device.
            It may call ``backward``, but does not need to. Default: `mmm_verify.subject.plain_step`.
        mesh: axes and sizes, such as ``"dp2,tp2"``.
        batch_axes: the axes whose ranks have different samples. Default: those called dp, data, fsdp, replicate, …
        local_batch_fn: (batch, mesh) → a rank's batch. Default: equal parts of the samples over `batch_axes`.
        optimizer_fn: parameters → the optimizer. Default: SGD.
        adapter: tells where the program's framework keeps weights and gradients, if not where PyTorch does.
        dtype: float64, float32 or bf16. In float32 and bf16, how far each tensor may be off is measured first: it is a
            multiple of how far rounding moves it on one device.
        timeout: seconds that the steps on one device may take, and again those on the ranks.

    Returns:
        The verdict. Its truth value is True if the two are the same.

    Raises:
        UserError: the model, batch or step cannot be used on one device, or the mesh does not fit them.
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
        adapter=adapter,
        dtype=dtype,
    )
    return verify_subject(subject, timeout)


def verify_subject(subject: Subject, timeout: float = TIMEOUT, known: OnOneDevice | None = None) -> Verdict:
    """Verify a `Subject`, as `verify` does. This process starts others, and computes little itself.

    Args:
        known: what `on_one_process` has computed of the same model, batch, step and optimizer, on whatever mesh.
    """
    # Each forked rank would otherwise spend a second on this import.
    import_dynamo()
    reference, batch = known or on_one_process(subject, timeout)
    verdict = Verdict(
        NOT_COMPARABLE,
        subject.layout,
        subject.n_ranks,
        reason=reference.reason,
        notes=tuple(reference.notes),
        dtype=dtype_name(subject.dtype),
    )
    if reference.reason:
        return verdict
    try:
        observed = _on_ranks(subject, reference, timeout)
    except RanksFailed as error:
        return _failed(verdict, error)
    seen = look(subject, reference, observed, batch)
    verdict = evaluate(seen)
    rounding = seen.rounding
    small = bool(rounding.dtypes) and all(finding.error <= rounding.at_most for finding in verdict.findings)
    # A small difference may be rounding to fewer digits. Then the program runs once more, with its functions' types
    # counted, and the same observations are judged again.
    if verdict.result == NOT_SAME and small and _rounds(subject, reference, timeout):
        seen = replace(seen, rounds=True)
        verdict = evaluate(seen)
    compared = {"model": f"deterministic{reference.split}"}
    if reference.noise:
        compared["tolerance"] = tolerance_in_words(reference)
    verdict = replace(verdict, compared={**compared, **verdict.compared})
    if verdict.same and reference.has_dropout:
        verdict = _with_dropout(seen, verdict, timeout)
    return verdict


def tolerance_in_words(reference: Reference) -> str:
    """The measured tolerances in one line: the widest and the narrowest of the gradients, and that of the loss."""
    tolerance = reference.tolerance()
    tolerances = tolerance.gradients
    widest = worst(tolerances.values())
    name = next(name for name in tolerances if not tolerances[name] < widest)
    least = min(tolerances.values())
    return (
        f"measured: gradients {least:.0e} to {widest:.0e} ({name}), loss {tolerance.loss:.0e}; "
        f"{reference.margin} times what one rounding changes"
    )


def _on_ranks(
    subject: Subject, reference: Reference, timeout: float, dropout: bool = False, dtypes: bool = False
) -> list[RankObserved]:
    """Run the parallel program on forked ranks. Raises RanksFailed."""
    # The ranks' own limit is longer: this process notices a hang first, and says where each rank was.
    collective_timeout = timeout + COLLECTIVE_MARGIN
    return fork_ranks(
        run_rank, subject.n_ranks, subject, reference, dropout, collective_timeout, dtypes, timeout=timeout
    )


def on_one_process(subject: Subject, timeout: float) -> OnOneDevice:
    """Compute the reference and the batch in a process that ends afterwards.

    Raises:
        UserError: see `compute_reference`.
        ConfigError: the process died, or took too long.
    """
    reference, batch, modules = fork_one("the model on one device", _reference, subject, timeout=timeout)
    import_all(modules)
    return reference, batch


class ImportOrder(MetaPathFinder):
    """Notes PyTorch's modules in the order in which their imports begin. Python asks it first, and it finds none.

    In another order an import can fail: modules of a circle can be imported from one end only. `sys.modules` has them
    in the order in which their imports ended.
    """

    def __init__(self) -> None:
        self._began: list[str] = []
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """See `importlib.abc.MetaPathFinder`."""
        if name.startswith("torch."):
            self._began.append(name)

    def modules(self) -> list[str]:
        """Names of those that this process has imported since."""
        return [name for name in self._began if name in sys.modules]


def import_all(modules: Iterable[str]) -> None:
    """Import what another process has imported: a compiled model imports hundreds of modules, and each rank would."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def _reference(subject: Subject) -> tuple[Reference, Any, list[str]]:
    """Compute the reference.

    Returns:
        The reference; the batch; names of the modules of torch that were imported for them.
    """
    imports = ImportOrder()
    with inside_environment(subject.adapter, 0, None):
        reference = compute_reference(subject)
        batch = make_batch(subject)
    return reference, batch, imports.modules()


def _why_not_comparable(error: RanksFailed) -> str:
    """Say why a failure of the ranks is not the program's own fault. Empty if it is, or may be."""
    if any(COMPILER in frames for frames in error.frames.values()):
        return f"{error}: they were compiling; --timeout gives them more time"
    if FAULT in str(error):
        return str(error)
    # No program kills itself so. It is the kernel, where memory is short, or somebody.
    if error.code == -signal.SIGKILL:
        return f"{error}: is there too little memory for the ranks? A smaller model or batch needs less"
    # A DTensor's description has its dtype: that is not what an error complains about.
    message = str(error).lower().replace("dtype=torch.float64", "")
    if "dtype" in message and ("double" in message or "float64" in message):
        return (
            f"the parallel program fails: {error}. Everything is computed in float64, and something in the program is "
            "not in float64: --dtype float32 computes in float32"
        )
    return ""


def _failed(verdict: Verdict, error: RanksFailed) -> Verdict:
    """The verdict on a program that raised, died or hung on a rank."""
    reason = _why_not_comparable(error)
    if reason:
        return replace(verdict, reason=reason, details=error.details)
    why = str(error)
    # There are frames only if ranks gave no answer in time: then some may have waited for others.
    if error.frames:
        why += f": {blame(error.frames, verdict.ranks)}"
    finding = Finding("program", "the parallel program", None, f"fails: {why}")
    return replace(
        verdict, result=NOT_SAME, findings=(finding,), first=f"the program itself: {why}", details=error.details
    )


def _rounds(subject: Subject, reference: Reference, timeout: float) -> bool:
    """Whether the parallel program computes something in fewer digits than the model. Runs it once more."""
    try:
        observed = _on_ranks(subject, reference, timeout, dtypes=True)
    except RanksFailed:
        return False
    lower = ROUNDINGS[subject.dtype].dtypes
    return any(_rounds_more(rank.parallel.dtypes, reference.dtypes, subject.dtype, lower) for rank in observed)


def _rounds_more(
    counts: Counter[tuple[str, torch.dtype]],
    expected: Counter[tuple[str, torch.dtype]],
    full: torch.dtype,
    lower: Sequence[torch.dtype],
) -> bool:
    """Whether a rank casts to a lower type more often than one device, or calls in it what is in the full type there.

    Args:
        counts: (function, type of its result) → number of calls on the rank.
        expected: the same on one device.
        full: the type of the model.
        lower: types with fewer digits.
    """
    for function, dtype in counts:
        if dtype not in lower:
            continue
        n_expected = expected[function, dtype]
        if function in CASTS and counts[function, dtype] > n_expected:
            return True
        only_in_full = not n_expected and expected[function, full] > 0
        if only_in_full and function not in LOSS_ARITHMETIC:
            return True
    return False


def _with_dropout(seen: Seen, verdict: Verdict, timeout: float) -> Verdict:
    """Run the program once more with dropout, and add what that shows to a verdict that is "same" so far."""
    subject = seen.subject
    reference = seen.reference
    # A mask moves the loss by less than rounding to 16 bits may: the losses would not show it.
    if seen.tolerance.loss > LOOSE:
        note = f"what ranks drop is not compared in {verdict.dtype}, only in float64 and float32"
        return replace(verdict, notes=(*verdict.notes, note))
    tolerance = TOLERANCE if subject.exact else seen.tolerance.loss
    try:
        observed = _on_ranks(subject, reference, timeout, dropout=True)
    except RanksFailed as error:
        return _failed(verdict, error)
    with_dropout = [rank.parallel for rank in observed]
    findings = dropout_findings(subject, loss(seen, []).axes, with_dropout, tolerance)
    if findings:
        return replace(verdict, result=NOT_SAME, findings=tuple(findings), first=findings[0].name)
    compared = {**verdict.compared, "dropout": "ranks with the same samples drop the same elements"}
    without_dropout = [rank.parallel for rank in seen.ranks]
    advice = dropout_advice(subject, reference, without_dropout, with_dropout)
    return replace(verdict, compared=compared, advice=tuple(advice))
