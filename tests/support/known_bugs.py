"""What a file of tests/mmm_verify/known_bugs has: a public bug as a right program and a wrong one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmm_verify import verify
from mmm_verify.verdict import Verdict

FOLDER = Path(__file__).parents[1] / "mmm_verify" / "known_bugs"
TITLE_CLIPPING = "the norm that the step clips by"


@dataclass(frozen=True)
class Program:
    """A parallel program, as `mmm_verify.verify` takes it.

    Attributes:
        parallelize: (model, mesh) → what the ranks run; None if the model is changed in place.
        step: (model, batch) or (model, batch, mesh) → the loss; None for verify's own step.
        local_batch: (batch, mesh) → a rank's batch; None for equal parts.
        optimizer: parameters → the optimizer; None for SGD.
        model: () → the model, if it is not the bug's.
    """

    parallelize: Callable[..., Any]
    step: Callable[..., Any] | None = None
    local_batch: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    model: Callable[..., Any] | None = None


@dataclass(frozen=True)
class KnownBug:
    """A kind of bug that was reported in public.

    Attributes:
        title: what goes wrong, in a few words.
        reports: public reports of the kind, such as ``huggingface/trl#7245``.
        model: () → the model on one device.
        batch: () → the global batch.
        mesh: the mesh of both programs.
        right: a program that is right.
        wrong: the same program with the bug.
        first: what the verdict has to name first: a tensor or a module.
        is_origin: whether `first` is where the mistake is; False if it only shows there.
        says: a regular expression for what the verdict says of it.
        rank: the rank that the first finding has to be on; None for any.
        result: the verdict on the wrong program.
    """

    title: str
    reports: tuple[str, ...]
    model: Callable[..., Any]
    batch: Callable[..., Any]
    mesh: str
    right: Program
    wrong: Program
    first: str
    says: str
    is_origin: bool = True
    rank: int | None = None
    result: str = "not the same"

    def verify(self, program: Program, **options: Any) -> Verdict:
        """The verdict on one of the two programs."""
        return verify(
            program.model or self.model,
            program.parallelize,
            self.batch,
            program.step,
            self.mesh,
            local_batch_fn=program.local_batch,
            optimizer_fn=program.optimizer,
            **options,
        )


def first_named(verdict: Verdict) -> str:
    """What a verdict names first, in its own words."""
    if verdict.reason:
        return verdict.reason
    # "every gradient" and the place of a wrong output say less than the clipping's norm, which explains both.
    if verdict.findings and verdict.findings[0].name == TITLE_CLIPPING:
        return TITLE_CLIPPING
    return verdict.first


def known_bugs() -> Mapping[str, KnownBug]:
    """All known bugs by name, in the order of their names."""
    bugs = {}
    for path in sorted(FOLDER.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"known_bugs.{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        bugs[path.stem] = module.BUG
    return bugs


def own_part(tensor: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """A rank's part of a tensor that is cut along a dim into as many equal parts as a one-axis mesh has ranks."""
    return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
