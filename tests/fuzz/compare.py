"""A case beside its twin on one rank: which differences are faults."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from fuzz.draw import Case
from fuzz.flags import HARMLESS, LAYOUT, flags_of
from fuzz.run import Outcome

# Relative bounds on every loss and evaluation. What the low ones leave is rounding: 1 / 256 and 1 / 2048 a product, and
# an update by AdamW that turns round where a gradient is nearly 0. That ranks skip different steps is seen directly.
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 3e-2, "bf16": 5e-2}
# Of saved models, in fp64 alone: AdamW makes noise as large as the rate elsewhere.
WEIGHTS = {"fp64": 1e-6}
# Of half precision: a loss above that many times the first belongs to a run that makes noise grow.
CLIMBED = 1.3
# The words by which a refusal names what one rank does not have.
NAMES = re.compile(
    r"\b(ranks?|pp|dp|dp_\w+|cp|tp|tpsize|ep|stages?|stages_per_rank|schedule|micro-?batch(es)?|layout|hsdp|fsdp|ddp|zero\d"
    r"|data-parallel|loss_chunks|reshard_after_forward|checkpointing|activation_checkpointing|compile|offload|parallel|cp_style|batch_size)\b"
)


@dataclass(frozen=True)
class Verdict:
    """What to think of an outcome.

    Attributes:
        kind: ``equal``, ``refused``, ``not compared``; or a fault: ``different``, ``crashed``, ``odd``.
        about: for people. signature: the same for what is likely to be the same fault.
    """

    kind: str
    about: str = ""
    signature: str = ""

    @property
    def fault(self) -> bool:
        return self.kind in ("different", "crashed", "odd")


def twin(case: Case, facts: dict | None = None) -> Case:
    """The same problem on one rank: no flags of the layout, and the same global batch.

    Args:
        facts: of the record of the case, where it ran. None: it was refused, for a value of any other flag perhaps.
    """
    known = flags_of(case.program)
    flags = {name: value for name, value in case.flags.items() if name not in LAYOUT}
    if facts is not None:
        flags = {name: value for name, value in flags.items() if name not in HARMLESS}
    sizes = [int(case.flags.get(name, 1)) for name in ("pp", "cp", "tpsize")]  # type: ignore[arg-type]
    dp = max(case.ranks // max(math.prod(sizes), 1), 1)
    if facts is not None:
        flags["global_batch_size"] = str(facts["global_batch_size"])
    elif "batch_size" in flags:
        flags.setdefault("global_batch_size", str(int(str(flags["batch_size"])) * dp))
    flags.pop("batch_size", None)
    flags["device"] = "cpu"
    if "save_model" in known:
        flags["save_model"] = "on"
    return Case(case.key, case.program, 1, flags, case.spoilt, case.data)


def judge(case: Case, many: Outcome, run: Callable[[Case], Outcome]) -> Verdict:
    """What to think of the outcome of a case. run: runs its twin, where that is needed."""
    if many.kind == "crashed":
        return Verdict("crashed", many.reason, _signature(case, many.reason))
    if many.kind == "left":
        return Verdict("not compared", "it printed the summary")
    if many.kind == "refused" and _of_the_layout(case, many.reason):
        return Verdict("refused", many.reason)
    alone = run(twin(case, many.facts or None))
    if alone.kind == "crashed":
        return Verdict("crashed", f"its twin on one rank: {alone.reason}", _signature(case, f"twin {alone.reason}"))
    if many.kind == "refused":
        if alone.kind != "refused":
            about = f"refused, though one rank is not, for what is no matter of the layout: {many.reason}"
            return Verdict("odd", about, _signature(case, about))
        return Verdict("refused", many.reason)
    if alone.kind == "refused":
        about = f"it ran, and one rank is refused: {alone.reason}"
        return Verdict("odd", about, _signature(case, about))
    return _compare(case, many, alone)


def _of_the_layout(case: Case, reason: str) -> bool:
    """Whether a refusal is for what one rank does not have. Where no flag says it, the global batch grows with dp."""
    by_default = "global batch of" in reason and "global_batch_size" not in case.flags
    return by_default or NAMES.search(reason) is not None


def _compare(case: Case, many: Outcome, one: Outcome) -> Verdict:
    dtype = str(many.facts["precision"]["name"])
    bound = BOUNDS[dtype]
    steps = None
    if many.scales != one.scales:
        # Half precision: a sum over fewer samples overflows later. From the first step that only one of them skips, the
        # two are different runs.
        pairs = zip(many.scales, one.scales, strict=False)
        steps = next((step for step, (a, b) in enumerate(pairs) if a != b), 0) + 1
    elif many.kind != one.kind:
        about = f"{dtype}: one {many.kind}, the other {one.kind}: {many.reason or one.reason}"
        return Verdict("different", about, _signature(case, about))
    for name in sorted({*many.series, *one.series}):
        wrong = _differs(name, many.series.get(name), one.series.get(name), bound, dtype, steps)
        if wrong:
            return Verdict("different", f"{dtype} {name}: {wrong}", _signature(case, f"{dtype} {name}"))
    if dtype in WEIGHTS and many.weights and one.weights:
        if many.weights.keys() != one.weights.keys():
            about = f"model.pt has other names: {sorted(many.weights.keys() ^ one.weights.keys())}"
            return Verdict("different", about, _signature(case, "names"))
        for name, (value, size) in one.weights.items():
            own = many.weights[name][0]
            both_nan = math.isnan(own) and math.isnan(value)
            if not (both_nan or abs(own - value) <= WEIGHTS[dtype] * max(size, 1e-3)):
                about = f"model.pt: {name} sums up to {own!r}, on one rank to {value!r}"
                return Verdict("different", about, _signature(case, "model.pt"))
    return Verdict("equal")


def _differs(
    name: str, many: list[float] | None, one: list[float] | None, bound: float, dtype: str, steps: int | None
) -> str:
    """In words, where a series is further from the twin's than it may be; empty where it is not.

    Args:
        steps: rows to look at; None for all.
    """
    if many is None or one is None:
        return f"only {'one rank has' if many is None else 'the layout has'} it"
    if steps is None and len(many) != len(one):
        return f"{len(many)} rows, and {len(one)} on one rank"
    for row, (a, b) in enumerate(zip(many, one, strict=False)):
        if steps is not None and (row >= steps or name != "loss"):
            break
        if (math.isnan(a) and math.isnan(b)) or a == b:
            continue
        if dtype in ("fp16", "bf16") and max(a, b) > CLIMBED * max(many[0], one[0]):
            break
        if name in ("test_acc", "imbalance") and dtype != "fp64":
            # One image more or less, one token with another expert: rounding decides.
            continue
        if not abs(a - b) <= bound * max(abs(b), 1e-3):
            relative = abs(a - b) / max(abs(b), 1e-300)
            return f"row {row} is {a!r}, on one rank {b!r}: relative {relative:.1e} > {bound:.0e}"
    return ""


def _signature(case: Case, text: str) -> str:
    return f"{case.program}: {kind_of(text)[:160]}"


def kind_of(reason: str) -> str:
    """A reason without its numbers and paths: the same for the same rule."""
    reason = re.sub(r"/\S+", "PATH", reason)
    reason = re.sub(r"`launch [^`]*`", "`launch …`", reason)
    return re.sub(r"[-+]?\d[\d,.e+-]*|\bnan\b|\binf\b", "#", reason)
