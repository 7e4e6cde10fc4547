"""``verify_resume``: stops a script, starts it anew, and compares it with itself without a stop."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmm_verify.errors import ConfigError
from mmm_verify.program.resumed import ITSELF, compare_resumed
from mmm_verify.program.run import NotRun, record, script_of
from mmm_verify.program.script import Script
from mmm_verify.program.state import StateRecorder
from mmm_verify.run import TIMEOUT, import_all
from mmm_verify.torch_private import import_dynamo
from mmm_verify.verdict import NOT_COMPARABLE, Verdict

# Bytes: larger files of the working directory, such as data, are linked and not copied.
LARGEST_COPY = 1 << 24


def verify_resume(
    argv: Sequence[str],
    resume: Sequence[str],
    n_ranks: int = 1,
    *,
    steps: int = 4,
    timeout: float = TIMEOUT,
    verbose: bool = False,
) -> Verdict:
    """Check whether a script that is stopped and started anew trains on as without a stop.

    It runs in copies of the working directory, which are removed: once until it begins step ``steps + 1``, where it is
    killed; then anew, for so many steps; and in another copy, for twice as many without a stop.

    Args:
        argv: the script and its arguments: ``["train.py", "--lr", "0.1"]``, or ``["-m", "package.module"]``.
        resume: the same of the new start, such as ``["train.py", "--lr", "0.1", "--resume", "checkpoints/last.pt"]``.
        n_ranks: number of ranks of each run.
        steps: optimizer steps before the stop and after the new start, 2 or more.
        timeout: seconds that each run may take.
        verbose: whether to show what rank 0 prints.

    Returns:
        The verdict. Its truth value is True if both train alike.

    Raises:
        ConfigError: there is no such script, or a number is too small.
    """
    script = script_of(argv)
    again = script_of(resume, "--resume")
    if steps < 2 or n_ranks < 1:
        raise ConfigError(f"--stop-after {steps}, --ranks {n_ranks}: at least 2 steps and 1 rank are needed")
    # Each rank would otherwise spend a second on this import.
    import_dynamo()
    with tempfile.TemporaryDirectory(prefix=".mmm-verify-") as parent:

        def run(when: str, script: Script, wanted: int, folder: str, nudge: torch.dtype | None = None) -> Any:
            copy = Path(parent, folder)
            if not copy.exists():
                # Hidden files, such as those of .git, and the copies themselves are left out.
                hidden = shutil.ignore_patterns(".*")
                shutil.copytree(Path.cwd(), copy, symlinks=True, copy_function=copy_file, ignore=hidden)
            make_recorder = partial(StateRecorder, nudge=nudge, wanted=wanted)
            try:
                return record(script, n_ranks, timeout, verbose, make_recorder, copy)
            except NotRun as error:
                raise NotRun(f"{when}, {error}", error.details) from None

        try:
            first = run("before the stop", script, steps, "stopped")
            import_all(first[0].imported)
            new_start = f"after the new start from what {steps} steps have saved (--stop-after)"
            resumed = run(new_start, again, steps, "stopped")
            unbroken = run("without a stop", script, 2 * steps, "whole")
            verdict = compare_resumed(script.name, first, resumed, unbroken)
            # Something is off by little: how far does rounding move it?
            if any(math.isfinite(finding.error) for finding in verdict.findings):
                nudged = run("from moved weights", script, 2 * steps, "moved", unbroken[0].dtype)
                verdict = compare_resumed(script.name, first, resumed, unbroken, nudged)
        except NotRun as error:
            verdict = Verdict(NOT_COMPARABLE, script.name, n_ranks, reason=str(error), dtype="", against=ITSELF)
            return replace(verdict, details=error.details)
    return verdict


def copy_file(source: str, target: str) -> None:
    """Copy a file of the working directory; link it if it is large, as data are."""
    if os.path.getsize(source) > LARGEST_COPY:
        os.symlink(source, target)
    else:
        shutil.copy2(source, target)
