"""What the comparison reads: each rank's tensors under the names of one device; and what a stage finds in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import worst
from mmm_verify.names import with_global_names
from mmm_verify.observe import LocalTensor, Observed
from mmm_verify.rank import RankObserved
from mmm_verify.reference import Reference, Tolerance
from mmm_verify.relations import Place, place_of, place_of_shard, reduced
from mmm_verify.subject import Subject
from mmm_verify.torch_private import GLOO_AVERAGES
from mmm_verify.verdict import Finding

TO_FLOAT32 = "is rounded to float32"
TO_16_BITS = "is rounded to 16 bits"
FINER = "has all digits of float64, where one device has it rounded to float32"

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


@dataclass(frozen=True)
class Seen:
    """What is compared, of one of the two steps.

    Attributes:
        subject: the program.
        reference: the model on one device.
        ranks: what each rank saw, by the names on one device.
        batch: the global batch.
        names: by rank, name on one device → name in the parallel program.
        aliases: by rank, those of `names` that only stand for another name of a tied weight. They serve to explain.
        places: by rank, name of a weight → which part of it the rank has. A tensor that is no part has none.
        rounds: whether the parallel program is known to compute in fewer digits than the model.
        notes: what a reader of the verdict has to know.
        reason: why the names do not fit together; empty if they do.
        tolerances: how far each of the two steps may be off.
        step: 0 for the first step, 1 for the second.
    """

    subject: Subject
    reference: Reference
    ranks: Sequence[RankObserved]
    batch: Any
    names: Sequence[Mapping[str, str]]
    aliases: Sequence[Set[str]]
    places: Sequence[Mapping[str, Place]]
    rounds: bool
    notes: tuple[str, ...]
    reason: str
    tolerances: Sequence[Tolerance]
    step: int = 0

    @property
    def rounding(self) -> Rounding:
        """How the program may round more than its model."""
        return ROUNDINGS[self.subject.dtype]

    @property
    def tolerance(self) -> Tolerance:
        """How far the step may be off."""
        return self.tolerances[self.step]

    @property
    def expected(self) -> Observed:
        """What one device saw of the step."""
        return self.reference.step(self.step)

    @property
    def observed(self) -> list[Observed]:
        """By rank, what it saw of the step."""
        observed = [rank.parallel for rank in self.ranks]
        if self.step == 0:
            return observed
        return [first.second or Observed() for first in observed]

    def by_rank(self, kind: str, name: str) -> ByRank:
        """By rank, what it saw for a name on one device.

        Args:
            kind: the field of `Observed`: weights, gradients, after or left.
        """
        tensors = []
        for observed, names in zip(self.observed, self.names, strict=True):
            by_name = getattr(observed, kind)
            tensors.append(by_name.get(names.get(name, "")))
        return tensors

    def own(self, name: str, rank: int, tensors: ByRank) -> Tensor | None:
        """What a rank has, reduced over the ranks if it is a partial DTensor, and without padding."""
        value = reduced(tensors, rank)
        weight = self.reference.observed.weights[name]
        place = self.place(name, rank, tensors, weight.local)
        if value is None or place is None or value.ndim != len(place.padding):
            return value
        return place.unpadded(value)

    def own_part(self, name: str, rank: int, tensors: ByRank, full: Tensor) -> Tensor | None:
        """What a rank should have of `full`. None if it has no part of the weight."""
        place = self.place(name, rank, tensors, full)
        if place is None:
            return None
        return place.of(full)

    def place(self, name: str, rank: int, tensors: ByRank, full: Tensor) -> Place | None:
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

    def is_padded(self, name: str) -> bool:
        """Whether a weight is padded on some rank."""
        return any(any(places[name].padding) for places in self.places if name in places)


@dataclass
class Stage:
    """What one stage has found.

    Attributes:
        name: the stage, as findings call it.
        rounds: whether the parallel program is known to compute in fewer digits than the model.
        made_one: weights that the ranks average after steps by gradients of their own.
        after_rounded: whether a stage before has found something rounded.
        judged: how gradients were judged, in words, with a place for their number.
        compared: what was compared, in words; empty if something is not the same.
        error: how far the worst tensor is off; None where nothing has a distance.
        findings: what is not the same.
        rounded: what is off by no more than such rounding.
        reason: why something cannot be compared; empty if it can.
        first: where the two first differ, in words.
        notes: what else a reader of the verdict has to know.
        axes: the axes whose ranks rightly have different losses.
        names: relation of findings → the names that have it.
    """

    name: str
    rounds: bool
    made_one: set[str]
    after_rounded: bool
    judged: str = "same: {}"
    compared: str = ""
    error: float | None = None
    findings: list[Finding] = field(default_factory=list)
    rounded: list[Finding] = field(default_factory=list)
    reason: str = ""
    first: str = ""
    notes: list[str] = field(default_factory=list)
    axes: tuple[str, ...] = ()
    names: dict[str, set[str]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether everything so far is the same."""
        return not (self.findings or self.rounded or self.reason or self.after_rounded)

    def find(self, seen: Seen, name: str, rank: int | None, relation: str, error: float = math.inf) -> None:
        """Add a finding, or count it with one of the same relation."""
        findings = self.findings
        if relation in (seen.rounding.relation, FINER):
            findings = self.rounded
            # What is computed from a rounded tensor may be rounded too.
            self.rounds = True
        # One line for each kind of mistake, not for each tensor and rank.
        for index, finding in enumerate(findings):
            if finding.relation == relation:
                names = self.names[relation]
                names.add(name)
                findings[index] = replace(finding, count=len(names), error=worst([finding.error, error]))
                return
        self.names[relation] = {name}
        findings.append(Finding(self.name, name, rank, relation, error))

    def wrong(self, names: Sequence[str]) -> list[str]:
        """Those of some names that have findings."""
        wrong: set[str] = set()
        for finding in self.findings:
            wrong |= self.names[finding.relation]
        return [name for name in names if name in wrong]


def begin(name: str, seen: Seen, done: Sequence[Stage]) -> Stage:
    """A stage that has found nothing yet, with what the stages before know of the program."""
    rounds = seen.rounds or any(stage.rounds for stage in done)
    made_one: set[str] = set()
    for stage in done:
        made_one |= stage.made_one
    return Stage(name, rounds, made_one, any(stage.rounded for stage in done))


def look(
    subject: Subject, reference: Reference, ranks: Sequence[RankObserved], batch: Any, rounds: bool = False
) -> Seen:
    """Bring together what was seen: each rank's names and parts of the weights on one device."""
    ranks, note = with_global_names(ranks, reference.observed.weights)
    notes = list(reference.notes)
    if note:
        notes.append(note)
    observed = [reference.observed, *(rank.parallel for rank in ranks)]
    if subject.exact and any(one.autocast for one in observed):
        notes.append(
            "autocast is on in the step, and does nothing to float64: what it rounds, and whether the ranks round "
            "the same, is not seen here"
        )
    if subject.device == "cpu" and not (GLOO_AVERAGES or subject.exact):
        notes.append(
            "this PyTorch adds up on CPUs what `fully_shard` has it average: compared as if it averaged, as GPUs do"
        )
    all_names = []
    all_aliases = []
    all_places = []
    reason = ""
    for index, rank in enumerate(ranks):
        names, unknown = _names_on_one_device(reference, rank)
        if unknown and not reason:
            reason = f"{unknown} of the parallel program (rank {index}) is not in the model on one device"
        aliases = _tied_aliases(reference, names)
        all_names.append(names | aliases)
        all_aliases.append(set(aliases))
        places = {}
        for name, own_name in all_names[-1].items():
            place = place_of(rank.parallel.weights[own_name], reference.observed.weights[name].local)
            if place is not None:
                places[name] = place
        all_places.append(places)
    tolerances = [reference.tolerance(step) for step in (0, 1)]
    return Seen(
        subject,
        reference,
        ranks,
        batch,
        all_names,
        all_aliases,
        all_places,
        rounds,
        tuple(notes),
        reason,
        tolerances,
    )


def _names_on_one_device(reference: Reference, rank: RankObserved) -> tuple[dict[str, str], str]:
    """Name on one device → the rank's name; and a parameter that has none there, empty if each has one."""
    known = reference.observed.weights
    # The longest name that fits is the right one: `0.weight` also ends in `weight`.
    longest_first = sorted(known, key=len, reverse=True)
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
            return names, name
    return names, ""


def _tied_aliases(reference: Reference, names: Mapping[str, str]) -> dict[str, str]:
    """Find the names on one device of tied weights that a rank has under only one of their names.

    An example is the head on the last stage of a pipeline. Its weight is also that of the embedding, which is on the
    first stage.

    Args:
        names: name on one device → the rank's name.
    """
    aliases: dict[str, str] = {}
    for group in reference.observed.ties:
        local = {names[name] for name in group if name in names}
        if len(local) == 1:
            missing = [name for name in group if name not in names]
            aliases |= dict.fromkeys(missing, local.pop())
    return aliases
