"""Holds what the ranks saw against the model on one process, in the order in which a mistake comes about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import finite_size_of, relative, same_elements, size_of, worst
from mmm_verify.locate import first_wrong_module, rows_of_batch
from mmm_verify.loss import Losses, LossReading
from mmm_verify.observe import LocalTensor, Observed
from mmm_verify.rank import RankObserved
from mmm_verify.reference import ROUNDING, TOLERANCE, Reference, innermost_first, scale_of
from mmm_verify.relations import Place, place_of, reduced, relation
from mmm_verify.subject import Subject
from mmm_verify.torch_private import tree_leaves
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, SAME, Finding, Verdict


class Evaluation:
    """The comparison, stage by stage; it ends with the first that is not the same.

    Attributes:
        places: by rank and name, which part of a weight the rank has.
        names: by rank, the name on one device → the name in the parallel program.
    """

    def __init__(self, subject: Subject, reference: Reference, ranks: Sequence[RankObserved], batch: Any) -> None:
        self.subject, self.reference, self.ranks, self.batch = subject, reference, ranks, batch
        self.compared: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.places: list[dict[str, Place]] = [{} for _ in ranks]
        self.names: list[dict[str, str]] = []
        self.first = ""
        self.notes = list(reference.notes)
        self.loss_axes: tuple[str, ...] = ()  # whose ranks have different losses, rightly
        self._counted: dict[str, set[str]] = {}  # by relation, the names that have it

    def verdict(self) -> Verdict:
        """Compare."""
        reason = self._match_names()
        if reason:
            return self._verdict(NOT_COMPARABLE, reason)
        for stage in (self.weights, self.samples, self.loss, self.gradients, self.step):
            stage()
            if self.findings:
                return self._verdict(NOT_SAME)
        return self._verdict(SAME)

    def _verdict(self, result: str, reason: str = "") -> Verdict:
        return Verdict(
            result,
            self.subject.layout,
            len(self.ranks),
            self.compared,
            tuple(self.findings),
            first=self.first or (self.findings[0].name if self.findings else ""),
            reason=reason,
            notes=tuple(self.notes),
        )

    def _match_names(self) -> str:
        """Which name of the parallel program is which on one device. Returns why that cannot be said."""
        known = self.reference.observed.weights
        for number, rank in enumerate(self.ranks):
            pairs: dict[str, str] = {}
            for name in rank.parallel.weights:
                if "flat_param" in name:
                    return f"{name} is a flat parameter of the older FSDP: fully_shard keeps parameters apart"
                same = (
                    name
                    if name in known
                    else next((one for one in sorted(known, key=len, reverse=True) if name.endswith(f".{one}")), None)
                )
                if same is None and name in rank.parallel.parameters:
                    return f"{name} of the parallel program (rank {number}) is not in the model on one device"
                if same is not None:
                    pairs[same] = name
            self.names.append(pairs)
        return ""

    def _tensors(self, kind: str, name: str) -> list[LocalTensor | None]:
        """By rank, the weight or gradient of a name."""
        return [
            getattr(rank.parallel, kind).get(pairs.get(name, ""))
            for rank, pairs in zip(self.ranks, self.names, strict=True)
        ]

    def _find(self, stage: str, name: str, rank: int | None, words: str, error: float = math.inf) -> None:
        """Add a finding, or count it with those of the same relation."""
        for index, finding in enumerate(self.findings):
            if finding.stage == stage and finding.relation == words:
                names = self._counted[words]
                names.add(name)
                self.findings[index] = replace(finding, count=len(names))
                return
        self._counted[words] = {name}
        self.findings.append(Finding(stage, name, rank, words, error))

    def weights(self) -> None:
        """Parameters and buffers as they are after the model was parallelized: equal, to the last bit."""
        expected, count = self.reference.observed.weights, 0
        for name, full in expected.items():
            tensors = self._tensors("weights", name)
            count += any(tensors)
            if not any(tensors):
                if name in self.reference.observed.parameters:
                    self._find("weights", name, None, "is on no rank of the parallel program")
                else:
                    self.notes.append(f"the buffer {name} is on no rank of the parallel program: it is not compared")
            for rank, tensor in enumerate(tensors):
                if tensor is None:
                    continue
                place = place_of(tensor, full.local)
                if place is None:
                    self._find("weights", name, rank, self._no_part(name, rank, tensor, full.local))
                    continue
                self.places[rank][name] = place
                ought = place.of(full.local)
                if tensor.local.shape != ought.shape or not same_elements(tensor.local.to(ought.dtype), ought):
                    scale = size_of(full.local)
                    words = self._relation("weights", name, rank, tensors, ought, full.local, scale)
                    off = relative(tensor.local, ought, scale) if tensor.local.shape == ought.shape else math.inf
                    self._find("weights", name, rank, words, off)
        self._ties()
        if not self.findings:
            self.compared["weights"] = f"same: {count} tensors, on {len(self.ranks)} ranks, to the last bit"

    def _no_part(self, name: str, rank: int, tensor: LocalTensor, full: Tensor) -> str:
        return f"{tuple(tensor.local.shape)} is no part of the weight of {tuple(full.shape)}: other elements, or shape"

    def _ties(self) -> None:
        """A weight that several modules share is one parameter on each rank that has two of them."""
        for group in self.reference.observed.ties:
            for rank, pairs in enumerate(self.names):
                local = {pairs[name] for name in group if name in pairs}
                tied = self.ranks[rank].parallel.ties
                if len(local) > 1 and not any(local <= set(other) for other in tied):
                    self._find("weights", group[0], rank, f"is no longer one parameter with {', '.join(group[1:])}")

    def _relation(
        self,
        kind: str,
        name: str,
        rank: int,
        tensors: list[LocalTensor | None],
        ought: Tensor,
        full: Tensor,
        scale: float,
    ) -> str:
        def others(other: int) -> tuple[Tensor | None, Tensor | None]:
            return reduced(tensors, other), self._ought(name, other, tensors, full)

        alone = self.ranks[rank].alone
        own = getattr(alone, kind).get(name) if alone is not None else None
        by_itself = self._ought(name, rank, tensors, own.local) if own is not None else None
        value = reduced(tensors, rank)
        return relation(value, ought, scale, rank, others, by_itself, self.subject)

    def _ought(self, name: str, rank: int, tensors: list[LocalTensor | None], full: Tensor) -> Tensor | None:
        """What a rank's tensor ought to be: the part that the DTensor itself says, as a gradient may be sharded in
        another way than its parameter; else the part of the weight that is local."""
        tensor = tensors[rank]
        place = self.places[rank].get(name)
        if place is not None and tensor is not None and tensor.box is not None:
            place = place_of(tensor, full)
        return None if place is None else place.of(full)

    def samples(self) -> None:
        """Each sample is with one of the ranks that split the batch, and the ranks of one part have the same."""
        if self.subject.local_batch_fn is None:
            self.compared["batch"] = f"{self.reference.samples} samples in {self.subject.parts} equal parts"
            return
        tensors = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        dealt: dict[int, list[int]] = {}
        for rank, observed in enumerate(self.ranks):
            rows = rows_of_batch(observed.batch, tensors)
            if rows is None:
                self.compared["batch"] = "not compared: a rank's tensors are no samples of the batch, but parts of them"
                return
            before = dealt.setdefault(self.subject.batch_part(rank), rows)
            if before != rows:
                self._find("batch", "the batch", rank, "has other samples than the ranks of the same part")
        counts = Counter(row for rows in dealt.values() for row in rows)
        expected = Counter(rows_of_batch(tensors, tensors))
        lacking, twice = expected - counts, counts - expected
        if lacking:
            more = lacking.total() - 1
            self._find("batch", "the batch", None, f"sample {min(lacking)} and {more} more are on no rank")
        elif twice:
            self._find("batch", "the batch", None, "samples are with several ranks that split the batch")
        else:
            self.compared["batch"] = f"same: {counts.total()} samples, each in one of {len(dealt)} parts"

    def loss(self) -> None:
        whole = self.reference.observed.loss
        assert whole is not None
        reading = self._read_loss([rank.parallel.loss for rank in self.ranks], whole.local)
        if reading.wrong:
            self.first = self._located()
            self._find("loss", "the loss", None, reading.wrong, reading.error)
        else:
            self.loss_axes = reading.axes
            how = f", {reading.reading}" if reading.reading else ""
            self.compared["loss"] = f"same: {whole.local.item():.9g}{how}, to {reading.error:.0e}"

    def _read_loss(self, losses: list[LocalTensor | None], expected: Tensor) -> LossReading:
        tolerance = max(TOLERANCE, 32 * self.reference.loss_floor)
        return Losses(self.subject, self.reference, self.ranks, self.batch).read(losses, expected, tolerance)

    def _located(self) -> str:
        """The first module that returned something else, in words."""
        return first_wrong_module(self.subject, self.reference, self.ranks, self.batch)

    def gradients(self) -> None:
        """Of each rank, every gradient: the part of the full one that belongs to its part of the parameter."""
        largest = self.reference.largest_gradient
        errors, wrong = [0.0], []
        expected = self.reference.observed.gradients
        called = innermost_first(self.reference.observed)
        place_in_forward = {name: index for index, name in enumerate(called)}
        # From the loss back, as backward goes: the first that is wrong is where it begins.
        for name in sorted(expected, key=lambda name: -place_in_forward.get(name.rpartition(".")[0], -1)):
            tensors = self._tensors("gradients", name)
            for rank in range(len(self.ranks)):
                error = self._gradient(name, rank, tensors, expected[name], largest)
                errors.append(error)
                if not error <= self.reference.tolerance(name) and name not in wrong:
                    wrong.append(name)
        if wrong:
            least = ROUNDING * torch.finfo(torch.float64).eps * largest
            nonzero = {name for name, gradient in expected.items() if gradient and size_of(gradient.local) > least}
            everything = nonzero <= set(wrong)
            self.first = "every gradient" if everything else f"the gradient of {wrong[0]}, the first on the way back"
            self.first = self._located() or self.first
        else:
            count = sum(gradient is not None for gradient in expected.values())
            self.compared["gradients"] = f"same: {count}, to {worst(errors):.0e}"

    def _gradient(
        self, name: str, rank: int, tensors: list[LocalTensor | None], full: LocalTensor | None, largest: float
    ) -> float:
        """How far a rank's gradient is off; adds a finding if it is too far."""
        value = reduced(tensors, rank)
        if full is None:
            if value is None or size_of(value) == 0:
                return 0.0
            self._find("gradients", name, rank, "has a gradient, and none on one device", math.inf)
            return math.inf
        scale = scale_of(full.local, largest)
        ought = self._ought(name, rank, tensors, full.local)
        if ought is None:
            return 0.0  # no part of the parameter is on this rank
        if value is None and (size_of(ought) == 0 or not ought.numel()):
            return 0.0
        error = relative(value, ought, scale) if value is not None and value.shape == ought.shape else math.inf
        if not error <= self.reference.tolerance(name):
            words = self._relation("gradients", name, rank, tensors, ought, full.local, scale)
            self._find("gradients", name, rank, words, error)
        return error

    def step(self) -> None:
        """Parameters and buffers after the optimizer's step, and the loss of the batch with them."""
        errors = [0.0]
        for name, full in self.reference.observed.after.items():
            tensors = self._tensors("after", name)
            for rank, tensor in enumerate(tensors):
                place = self.places[rank].get(name)
                if tensor is None or place is None:
                    continue
                ought = place.of(full.local)
                scale = finite_size_of(full.local)
                same_shape = tensor.local.shape == ought.shape
                error = relative(tensor.local, ought, scale) if same_shape else math.inf
                errors.append(error)
                if not error <= self.reference.tolerance(name):
                    words = self._relation("after", name, rank, tensors, ought, full.local, scale)
                    self._find("step", name, rank, words, error)
        whole = self.reference.observed.loss_after
        if not self.findings and whole is not None:
            reading = self._read_loss([rank.parallel.loss_after for rank in self.ranks], whole.local)
            if reading.wrong:
                self._find("step", "the loss after it", None, reading.wrong, reading.error)
        if not self.findings:
            self.compared["step"] = f"same: weights, buffers and loss after it, to {worst(errors):.0e}"


def dropout_findings(
    subject: Subject, loss_axes: Sequence[str], ranks: Sequence[Observed]
) -> tuple[list[Finding], list[str]]:
    """With dropout on: whether ranks that hold the same samples agree on what is dropped, and advice.

    Args:
        loss_axes: those whose ranks have different losses without dropout too.
    """
    findings: list[Finding] = []
    for rank in range(len(ranks)):
        for axis in set(subject.axes) - set(subject.batch_axes) - set(loss_axes):
            first = subject.group(rank, axis)[0]
            one, other = ranks[first].loss, ranks[rank].loss
            if one is None or other is None or one.partial or other.partial:
                continue
            off = relative(other.local, one.local, size_of(one.local))
            if not off <= TOLERANCE and not findings:
                words = f"ranks of {axis} drop different elements of the same activations: rank {first}'s loss differs"
                findings.append(Finding("dropout", "dropout", rank, words, off))
    advice: list[str] = []
    for name in ranks[0].drops if ranks else ():
        for rank in range(1, len(ranks)):
            mask, theirs = ranks[0].drops[name], ranks[rank].drops.get(name)
            apart = subject.batch_part(rank) != subject.batch_part(0)
            if (
                apart
                and theirs is not None
                and mask.any()
                and mask.shape == theirs.shape
                and bool((mask == theirs).all())
            ):
                advice.append(
                    f"{name} drops the same places on ranks 0 and {rank}, which have different samples: seed them apart"
                )
                return findings, advice
    return findings, advice
