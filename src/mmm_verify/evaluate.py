"""Compares what the ranks saw with the model on one process, in the order in which a mistake would show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of, finite_size_of, fits, relative, same_elements, size_of, worst
from mmm_verify.dtypes import dtype_name, widest
from mmm_verify.locate import first_wrong_module, rows_of_batch
from mmm_verify.loss import Losses, LossReading
from mmm_verify.names import with_global_names
from mmm_verify.norm import NEAR, explain_norm
from mmm_verify.observe import LocalTensor
from mmm_verify.rank import RankObserved
from mmm_verify.reference import ALIKE, Reference, innermost_first
from mmm_verify.relations import NEVER, Pair, Place, describe_relation, place_of, place_of_shard, reduced, times
from mmm_verify.subject import Subject, plain_sgd
from mmm_verify.torch_private import tensors_in
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, ROUNDED, SAME, Finding, Verdict

TO_FLOAT32 = "is rounded to float32"
TO_16_BITS = "is rounded to 16 bits"
FINER = "has all digits of float64, where one device has it rounded to float32"
NORM = "the norm that the step clips by"
NOT_UPDATED = "is not updated: it is what it was before the step"
LEFT_BY_STEP = "same: {}, as the optimizer's step leaves them"
BY_WEIGHTS = "{}, of which each rank has its own: the weights that the optimizer's step leaves decide"
MADE_ONE = (
    "is one weight on all ranks, which step by gradients of their own, but not that of one device: the step divides by "
    "another number, or averages what an optimizer other than SGD has made of each rank's own gradient"
)
# A step has to move a weight by so many tolerances for the weight to show which gradient it used.
RESOLVED = 4

# A weight, or its gradient, by rank; None on a rank that has none of it.
ByRank = list[LocalTensor | None]


@dataclass(frozen=True)
class Rounding:
    """How a program may round more than its model does.

    Attributes:
        dtypes: the types that it may round to.
        at_most: relative: more than such rounding may come to.
        relation: what a tensor is then, in words.
    """

    dtypes: tuple[torch.dtype, ...]
    at_most: float
    relation: str


# The keys are types of the model. A gradient of half the right size is off by 0.5, and never passes for rounding.
ROUNDINGS = {
    torch.float64: Rounding((torch.float32,), 1024 * torch.finfo(torch.float32).eps, TO_FLOAT32),
    torch.float32: Rounding((torch.bfloat16, torch.float16), 0.4, TO_16_BITS),
    torch.bfloat16: Rounding((), 0.0, ""),
}


def _error(own: Tensor, expected: Tensor, scale: float) -> float:
    """How far a tensor is off, relative to `scale`; infinite if it has another shape."""
    if own.shape != expected.shape:
        return math.inf
    return relative(own, expected, scale)


class Evaluation:
    """The comparison, stage by stage. It ends with the first stage that is not the same.

    Attributes:
        subject: the program.
        reference: the model on one device.
        batch: the global batch.
        ranks: what each rank saw, by the names on one device.
        expected: what one device saw of the step that is compared: the first, then the second.
        step_index: 0 while the first step is compared, 1 for the second.
        seen: by rank, what it saw of the same step.
        places: by rank, name of a weight → which part of it the rank has.
        names: by rank, name on one device → name in the parallel program.
        aliases: by rank, those of `names` that only stand for another name of a tied weight. They serve to explain.
        rounds: whether the parallel program is known to compute in fewer digits than the model.
        reason: why something cannot be compared; empty so far.
        findings: what is not the same.
        rounded: what is off by no more than such rounding.
        compared: stage → what was compared, in words.
        errors: stage → how far the worst tensor is off.
        first: where the two first differ, in words.
        judged: how the gradients were judged, in words, with a place for their number.
        made_one: weights that the ranks average after steps by gradients of their own.
        loss_axes: the axes whose ranks rightly have different losses.
        notes: what else a reader of the verdict has to know.
    """

    def __init__(
        self,
        subject: Subject,
        reference: Reference,
        ranks: Sequence[RankObserved],
        batch: Any,
        rounds: bool = False,
    ) -> None:
        self.subject = subject
        self.reference = reference
        self.batch = batch
        self.notes = list(reference.notes)
        self.ranks, note = with_global_names(ranks, reference.observed.weights)
        if note:
            self.notes.append(note)
        self.expected = reference.observed
        self.step_index = 0
        self.rounding = ROUNDINGS[subject.dtype]
        self.seen = [rank.parallel for rank in self.ranks]
        self.rounds = rounds
        self.reason = ""
        self.rounded: list[Finding] = []
        self.compared: dict[str, str] = {}
        self.errors: dict[str, float] = {}
        self.findings: list[Finding] = []
        self.places: list[dict[str, Place]] = [{} for _ in ranks]
        self.names: list[dict[str, str]] = []
        self.aliases: list[set[str]] = []
        self.first = ""
        self.judged = "same: {}"
        self.made_one: set[str] = set()
        if subject.exact and any(observed.autocast for observed in (self.expected, *self.seen)):
            self.notes.append(
                "autocast is on in the step, and does nothing to float64: what it rounds, and whether the ranks round "
                "the same, is not seen here"
            )
        self.loss_axes: tuple[str, ...] = ()
        # Relation of findings → the names that have it.
        self._names_of_relation: dict[str, set[str]] = {}

    def verdict(self) -> Verdict:
        """Compare all stages."""
        reason = self._match_names()
        if reason:
            return self._verdict(NOT_COMPARABLE, reason)
        # Each stage builds on the ones before: a wrong weight makes the loss wrong, and so on.
        stages = (
            self.weights,
            self.samples,
            self.loss,
            self.gradients,
            self.step,
            self.second_step,
        )
        for stage in stages:
            stage()
            if self.findings:
                return self._verdict(NOT_SAME)
            if self.reason:
                return self._verdict(NOT_COMPARABLE, self.reason)
        if self.rounded:
            self.findings = self.rounded
            if self.subject.exact:
                return self._verdict(ROUNDED)
            return self._verdict(NOT_COMPARABLE, self._why_rounded())
        return self._verdict(SAME)

    def _why_rounded(self) -> str:
        """Say why rounded tensors cannot be compared in low precision."""
        kind = dtype_name(self.subject.dtype)
        return (
            f"the parallel program rounds to 16 bits what the model computes in {kind}, and nothing is off by more "
            "than that may come to. Let it compute as the model does, or compare both in 16 bits: --dtype bf16"
        )

    def _verdict(self, result: str, reason: str = "") -> Verdict:
        """The verdict with this result, and with all that was compared so far."""
        first = self.first
        if not first and self.findings:
            first = self.findings[0].name
        return Verdict(
            result,
            self.subject.layout,
            len(self.ranks),
            self.compared,
            tuple(self.findings),
            first=first,
            reason=reason,
            notes=tuple(self.notes),
            dtype=dtype_name(self.subject.dtype),
            tolerances=self.reference.tolerances(),
            errors=self.errors,
        )

    def _match_names(self) -> str:
        """Find each rank's names on one device. Returns why that is not possible; empty if it is."""
        known = self.reference.observed.weights
        # The longest name that fits is the right one: `0.weight` also ends in `weight`.
        longest_first = sorted(known, key=len, reverse=True)
        for index, rank in enumerate(self.ranks):
            names: dict[str, str] = {}
            for name in rank.parallel.weights:
                # The model may be inside another module of the parallel program.
                if name in known:
                    matches = [name]
                else:
                    matches = [other for other in longest_first if name.endswith(f".{other}")]
                if matches:
                    names[matches[0]] = name
                elif name in rank.parallel.parameters:
                    return f"{name} of the parallel program (rank {index}) is not in the model on one device"
            aliases = self._tied_aliases(names)
            self.names.append(names | aliases)
            self.aliases.append(set(aliases))
        return ""

    def _tied_aliases(self, names: Mapping[str, str]) -> dict[str, str]:
        """Find the names on one device of tied weights that a rank has under only one of their names.

        An example is the head on the last stage of a pipeline. Its weight is also that of the embedding, which is on
        the first stage.

        Args:
            names: name on one device → the rank's name.
        """
        aliases: dict[str, str] = {}
        for group in self.reference.observed.ties:
            local = {names[name] for name in group if name in names}
            if len(local) == 1:
                missing = [name for name in group if name not in names]
                aliases |= dict.fromkeys(missing, local.pop())
        return aliases

    def _by_rank(self, kind: str, name: str) -> ByRank:
        """By rank, what it saw for a name on one device.

        Args:
            kind: the field of `Observed`: weights, gradients or after.
        """
        tensors = []
        for observed, names in zip(self.seen, self.names, strict=True):
            by_name = getattr(observed, kind)
            tensors.append(by_name.get(names.get(name, "")))
        return tensors

    def _find(self, stage: str, name: str, rank: int | None, relation: str, error: float = math.inf) -> None:
        """Add a finding, or count it with one of the same relation in this stage."""
        findings = self.findings
        if relation in (self.rounding.relation, FINER):
            findings = self.rounded
            # What is computed from a rounded tensor may be rounded too.
            self.rounds = True
        # One line for each kind of mistake, not for each tensor and rank.
        for index, finding in enumerate(findings):
            if finding.stage == stage and finding.relation == relation:
                names = self._names_of_relation[relation]
                names.add(name)
                findings[index] = replace(finding, count=len(names), error=worst([finding.error, error]))
                return
        self._names_of_relation[relation] = {name}
        findings.append(Finding(stage, name, rank, relation, error))

    def _is_rounded(self, value: Tensor, expected: Tensor, error: float) -> bool:
        """Whether a tensor is off by rounding, in a program that rounds where the model does not."""
        if not error <= self.rounding.at_most or not expected.is_floating_point():
            return False
        if self.rounds:
            return True
        # A type that holds the right tensor exactly too proves nothing.
        return any(fits(value, dtype) and not fits(expected, dtype) for dtype in self.rounding.dtypes)

    def weights(self) -> None:
        """Compare parameters and buffers after the model was parallelized: equal, bit for bit."""
        count = 0
        # Names on one device; the ranks' own names are in self.names.
        for name, full in self.reference.observed.weights.items():
            tensors = self._by_rank("weights", name)
            if any(tensors):
                count += 1
            elif name in self.reference.observed.parameters:
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
            n_ranks = len(self.ranks)
            ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
            self.compared["weights"] = f"same: {count} tensors on {ranks}, bit for bit"

    def _compare_weight(self, name: str, rank: int, tensors: ByRank, full: Tensor) -> None:
        """Compare a rank's weight, bit for bit, with its place in the full one. See `_relation` for the arguments."""
        tensor = tensors[rank]
        assert tensor is not None
        place = self.places[rank][name]
        expected = place.of(full)
        own = place.unpadded(tensor.local)
        if own.shape == expected.shape and same_elements(own.to(expected.dtype), expected):
            return
        scale = size_of(full)
        error = _error(own, expected, scale)
        relation = self._relation("weights", name, rank, tensors, expected, full, scale)
        self._find("weights", name, rank, relation, error)

    def _find_no_part(self, name: str, rank: int, tensor: LocalTensor, full: Tensor) -> None:
        """Report a tensor that is not a part of the weight.

        It is wrong, unless it has the model's own elements in another arrangement: that cannot be compared.
        """
        mismatch = f"{tuple(tensor.local.shape)} is not a part of the weight of {tuple(full.shape)}"
        elements = []
        for weight in self.reference.observed.weights.values():
            if weight.local.dtype == full.dtype:
                elements.append(weight.local.flatten())
        own = tensor.local.to(full.dtype)
        is_longer = False
        if own.ndim == full.ndim:
            lengths = zip(own.shape, full.shape, strict=True)
            is_longer = any(own_length > length for own_length, length in lengths)
        is_padded = is_longer or self._is_padded(name)
        if is_padded or torch.isin(own, torch.cat(elements)).all():
            self.reason = (
                f"{name} on rank {rank}: {mismatch}: padding, or the model's elements in another arrangement; the "
                "place of an adapter can tell which"
            )
        else:
            self._find("weights", name, rank, f"{mismatch}: other elements, or shape")

    def _is_padded(self, name: str) -> bool:
        """Whether a weight is padded on some rank."""
        local = [places[name] for places in self.places if name in places]
        return any(any(place.padding) for place in local)

    def _padding(self, name: str, full: Tensor) -> None:
        """Check that the ranks that share a padded weight have all of its elements, and add a note on the padding."""
        if not self._is_padded(name):
            return
        for rank, places in enumerate(self.places):
            if name not in places or not any(places[name].padding):
                continue
            # The ranks of one of the axes share it. It is not known which axis.
            n_missing_by_axis = []
            for axis in self.subject.axes:
                group = self.subject.group(rank, axis)
                n_missing_by_axis.append(self._n_missing(group, name, full))
            n_missing = min(n_missing_by_axis)
            if n_missing:
                self._find("weights", name, rank, f"{n_missing} of its elements are not on the ranks that share it")
                return
        self.notes.append(f"{name} of {tuple(full.shape)} is padded on the ranks: padding is not compared")

    def _n_missing(self, ranks: Sequence[int], name: str, full: Tensor) -> int:
        """The number of a weight's elements that none of some ranks has."""
        # Each element's position in memory, in the shape of the weight: it tells elements of equal value apart.
        element_index = torch.arange(full.numel()).view(full.shape)
        present = []
        for rank in ranks:
            place = self.places[rank].get(name)
            if place is not None:
                present.append(place.of(element_index).flatten())
        n_present = len(torch.cat(present).unique())
        return full.numel() - n_present

    def _ties(self) -> None:
        """Check that a weight that several modules share is one parameter on each rank that has two of them."""
        for group in self.reference.observed.ties:
            first, *others = group
            for rank, names in enumerate(self.names):
                local = {names[name] for name in group if name in names}
                if len(local) < 2:
                    continue
                parallel = self.ranks[rank].parallel
                # Two stages of a pipeline have a copy each, as two ranks would: their gradients tell.
                if len({parallel.parameters[name] for name in local}) > 1:
                    continue
                ties = parallel.ties
                if not any(local.issubset(tied) for tied in ties):
                    self._find("weights", first, rank, f"is no longer one parameter with {', '.join(others)}")

    def _relation(
        self,
        kind: str,
        name: str,
        rank: int,
        tensors: ByRank,
        expected: Tensor,
        full: Tensor,
        scale: float,
    ) -> str:
        """Say what a rank's wrong tensor is instead.

        Args:
            kind: the field of `Observed` that has it: weights, gradients or after.
            name: name of the parameter or buffer on one device.
            rank: the rank that has the wrong tensor.
            tensors: by rank, its tensor of this name.
            expected: what this rank should have.
            full: the full tensor, on one device.
            scale: what differences are divided by.
        """

        def others(other: int) -> Pair:
            return self._own(name, other, tensors), self._expected(name, other, tensors, full)

        value = self._own(name, rank, tensors)
        by_itself = None
        if value is not None and value.shape == expected.shape:
            error = relative(value, expected, scale)
            # A buffer that the parallel program has computed anew, after the model's had been made in float32.
            may_be_finer = self.subject.exact and value.is_floating_point() and kind != "gradients"
            if may_be_finer and same_elements(value.float().to(expected.dtype), expected):
                return FINER
            if self._is_rounded(value, expected, error):
                return self.rounding.relation
            alone = self.ranks[rank].alone
            # The plain model has taken the first step only.
            if alone is not None and self.step_index == 0:
                own = getattr(alone, kind).get(name)
                if own is not None:
                    by_itself = self._expected(name, rank, tensors, own.local)
        alike = self._alike(kind, name)
        return describe_relation(value, expected, scale, rank, others, by_itself, self.subject, alike)

    def _alike(self, kind: str, name: str) -> float:
        """How near two tensors have to be to count as the same when a difference is explained, relative."""
        # Weights before the first step are the same bit for bit.
        if self.subject.exact or kind == "weights":
            return ALIKE
        if kind == "after":
            return self.reference.weight_tolerance(name, self.step_index)
        return self.reference.gradient_tolerance(name, self.step_index)

    def _own(self, name: str, rank: int, tensors: ByRank) -> Tensor | None:
        """What a rank has, reduced over the ranks if it is a partial DTensor, and without padding."""
        value = reduced(tensors, rank)
        weight = self.reference.observed.weights[name]
        place = self._place(name, rank, tensors, weight.local)
        if value is None or place is None or value.ndim != len(place.padding):
            return value
        return place.unpadded(value)

    def _expected(self, name: str, rank: int, tensors: ByRank, full: Tensor) -> Tensor | None:
        """What a rank should have of `full`. None if it has no part of the weight."""
        place = self._place(name, rank, tensors, full)
        if place is None:
            return None
        return place.of(full)

    def _place(self, name: str, rank: int, tensors: ByRank, full: Tensor) -> Place | None:
        """Which part of `full` a rank should have: that of its weight, unless a DTensor says otherwise."""
        tensor = tensors[rank]
        place = self.places[rank].get(name)
        if place is None or tensor is None:
            return place
        # A gradient may be sharded in another way than its parameter.
        if tensor.shard is not None:
            return place_of_shard(tensor.shard, full) or place
        # An adapter may give the full gradient of a weight that is sharded.
        own_name = self.names[rank][name]
        weight = self.ranks[rank].parallel.weights[own_name]
        if tensor.local.shape == full.shape and tensor.local.shape != weight.local.shape:
            return place_of(tensor, full)
        return place

    def samples(self) -> None:
        """Check that each sample is in one part of the batch, and that the ranks of one part have the same samples."""
        n_parts = self.subject.n_parts
        if self.subject.local_batch_fn is None:
            where = "on every rank"
            if n_parts > 1:
                where = f"in {n_parts} equal parts"
            self.compared["batch"] = f"{self.reference.samples} samples {where}"
            return
        tensors = tensors_in(self.batch)
        rows_of_part: dict[int, list[int]] = {}
        for rank, observed in enumerate(self.ranks):
            rows = rows_of_batch(observed.batch, tensors)
            if rows is None:
                self.compared["batch"] = (
                    "not compared: a rank's tensors are not samples of the batch, but parts of them"
                )
                return
            part_index = self.subject.part_index(rank)
            first_rows = rows_of_part.setdefault(part_index, rows)
            if first_rows != rows:
                self._find("batch", "the batch", rank, "has other samples than the ranks of the same part")
        # Sample → in how many parts it is.
        counts: Counter[int] = Counter()
        for rows in rows_of_part.values():
            counts.update(rows)
        # The counts in the batch itself: samples that are alike have one index, and count several times.
        expected = Counter(rows_of_batch(tensors, tensors))
        missing = expected - counts
        if missing:
            more = missing.total() - 1
            self._find("batch", "the batch", None, f"sample {min(missing)} and {more} more are on no rank")
        elif counts - expected:
            self._find("batch", "the batch", None, "samples are with several ranks that split the batch")
        else:
            self.compared["batch"] = f"same: {counts.total()} samples, each in one of {len(rows_of_part)} parts"

    def loss(self) -> None:
        """Compare the loss: each rank has that of the batch, or the ranks' mean or sum over some axes is it."""
        expected = self.reference.observed.loss
        assert expected is not None
        losses = [rank.parallel.loss for rank in self.ranks]
        reading = self._read_loss(losses, expected.local, 0)
        self.loss_axes = reading.axes
        self.errors["loss"] = reading.error
        if not reading.wrong:
            same = f"same: {expected.local.item():.9g}"
            if reading.reading:
                same += f", {reading.reading}"
            self.compared["loss"] = f"{same}, within {reading.error:.0e}"
            return
        if reading.wrong != self.rounding.relation:
            self.first = self._located()
        self._find("loss", "the loss", None, reading.wrong, reading.error)

    def _read_loss(self, losses: ByRank, expected: Tensor, step: int) -> LossReading:
        """Find out how the ranks' losses make that of the batch, and whether a wrong one is only rounded.

        Args:
            losses: by rank, its loss.
            expected: the loss on one device.
            step: 0 for the loss of the first step, 1 for that of the second.
        """
        tolerance = self.reference.loss_tolerance(step)
        reader = Losses(self.subject, self.reference, self.ranks, self.batch)
        reading = reader.read(losses, expected, tolerance)
        if not reading.wrong:
            return reading
        values = []
        for loss in losses:
            if loss is not None:
                values.append(loss.local.flatten().double())
        if values:
            # (losses of all ranks,)
            joined = torch.cat(values)
            if self._is_rounded(joined, expected.double(), reading.error):
                return replace(reading, wrong=self.rounding.relation)
        # The words have the losses, and how they are to each other. Only what may be rounding has a distance.
        if not reading.error <= self.rounding.at_most:
            return replace(reading, error=math.inf)
        return reading

    def _located(self) -> str:
        """The first module that returned something else, in words."""
        return first_wrong_module(self.subject, self.reference, self.ranks, self.batch)

    def gradients(self) -> None:
        """Compare every gradient on each rank with the part of the full one that belongs to its weight."""
        errors = self._compare_gradients("gradients")
        self.errors["gradients"] = worst(errors)
        expected = self.expected.gradients
        wrong = self._wrong_gradients()
        if wrong:
            # Gradients that are 0 cannot be wrong by a factor: "every gradient" is every other one.
            nonzero = set()
            for name, gradient in expected.items():
                if gradient is not None and not self.reference.is_nothing(name, gradient.local):
                    nonzero.add(name)
            self.first = self._located()
            if not self.first and nonzero <= set(wrong):
                self.first = "every gradient"
            elif not self.first:
                self.first = f"gradient of {wrong[0]} (first in backward order)"
            self._explain_by_norm(nonzero)
        elif not self.findings and not self.reason and not self.rounded:
            count = sum(gradient is not None for gradient in expected.values())
            same = self.judged.format(count)
            if self.expected.norms:
                same += ", before and after clipping"
            self.compared["gradients"] = f"{same}, within {worst(errors):.0e}"

    def _names_backward(self) -> list[str]:
        """Parameters in the order of backward, from the loss: a wrong gradient makes later ones wrong."""
        position: dict[str, int] = {}
        for index, module in enumerate(innermost_first(self.reference.observed)):
            position[module] = index

        def position_in_forward(name: str) -> int:
            module = name.rpartition(".")[0]
            # Parameters of modules that are not called come last.
            return position.get(module, -1)

        # Parameters of one module keep their order: a reversed sort is stable too.
        return sorted(self.expected.gradients, key=position_in_forward, reverse=True)

    def _wrong_gradients(self) -> list[str]:
        """The parameters that have findings, in the order of backward."""
        wrong: set[str] = set()
        for finding in self.findings:
            wrong |= self._names_of_relation[finding.relation]
        return [name for name in self._names_backward() if name in wrong]

    def _compare_gradients(self, stage: str) -> list[float]:
        """Compare gradients before the step clips them, its norms, and gradients after it. Returns the errors."""
        errors = [0.0]
        expected = self.expected.gradients
        # A program may also clip by other means than PyTorch's functions, where nothing was recorded before.
        clips = all(observed.norms for observed in (self.expected, *self.seen))
        names = self._names_backward()
        for name in names:
            tensors = self._by_rank("gradients", name)
            full = expected[name]
            if clips:
                tensors = []
                for observed, local_names in zip(self.seen, self.names, strict=True):
                    tensors.append(observed.before_clipping(local_names.get(name, "")))
                full = self.expected.before_clipping(name)
            for rank in range(len(self.ranks)):
                error = self._gradient(stage, name, rank, tensors, full)
                errors.append(error)
        if self.findings or not clips:
            return errors
        # Right gradients may still be clipped wrongly: by a wrong norm, or by another function.
        self._compare_norms(stage)
        if not self.findings:
            for name in names:
                tensors = self._by_rank("gradients", name)
                for rank in range(len(self.ranks)):
                    self._gradient(stage, name, rank, tensors, expected[name])
        return errors

    def _compare_norms(self, stage: str) -> None:
        """Compare the norms by which each rank clips."""
        tolerance = self.reference.norm_tolerance(self.step_index)
        for index, norm in enumerate(self.expected.norms):
            expected = norm.local
            # A rank may have clipped less often.
            norms: ByRank = []
            for observed in self.seen:
                norm_or_none = None
                if index < len(observed.norms):
                    norm_or_none = observed.norms[index]
                norms.append(norm_or_none)
            for rank in range(len(self.ranks)):
                value = reduced(norms, rank)
                if value is None or value.numel() != 1:
                    continue
                error = relative(value, expected, size_of(expected))
                if error <= tolerance:
                    continue
                relation = self.rounding.relation
                if not self._is_rounded(value, expected, error):
                    factor = value.item() / expected.item()
                    relation = self._explained_norm(factor, rank)
                self._find(stage, NORM, rank, relation, error)

    def _explained_norm(self, factor: float, rank: int) -> str:
        """Say how a norm is wrong: by which factor and, if something explains it, why."""
        # A tied weight counts once, under the first of its names.
        others: set[str] = set()
        for group in self.reference.observed.ties:
            others.update(group[1:])
        gradients = {}
        for name in self.expected.gradients:
            gradient = self.expected.before_clipping(name)
            if gradient is not None and name not in others:
                gradients[name] = gradient.local
        alike = 0.0
        if not self.subject.exact:
            alike = self.reference.norm_tolerance(self.step_index)
        relation = f"{times(factor, self.subject, alike)} what it should be"
        # The square of a norm is off by twice as much as the norm.
        near = max(NEAR, 2 * alike)
        why = explain_norm(factor, gradients, self.places, rank, self.subject, near)
        if why:
            return f"{relation}: {why}"
        return relation

    def _explain_by_norm(self, names: Collection[str]) -> None:
        """Where every gradient of a rank is off by one factor, and a wrong norm explains it, report the norm instead.

        Args:
            names: the gradients that are not 0.
        """
        for index, finding in enumerate(self.findings):
            name = finding.name
            rank = finding.rank
            is_factor = "times what it" in finding.relation or "times (one over" in finding.relation
            if rank is None or finding.count < len(names) or not is_factor:
                continue
            gradient = self.expected.gradients[name]
            tensors = self._left_by_step(name) or self._by_rank("gradients", name)
            value = self._own(name, rank, tensors)
            if gradient is None or value is None:
                continue
            expected = self.places[rank][name].of(gradient.local)
            # Clipping divides by the norm: a norm that is too small leaves gradients too large.
            ratio = widest(expected).norm() / widest(value).norm()
            factor = ratio.item()
            relation = self._explained_norm(factor, rank)
            if ": " in relation:
                self.findings[index] = replace(finding, name=NORM, relation=relation, count=1)

    def _gradient(
        self, stage: str, name: str, rank: int, tensors: ByRank, full: LocalTensor | None, is_left: bool = False
    ) -> float:
        """Compare a rank's gradient with what it should be, and add a finding if it is too far off.

        Args:
            stage: the stage of the finding.
            name: the parameter.
            rank: the rank.
            tensors: by rank, its gradient.
            full: the gradient on one device.
            is_left: whether it is the gradient as the optimizer's step leaves it.

        Returns:
            How far it is off, relative.
        """
        if full is None:
            value = reduced(tensors, rank)
            # Zeros are as good as None.
            if value is None or size_of(value) == 0:
                return 0.0
            self._find(stage, name, rank, "has a gradient, but has none on one device", math.inf)
            return math.inf
        scale = self.reference.gradient_scale(name, full.local, self.step_index)
        value = self._own(name, rank, tensors)
        expected = self._expected(name, rank, tensors, full.local)
        # No part of the parameter is on this rank, or it is compared under its other name.
        if expected is None or name in self.aliases[rank]:
            return 0.0
        if value is None:
            # None is as good as zeros.
            nothing_expected = size_of(expected) == 0
            if nothing_expected or self._is_elsewhere(name, rank):
                return 0.0
        error = math.inf
        if value is not None:
            error = _error(value, expected, scale)
        tolerance = self.reference.gradient_tolerance(name, self.step_index)
        if error <= tolerance:
            return error
        # What counts is what the update used: the step may average gradients itself.
        left = self._left_by_step(name)
        if left and not is_left:
            self.judged = LEFT_BY_STEP
            expected_left = self.expected.left.get(name, self.expected.gradients[name])
            return self._gradient(stage, name, rank, left, expected_left, is_left=True)
        relation = self._relation("gradients", name, rank, tensors, expected, full.local, scale)
        if NEVER in relation and self._is_made_one(name, error):
            self.judged = BY_WEIGHTS
            self.made_one.add(name)
            return 0.0
        self._find(stage, name, rank, relation, error)
        return error

    def _left_by_step(self, name: str) -> ByRank:
        """By rank, a gradient as the optimizer's step leaves it. Empty if it has changed it on no rank."""
        left = self._by_rank("left", name)
        if not any(left):
            return []
        return [changed or own for changed, own in zip(left, self._by_rank("gradients", name), strict=True)]

    def _is_made_one(self, name: str, error: float) -> bool:
        """Whether all ranks have one weight, bit for bit, after steps by gradients of their own: they average it.

        Args:
            name: the weight.
            error: how far a rank's own gradient is off, relative. By so much another step would differ, which has to be
                more than what is not seen.
        """
        full = self.expected.after[name].local
        tensors = self._by_rank("after", name)
        # What a rank should have → what the first such rank has.
        first: dict[bytes, Tensor] = {}
        for rank in range(len(self.ranks)):
            own = self._own(name, rank, tensors)
            expected = self._expected(name, rank, tensors, full)
            if own is None or expected is None:
                continue
            if not same_elements(own, first.setdefault(bytes_of(expected), own)):
                return False
        before = self.reference.observed.weights
        if self.step_index > 0:
            before = self.reference.observed.after
        moved = min(1.0, error) * size_of(full - before[name].local)
        return moved > RESOLVED * self.reference.weight_tolerance(name, self.step_index) * finite_size_of(full)

    def _is_elsewhere(self, name: str, rank: int) -> bool:
        """Whether a missing gradient is somewhere else, or has been used up. Then it cannot be compared."""
        parallel = self.ranks[rank].parallel
        if name in parallel.main_gradients:
            why = f"the gradient of {name} is in its main_grad, and not in its grad, where the optimizer would take it"
        elif name in parallel.stepped - self.reference.observed.stepped:
            why = f"{name} changes in backward, and its gradient is then gone: an optimizer steps inside of it"
        else:
            return False
        # The first reason is the one that is reported.
        self.reason = self.reason or why
        return True

    def step(self) -> None:
        """Compare parameters and buffers after the optimizer's step, and the loss of the batch with them."""
        for rank in self.ranks:
            stepped = sorted(rank.parallel.stepped - self.reference.observed.stepped)
            if stepped:
                self.reason = f"{stepped[0]} changes before the optimizer's step: one steps inside of backward"
                return
        errors = self._compare_after("step")
        self.errors["step"] = worst(errors)
        second = self.expected.second
        if not self.findings and second is not None and second.loss is not None:
            losses: ByRank = []
            for observed in self.seen:
                loss = None
                if observed.second is not None:
                    loss = observed.second.loss
                losses.append(loss)
            reading = self._read_loss(losses, second.loss.local, 1)
            if reading.wrong:
                self._find("step", "the loss after it", None, reading.wrong, reading.error)
        optimizer = self.seen[0].optimizer
        if self.findings and optimizer and self.subject.optimizer_fn is plain_sgd:
            self.findings.clear()
            self.reason = (
                f"the program takes its step with an optimizer of its own, {optimizer}, and one device with verify's "
                "SGD: give one device the same, --optimizer"
            )
            return
        if not self.findings and not self.rounded:
            self.compared["step"] = f"same: weights, buffers and loss after the step, within {worst(errors):.0e}"

    def _compare_after(self, stage: str) -> list[float]:
        """Compare parameters and buffers after a step. Returns the errors."""
        errors = [0.0]
        for name, full in self.expected.after.items():
            tensors = self._by_rank("after", name)
            expected_full = full.local
            scale = finite_size_of(full.local)
            tolerance = self.reference.weight_tolerance(name, self.step_index)
            ignored = self.reference.moved_by_rounding(name, self.step_index)
            if ignored is not None:
                expected_full = full.local.masked_fill(ignored, 0)
                tensors = self._masked(name, tensors, ignored)
            for rank, tensor in enumerate(tensors):
                place = self.places[rank].get(name)
                if tensor is None or place is None or name in self.aliases[rank]:
                    continue
                expected = place.of(expected_full)
                own = place.unpadded(tensor.local)
                error = _error(own, expected, scale)
                errors.append(error)
                if error <= tolerance:
                    continue
                relation = self._relation("after", name, rank, tensors, expected, expected_full, scale)
                if relation != FINER and self._is_unchanged(name, rank):
                    relation = NOT_UPDATED
                elif name in self.made_one:
                    relation = MADE_ONE
                self._find(stage, name, rank, relation, error)
        return errors

    def _is_unchanged(self, name: str, rank: int) -> bool:
        """Whether a rank's weight is the same after the step as before it."""
        parallel = self.ranks[rank].parallel
        before = parallel.weights
        if self.step_index > 0:
            before = parallel.after
        local_name = self.names[rank].get(name, "")
        own = self.seen[rank].after.get(local_name)
        if own is None or local_name not in before:
            return False
        earlier = before[local_name].local
        return earlier.shape == own.local.shape and same_elements(earlier, own.local)

    def _masked(self, name: str, tensors: ByRank, ignored: Tensor) -> ByRank:
        """By rank, a weight with zeros where it is not compared.

        Args:
            name: the weight.
            tensors: by rank, what it has.
            ignored: a mask of the full weight.
        """
        masked: ByRank = []
        for rank, tensor in enumerate(tensors):
            place = self.places[rank].get(name)
            if tensor is None or place is None:
                masked.append(tensor)
                continue
            local = tensor.local.clone()
            own = place.unpadded(local)
            mask = place.of(ignored)
            if own.shape == mask.shape:
                # A view of `local`: padding stays as it is.
                own.masked_fill_(mask, 0)
            masked.append(replace(tensor, local=local))
        return masked

    def second_step(self) -> None:
        """Compare gradients, parameters and buffers of a second step, from the weights that the first has made."""
        if self.expected.second is None:
            return
        self.expected = self.expected.second
        self.step_index = 1
        self.seen = [observed.second for observed in self.seen if observed.second is not None]
        errors = self._compare_gradients("step 2")
        wrong = self._wrong_gradients()
        if wrong:
            self.first = f"second step, gradient of {wrong[0]}"
        if not self.findings:
            errors += self._compare_after("step 2")
        self.errors["step 2"] = worst(errors)
        if self.findings and not wrong:
            self.first = f"second step, {self.findings[0].name}"
        elif not self.findings and not self.rounded:
            self.compared["step 2"] = f"same: gradients, weights and buffers, within {worst(errors):.0e}"
