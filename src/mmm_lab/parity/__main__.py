"""Compare models on every layout with plain PyTorch on one device.

    python3 -m mmm_lab.parity                                         # the whole matrix
    python3 -m mmm_lab.parity --ranks 1..4 --model vit                # of one model, on up to 4 ranks
    python3 -m mmm_lab.parity --model cnn --layout pp2.dp2.tp2        # one layout; also a model of your own
    python3 -m mmm_lab.parity --device cuda                           # on this host's GPUs, compared with its CPU

It starts the ranks itself, and compares as `mmm verify` does: a layout passes where the weights, the losses and every
gradient of two steps are those of one device, to rounding. The exit code is 0 if all passed, 1 if not, 2 for wrong
flags.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mmm.errors import ConfigError, LaunchError, LayoutError, UserError
from mmm.run.command_line import parse
from mmm.runtime.failure import USER_ERROR_EXIT, report_user_error
from mmm.runtime.ranks import LONGEST, whoami
from mmm.units import counted
from mmm_lab.parity import models
from mmm_lab.parity.layouts import AXES_OF, FIELDS, ParityCase, canonical, make_case, matrix, ranks_of

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare."""

    model: tuple[str, ...] = ()
    """transformer, llama, moe, mixtral, mistral, qwen2, qwen3, qwen3_moe, gpt, gpt_dropout, vit, swin, cnn, or your
    own (docs/models.md); repeatable. Default: all."""
    layout: tuple[str, ...] = ()
    """Such as pp2.dp2.tp2; repeatable. Axes in any order: pp dp_replicate dp_shard dp cp tp ep; dp means FSDP.
    Default: the matrix of docs/parity.md."""
    ranks: tuple[str, ...] = ()
    """Only layouts of that many ranks: 4, or 1..8; repeatable."""
    device: Literal["cpu", "cuda", "xpu"] = "cpu"
    """Device type of the ranks, one each; layouts of more ranks than there are devices are left out."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    global_batch_size: int = 16
    """Samples of a step, which have to be a multiple of the data-parallel ranks: for dp3, say, 18."""
    optimizer: tuple[Literal["sgd", "adamw"], ...] = ()
    """Repeatable. Default: sgd, and adamw where one technique is used by itself on up to 4 ranks."""
    case: str = ""
    """For --layout, what it leaves open, with + between: fsdp, ddp, zero1 or zero2; a schedule, such as GPipe; ring,
    ulysses, usp or space; full or selective (activation checkpointing); offload; and the data, which are else made up
    by the model's own file: packed (several documents in a sequence) or chats (only answers have targets)."""
    timeout: float = 300.0
    """Seconds that a layout may take before it counts as hanging, and as many for one device."""
    json: Path | None = None
    """File for the results, as JSON. Default: they are printed only."""
    dry_run: bool = False
    """Print what would be compared, and leave."""

    def check(self) -> None:
        """Raises ConfigError for the first value that is wrong by itself."""
        if self.global_batch_size < 1:
            raise ConfigError(f"--global_batch_size {self.global_batch_size}: it must be at least 1")
        if not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"--timeout {self.timeout}: it must be greater than 0, and at most {LONGEST:.0e} s")
        if self.case and not self.layout:
            raise ConfigError(f"--case {self.case} goes with --layout: the matrix has its own")

    def cases(self) -> list[ParityCase]:
        """Returns what was asked for, still to be checked against the models.

        Raises:
            UserError: no such layout or model, or nothing is left.
        """
        names = list(dict.fromkeys(self.model or sorted(models.NAMES)))
        for name in names:
            # One with a dot may be the user's own: it is imported later, with torch.
            if "." not in name and name not in models.NAMES:
                models.find(name)  # raises
        layouts = dict.fromkeys(map(canonical, self.layout))
        cases: list[ParityCase] = []
        for name in names:
            cases += [make_case(name, layout, self.case) for layout in layouts] or matrix(name)
        # A word that no layout has an axis for would have no effect.
        for word in filter(None, self.case.split("+")):
            axes = AXES_OF.get(FIELDS[word])
            if axes and not any(case.sizes.keys() & axes for case in cases):
                raise LayoutError(f"--case {word}, and no --layout has {' or '.join(axes)}")
        if self.optimizer:
            optimizers = tuple(dict.fromkeys(self.optimizer))
            cases = [replace(case, optimizers=optimizers) for case in cases]
        if not self.ranks:
            return cases
        wanted = ranks_of(self.ranks)
        fitting = [case for case in cases if case.ranks in wanted]
        if not fitting:
            counts = sorted({case.ranks for case in cases})
            listed = ", ".join(map(str, counts))
            raise LayoutError(f"--ranks {' '.join(self.ranks)}: the layouts asked for are on {listed}")
        return fitting


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    try:
        return compare(parse(Options, __doc__, argv))
    except UserError as error:
        report_user_error(error)
        return USER_ERROR_EXIT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def compare(options: Options) -> int:
    """Compare, report. Returns the exit code."""
    rank = whoami()
    if rank.world_size > 1:
        raise LaunchError(
            f"this is one of {rank.world_size} ranks (of {rank.source}), and mmm_lab.parity starts ranks itself: "
            f"run it without a launcher, python3 -m mmm_lab.parity"
        )
    cases = options.cases()
    if options.dry_run:
        for case in cases:
            ranks = counted(case.ranks, "rank")
            print(f"{ranks}  {case}: {', '.join(case.optimizers)}")
        return 0

    # It imports torch and all else: a wrong flag has not waited for it.
    from mmm_lab.parity import run

    began = time.perf_counter()
    devices = run.count_devices(options.device)
    cases = _with_devices(cases, devices, options.device)
    ready, refused = run.prepare_cases(cases, options.global_batch_size)
    # What was named has to go. Of all models, and of the matrix, what does not go is left out.
    are_named = options.model and options.layout
    if refused and (are_named or not ready):
        # The same reason holds for several layouts.
        reasons = dict.fromkeys(f"--model {case.model}: {why}" for case, why in refused)
        raise LayoutError("; ".join(reasons))
    for case, why in refused:
        print(f"left out: {case.model}: {why}", flush=True)
    rows: list[run.Row] = []
    try:
        for row in run.compare(ready, options.timeout, options.dtype, options.device):
            rows.append(row)
            if options.json is not None:
                # At once: a run that is killed leaves what it has found.
                run.write_json(rows, options.json)
    finally:
        passed = sum(row["passed"] for row in rows)
        comparisons = counted(len(rows), "comparison")
        seconds = time.perf_counter() - began
        print(f"{passed} of {comparisons} passed, in {seconds:.0f} s", flush=True)
    return 0 if passed == len(rows) else 1


def _with_devices(cases: Sequence[ParityCase], devices: int, kind: str) -> list[ParityCase]:
    """Returns the cases whose ranks have a device each, and prints which layouts are left out.

    Raises:
        LayoutError: no case is left.
    """
    fitting = [case for case in cases if case.ranks <= devices]
    if not fitting:
        raise LayoutError(f"every layout has more ranks than there are {kind} devices here ({devices})")
    # Once each: several cases have the same layout.
    too_large = dict.fromkeys(case.layout for case in cases if case.ranks > devices)
    if too_large:
        names = ", ".join(too_large)
        print(f"left out: {names}, of more ranks than {kind} devices here ({devices})", flush=True)
    return fitting


if __name__ == "__main__":
    raise SystemExit(main())
