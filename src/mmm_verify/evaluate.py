"""Holds what the ranks saw against the model on one process, in the order in which a mistake comes about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import (
    NOTHING,
    finite_size_of,
    fits_float32,
    relative,
    same_elements,
    scale_of,
    size_of,
    worst,
)
from mmm_verify.locate import first_wrong_module, rows_of_batch
from mmm_verify.loss import Losses, LossReading
from mmm_verify.names import with_global_names
from mmm_verify.norm import explain_norm
from mmm_verify.observe import LocalTensor
from mmm_verify.rank import RankObserved
from mmm_verify.reference import TOLERANCE, Reference, innermost_first
from mmm_verify.relations import Place, place_of, reduced, relation, times
from mmm_verify.subject import Subject
from mmm_verify.torch_private import tree_leaves
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, ROUNDED, SAME, Finding, Verdict

TO_FLOAT32 = "is rounded to float32"
ROUNDED_AT_MOST = 1024 * torch.finfo(torch.float32).eps  # relative: what rounding to float32 may come to

NORM = "the norm that the step clips by"
LATER = 100  # how much more than the first step the second may be off: what the first rounds, it starts from


class Evaluation:
    """The comparison, stage by stage; it ends with the first that is not the same.

    Attributes:
        places: by rank and name, which part of a weight the rank has.
        names: by rank, the name on one device → the name in the parallel program.
        rounds: whether the parallel program is known to compute in float32 where the model does not.
        reason: why something cannot be compared. rounded: what is off by no more than rounding to float32.
    """

    def __init__(
        self,
        subject: Subject,
        reference: Reference,
        ranks: Sequence[RankObserved],
        batch: Any,
        rounds: bool = False,
    ) -> None:
        self.subject, self.reference, self.batch = subject, reference, batch
        self.notes = list(reference.notes)
        self.ranks, note = with_global_names(ranks, reference.observed.weights)
        self.notes += [note] if note else []
        # Of the step that is compared; a second one follows.
        self.expected = reference.observed
        self.seen = [rank.parallel for rank in self.ranks]
        self.rounds = rounds
        self.reason = ""
        self.rounded: list[Finding] = []
        self.compared: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.places: list[dict[str, Place]] = [{} for _ in ranks]
        self.names: list[dict[str, str]] = []
        self.first = ""
        if any(seen.autocast for seen in (self.expected, *self.seen)):
            self.notes.append(
                "autocast is on in the step, and does nothing to float64: what it rounds, and whether the ranks round "
                "the same, is not seen here"
            )
        self.loss_axes: tuple[str, ...] = ()  # whose ranks have different losses, rightly
        self._counted: dict[str, set[str]] = {}  # by relation, the names that have it

    def verdict(self) -> Verdict:
        """Compare."""
        reason = self._match_names()
        if reason:
            return self._verdict(NOT_COMPARABLE, reason)
        for stage in (self.weights, self.samples, self.loss, self.gradients, self.step, self.second_step):
            stage()
            if self.findings:
                return self._verdict(NOT_SAME)
            if self.reason:
                return self._verdict(NOT_COMPARABLE, self.reason)
        if self.rounded:
            self.findings = self.rounded
            return self._verdict(ROUNDED)
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
        return [getattr(seen, kind).get(pairs.get(name, "")) for seen, pairs in zip(self.seen, self.names, strict=True)]

    def _find(self, stage: str, name: str, rank: int | None, words: str, error: float = math.inf) -> None:
        """Add a finding, or count it with those of the same relation."""
        findings = self.findings
        if words == TO_FLOAT32:
            findings = self.rounded
            self.rounds = True  # and so is what is computed of it
        for index, finding in enumerate(findings):
            if finding.stage == stage and finding.relation == words:
                names = self._counted[words]
                names.add(name)
                findings[index] = replace(finding, count=len(names), error=worst([finding.error, error]))
                return
        self._counted[words] = {name}
        findings.append(Finding(stage, name, rank, words, error))

    def _is_rounded(self, value: Tensor, ought: Tensor, error: float) -> bool:
        """Whether a tensor is off by what rounding to float32 does, in a program that rounds where the model does
        not."""
        if not error <= ROUNDED_AT_MOST or not ought.is_floating_point():
            return False
        return self.rounds or (fits_float32(value) and not fits_float32(ought))

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
                    self._find_no_part(name, rank, tensor, full.local)
                    continue
                self.places[rank][name] = place
                self._compare_weight(name, rank, tensors, full.local)
            self._padding(name, full.local)
        self._ties()
        if not self.findings and not self.rounded and not self.reason:
            self.compared["weights"] = f"same: {count} tensors, on {len(self.ranks)} ranks, to the last bit"

    def _compare_weight(self, name: str, rank: int, tensors: list[LocalTensor | None], full: Tensor) -> None:
        tensor, place = tensors[rank], self.places[rank][name]
        assert tensor is not None
        ought, own = place.of(full), place.unpadded(tensor.local)
        if own.shape == ought.shape and same_elements(own.to(ought.dtype), ought):
            return
        scale = size_of(full)
        off = relative(own, ought, scale) if own.shape == ought.shape else math.inf
        words = self._relation("weights", name, rank, tensors, ought, full, scale)
        self._find("weights", name, rank, words, off)

    def _find_no_part(self, name: str, rank: int, tensor: LocalTensor, full: Tensor) -> None:
        """A tensor of another shape: a fault, unless it has the model's own elements in another arrangement."""
        words = f"{tuple(tensor.local.shape)} is no part of the weight of {tuple(full.shape)}"
        weights = self.reference.observed.weights.values()
        known = torch.cat([weight.local.flatten() for weight in weights if weight.local.dtype == full.dtype])
        padded = any(any(places[name].padding) for places in self.places if name in places)
        if padded or torch.isin(tensor.local.to(full.dtype), known).all():
            self.reason = f"{name} on rank {rank}: {words}: padding, or the model's elements in another arrangement"
        else:
            self._find("weights", name, rank, f"{words}: other elements, or shape")

    def _padding(self, name: str, full: Tensor) -> None:
        """Of a tensor that is padded on some rank, the ranks of an axis have every element. A note says which it is."""
        padded = False
        for rank, places in enumerate(self.places):
            if name not in places or not any(places[name].padding):
                continue
            padded = True
            groups = [self.subject.group(rank, axis) for axis in self.subject.axes]
            lacking = min(self._lacking(group, name, full) for group in groups)
            if lacking:
                self._find("weights", name, rank, f"{lacking} of its elements are not on the ranks that share it")
                return
        if padded:
            self.notes.append(f"{name} of {tuple(full.shape)} is padded on the ranks: padding is not compared")

    def _lacking(self, ranks: Sequence[int], name: str, full: Tensor) -> int:
        """How many elements of a weight none of some ranks has."""
        numbers = torch.arange(full.numel()).view(full.shape)
        places = [self.places[rank][name] for rank in ranks if name in self.places[rank]]
        seen = torch.cat([place.of(numbers).flatten() for place in places])
        return full.numel() - len(seen.unique())

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
            return self._own(name, other, tensors), self._ought(name, other, tensors, full)

        value = self._own(name, rank, tensors)
        if value is None or value.shape != ought.shape:
            return relation(value, ought, scale, rank, others, None, self.subject)
        off = relative(value, ought, scale)
        if self._is_rounded(value, ought, off):
            return TO_FLOAT32
        alone = self.ranks[rank].alone if self.expected is self.reference.observed else None
        own = getattr(alone, kind).get(name) if alone is not None else None
        by_itself = self._ought(name, rank, tensors, own.local) if own is not None else None
        return relation(value, ought, scale, rank, others, by_itself, self.subject)

    def _own(self, name: str, rank: int, tensors: list[LocalTensor | None]) -> Tensor | None:
        """What a rank has, of a DTensor that is a sum still to be made the sum, without padding."""
        value = reduced(tensors, rank)
        place = self._place(name, rank, tensors, self.reference.observed.weights[name].local)
        if value is None or place is None or value.ndim != len(place.padding):
            return value
        return place.unpadded(value)

    def _ought(self, name: str, rank: int, tensors: list[LocalTensor | None], full: Tensor) -> Tensor | None:
        """What a rank's tensor ought to be."""
        place = self._place(name, rank, tensors, full)
        return None if place is None else place.of(full)

    def _place(self, name: str, rank: int, tensors: list[LocalTensor | None], full: Tensor) -> Place | None:
        """The part that the DTensor itself says, as a gradient may be sharded in another way than its parameter; else
        the part of the weight that is local."""
        tensor = tensors[rank]
        place = self.places[rank].get(name)
        if place is not None and tensor is not None and tensor.part is not None:
            return place_of(tensor, full)
        return place

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
        self.loss_axes = reading.axes
        if reading.wrong == TO_FLOAT32:
            self._find("loss", "the loss", None, reading.wrong, reading.error)
        elif reading.wrong:
            self.first = self._located()
            self._find("loss", "the loss", None, reading.wrong, reading.error)
        else:
            how = f", {reading.reading}" if reading.reading else ""
            self.compared["loss"] = f"same: {whole.local.item():.9g}{how}, to {reading.error:.0e}"

    def _read_loss(self, losses: list[LocalTensor | None], expected: Tensor) -> LossReading:
        tolerance = max(TOLERANCE, 32 * self.reference.loss_floor)
        reading = Losses(self.subject, self.reference, self.ranks, self.batch).read(losses, expected, tolerance)
        values = [loss.local.flatten().double() for loss in losses if loss is not None]
        if reading.wrong and values and self._is_rounded(torch.cat(values), expected.double(), reading.error):
            return replace(reading, wrong=TO_FLOAT32)
        return reading

    def _located(self) -> str:
        """The first module that returned something else, in words."""
        return first_wrong_module(self.subject, self.reference, self.ranks, self.batch)

    def gradients(self) -> None:
        """Of each rank, every gradient: the part of the full one that belongs to its part of the parameter."""
        errors = self._compare_gradients("gradients")
        expected = self.expected.gradients
        wrong = self._wrong_gradients()
        if wrong:
            least = NOTHING * self.reference.largest_gradient
            nonzero = {name for name, gradient in expected.items() if gradient and size_of(gradient.local) > least}
            everything = nonzero <= set(wrong)
            self.first = "every gradient" if everything else f"the gradient of {wrong[0]}, the first on the way back"
            self.first = self._located() or self.first
            self._as_norms(nonzero)
        elif not self.findings and not self.reason and not self.rounded:
            count = sum(gradient is not None for gradient in expected.values())
            clipped = ", before and after they are clipped" if self.expected.norms else ""
            self.compared["gradients"] = f"same: {count}{clipped}, to {worst(errors):.0e}"

    def _names_backward(self) -> list[str]:
        """Parameters from the loss back, as backward goes: the first that is wrong is where it begins."""
        called = innermost_first(self.reference.observed)
        place_in_forward = {name: index for index, name in enumerate(called)}
        return sorted(self.expected.gradients, key=lambda name: -place_in_forward.get(name.rpartition(".")[0], -1))

    def _wrong_gradients(self) -> list[str]:
        """Those that findings are of."""
        counted = [self._counted[finding.relation] for finding in self.findings]
        return [name for name in self._names_backward() if any(name in names for names in counted)]

    def _compare_gradients(self, stage: str) -> list[float]:
        """Compare gradients, before the step clips them and after. Returns the errors."""
        errors = [0.0]
        expected = self.expected.gradients
        clips = all(seen.norms for seen in (self.expected, *self.seen))  # a step may also clip by other means
        names = self._names_backward()
        for name in names:
            tensors = self._tensors("gradients", name)
            full = expected[name]
            if clips:
                pairs = zip(self.seen, self.names, strict=True)
                tensors = [seen.before_clipping(known.get(name, "")) for seen, known in pairs]
                full = self.expected.before_clipping(name)
            for rank in range(len(self.ranks)):
                errors.append(self._gradient(stage, name, rank, tensors, full))
        if self.findings or not clips:
            return errors
        self._compare_norms(stage)
        if not self.findings:
            for name in names:
                tensors = self._tensors("gradients", name)
                for rank in range(len(self.ranks)):
                    self._gradient(stage, name, rank, tensors, expected[name])
        return errors

    def _compare_norms(self, stage: str) -> None:
        """Of each rank, the norm by which it clips."""
        tolerance = worst([self._tolerance(name) for name in self.expected.gradients])
        for index, norm in enumerate(self.expected.norms):
            norms = [seen.norms[index] if index < len(seen.norms) else None for seen in self.seen]
            for rank in range(len(self.ranks)):
                value = reduced(norms, rank)
                if value is None or value.numel() != 1:
                    continue
                error = relative(value, norm.local, size_of(norm.local))
                if not error <= tolerance:
                    rounded = self._is_rounded(value, norm.local, error)
                    words = TO_FLOAT32 if rounded else self._of_norm(value.item() / norm.local.item(), rank)
                    self._find(stage, NORM, rank, words, error)

    def _of_norm(self, factor: float, rank: int) -> str:
        """How a norm is wrong, in words."""
        gradients = {}
        for name in self.expected.gradients:
            gradient = self.expected.before_clipping(name)
            if gradient is not None:
                gradients[name] = gradient.local
        factor_in_words = f"{times(factor, self.subject)} what it should be"
        why = explain_norm(factor, gradients, self.places[rank], rank, self.subject)
        if not why:
            return factor_in_words
        return f"{factor_in_words}: {why}"

    def _as_norms(self, names: Collection[str]) -> None:
        """Where every gradient of a rank is one factor off, and a wrong norm explains it, that is what is found."""
        for index, finding in enumerate(self.findings):
            if finding.rank is None or finding.count < len(names) or "times what it" not in finding.relation:
                continue
            gradient = self.expected.gradients[finding.name]
            value = self._own(finding.name, finding.rank, self._tensors("gradients", finding.name))
            if gradient is None or value is None:
                continue
            ought = self.places[finding.rank][finding.name].of(gradient.local)
            words = self._of_norm((ought.norm() / value.norm()).item(), finding.rank)
            if ": " in words:
                self.findings[index] = replace(finding, name=NORM, relation=words, count=1)

    def _tolerance(self, name: str) -> float:
        """Of a gradient, or of a weight after the step."""
        later = self.expected is not self.reference.observed
        return self.reference.tolerance(name) * (LATER if later else 1)

    def _gradient(
        self, stage: str, name: str, rank: int, tensors: list[LocalTensor | None], full: LocalTensor | None
    ) -> float:
        """How far a rank's gradient is off; adds a finding if it is too far."""
        if full is None:
            value = reduced(tensors, rank)
            if value is None or size_of(value) == 0:
                return 0.0
            self._find(stage, name, rank, "has a gradient, and none on one device", math.inf)
            return math.inf
        scale = scale_of(full.local, self.reference.largest_gradient)
        value = self._own(name, rank, tensors)
        ought = self._ought(name, rank, tensors, full.local)
        if ought is None:
            return 0.0  # no part of the parameter is on this rank
        if value is None and (size_of(ought) == 0 or not ought.numel()):
            return 0.0
        if value is None and self._is_elsewhere(name, rank):
            return 0.0
        error = relative(value, ought, scale) if value is not None and value.shape == ought.shape else math.inf
        if not error <= self._tolerance(name):
            words = self._relation("gradients", name, rank, tensors, ought, full.local, scale)
            self._find(stage, name, rank, words, error)
        return error

    def _is_elsewhere(self, name: str, rank: int) -> bool:
        """Whether a gradient that a parameter has not is somewhere else, or has been used up: it cannot be compared."""
        parallel = self.ranks[rank].parallel
        if name in parallel.main_gradients:
            why = f"the gradient of {name} is in its main_grad, and not in its grad, where the optimizer would take it"
        elif name in parallel.stepped - self.reference.observed.stepped:
            why = f"{name} changes in backward, and its gradient is then gone: an optimizer steps inside of it"
        else:
            return False
        self.reason = self.reason or why
        return True

    def step(self) -> None:
        """Parameters and buffers after the optimizer's step, and the loss of the batch with them."""
        for rank in self.ranks:
            stepped = sorted(rank.parallel.stepped - self.reference.observed.stepped)
            if stepped:
                self.reason = f"{stepped[0]} changes before the optimizer's step: one steps inside of backward"
                return
        errors = self._compare_after("step")
        second = self.expected.second
        if not self.findings and second is not None and second.loss is not None:
            seconds = [seen.second.loss if seen.second is not None else None for seen in self.seen]
            reading = self._read_loss(seconds, second.loss.local)
            if reading.wrong:
                self._find("step", "the loss after it", None, reading.wrong, reading.error)
        if not self.findings and not self.rounded:
            self.compared["step"] = f"same: weights, buffers and loss after it, to {worst(errors):.0e}"

    def _compare_after(self, stage: str) -> list[float]:
        """Compare parameters and buffers after a step. Returns the errors."""
        errors = [0.0]
        for name, full in self.expected.after.items():
            tensors = self._tensors("after", name)
            rounding = self._moved_by_rounding(name)
            for rank, tensor in enumerate(tensors):
                place = self.places[rank].get(name)
                if tensor is None or place is None:
                    continue
                ought, own = place.of(full.local), place.unpadded(tensor.local)
                scale = finite_size_of(full.local)
                if own.shape == ought.shape and rounding is not None:
                    ought = ought.masked_fill(place.of(rounding), 0)
                    own = own.masked_fill(place.of(rounding), 0)
                error = relative(own, ought, scale) if own.shape == ought.shape else math.inf
                errors.append(error)
                if not error <= self._tolerance(name):
                    words = self._relation("after", name, rank, tensors, ought, full.local, scale)
                    self._find(stage, name, rank, words, error)
        return errors

    def _moved_by_rounding(self, name: str) -> Tensor | None:
        """Where a gradient is 0 but for rounding: AdamW makes a whole step of it, to either side."""
        rounding = None
        for observed in (self.reference.observed, self.expected):
            gradient = observed.gradients.get(name)
            if gradient is None:
                continue
            sizes = gradient.local.abs()
            near_zero = sizes <= self._tolerance(name) * scale_of(gradient.local, self.reference.largest_gradient)
            # Elements of exactly 0, as of the rows of an embedding that no sample has, are not moved by it.
            if not near_zero.all() or not sizes.any():
                near_zero &= sizes > 0
            rounding = near_zero if rounding is None else rounding | near_zero
        return rounding

    def second_step(self) -> None:
        """Gradients, parameters and buffers of a second step, from the weights that the first has made."""
        if self.expected.second is None:
            return
        self.expected = self.expected.second
        self.seen = [seen.second for seen in self.seen if seen.second is not None]
        errors = self._compare_gradients("step 2")
        wrong = self._wrong_gradients()
        if wrong:
            self.first = f"the second step: the gradient of {wrong[0]}"
        if not self.findings:
            errors += self._compare_after("step 2")
        if self.findings and not wrong:
            self.first = f"the second step: {self.findings[0].name}"
        elif not self.findings and not self.rounded:
            self.compared["step 2"] = f"same: gradients, weights and buffers, to {worst(errors):.0e}"
