"""Train models on every layout, and compare each with plain PyTorch on one device.

    python3 -m mmm_lab.parity                                         # the whole matrix
    python3 -m mmm_lab.parity --ranks 1..4 --model vit                # of one model, on up to 4 ranks
    python3 -m mmm_lab.parity --model cnn --layout pp2.dp2.tp2        # one layout; also a model of your own
    python3 -m mmm_lab.parity --device cuda                           # on this host's GPUs, compared with its CPU

It starts the ranks itself. A layout passes where the losses of all steps and every gradient of step 1 are those of
one device, to rounding. The exit code is 0 if all passed, 1 if not, 2 for wrong flags.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mmm.errors import ConfigError, LaunchError, LayoutError, UserError
from mmm.layout import ScheduleName
from mmm.run.command_line import parse
from mmm.runtime.failure import USER_ERROR_EXIT, report_user_error
from mmm.runtime.ranks import LONGEST, whoami
from mmm.units import counted
from mmm_lab.parity import models
from mmm_lab.parity.layouts import ParityCase, canonical, make_case, matrix, ranks_of

INTERRUPTED = 130
# Flag that goes with --layout → the axes of which it needs one, if any.
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "data_parallel": ("dp_replicate", "dp_shard"),
    "schedule": ("pp",),
    "cp_style": ("cp",),
    "activation_checkpointing": (),
    "offload": (),
    "data": (),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and how long."""

    model: tuple[str, ...] = ()
    """transformer, llama, moe, gpt, gpt_dropout, plain_gpt, qwen3, regression, batch_norm, vit, cnn, or your own
    (docs/models.md); repeatable. Default: all."""
    layout: tuple[str, ...] = ()
    """Such as pp2.dp2.tp2; repeatable. Axes in any order: pp dp_replicate dp_shard dp cp tp ep; dp means FSDP.
    Default: the matrix of docs/parity.md."""
    ranks: tuple[str, ...] = ()
    """Only layouts of that many ranks: 4, or 1..8; repeatable."""
    device: Literal["cpu", "cuda", "xpu"] = "cpu"
    """Device type of the ranks, one each; layouts of more ranks than there are devices are left out."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    steps: int = 10
    global_batch_size: int = 16
    """Samples of a step, which have to be a multiple of the data-parallel ranks: for dp3, say, 18."""
    optimizer: tuple[Literal["sgd", "adamw"], ...] = ()
    """Repeatable. Default: sgd, and adamw where one technique is used by itself on up to 4 ranks."""
    data_parallel: Literal["fsdp", "ddp", "zero1", "zero2"] | None = None
    """For --layout with dp: what its ranks keep. Default: fsdp, which with dp_replicate is hsdp."""
    schedule: ScheduleName | None = None
    """For --layout with pp. Default: 1F1B."""
    cp_style: Literal["ring", "ulysses", "usp"] | None = None
    """For --layout with cp. Default: ring."""
    activation_checkpointing: Literal["none", "full", "selective"] | None = None
    """For --layout. Default: none."""
    offload: bool | None = None
    """For --layout: keep what the optimizer updates in the host's memory. Default: it is not."""
    data: Literal["made_up", "digits", "packed", "chats"] | None = None
    """For --layout: digits are real images, for models that take images; for the Transformer packed, several
    documents in a sequence, and chats, of which only answers have targets. Default: made up by the model's own file."""
    timeout: float = 300.0
    """Seconds that a layout may take before it counts as hanging."""
    outdir: Path | None = None
    """Folder of the record. Default: outputs/parity/<time>."""
    dry_run: bool = False
    """Print what would be trained, and leave."""

    def check(self) -> None:
        """Raises ConfigError for the first value that is wrong by itself."""
        for name in ("steps", "global_batch_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"--{name} {value}: it must be at least 1")
        if not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"--timeout {self.timeout}: it must be greater than 0, and at most {LONGEST:.0e} s")
        # The first one is enough to say.
        if not self.layout:
            for flag in self.techniques():
                raise ConfigError(f"--{flag} goes with --layout: the matrix has its own")

    def techniques(self) -> dict[str, Any]:
        """Returns the flags that go with --layout and were given."""
        values = {name: getattr(self, name) for name in TECHNIQUES}
        return {name: value for name, value in values.items() if value is not None}

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
        cases: list[ParityCase] = []
        for name in names:
            cases += self._asked(name) if self.layout else matrix(name)
        # A flag that no layout has an axis for would have no effect.
        if self.layout:
            for flag, value in self.techniques().items():
                axes = TECHNIQUES[flag]
                if axes and not any(set(axes) & case.sizes.keys() for case in cases):
                    raise LayoutError(f"--{flag} {value}, and no --layout has {' or '.join(axes)}")
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

    def _asked(self, model: str) -> list[ParityCase]:
        """Returns the cases of a model on the layouts of --layout."""
        techniques = self.techniques()
        # The flag is called as the trainers' is.
        techniques["checkpointing"] = techniques.pop("activation_checkpointing", "none")
        layouts = dict.fromkeys(map(canonical, self.layout))
        return [make_case(model, layout, **techniques) for layout in layouts]


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
    """Train, compare, report. Returns the exit code."""
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

    # These import torch and all else: a wrong flag has not waited for it.
    from mmm.history.record.folder import prepare, versions, write_config
    from mmm_lab.parity import report, run
    from mmm_lab.parity.reference import Training

    began = time.perf_counter()
    devices = run.count_devices(options.device)
    cases = _with_devices(cases, devices, options.device)
    training = Training(steps=options.steps, dtype=options.dtype, global_batch=options.global_batch_size)
    ready, refused = run.prepare_cases(cases, training)
    # Models that were named have to go; of all models those that do not go are left out.
    if refused and (options.model or not ready):
        # The same reason holds for several layouts.
        reasons = dict.fromkeys(f"--model {case.model}: {why}" for case, why in refused)
        raise LayoutError("; ".join(reasons))
    for case, why in refused:
        print(f"left out: {case.model}: {why}", flush=True)
    # Made only now: a refused command leaves no folder.
    folder = prepare(options.outdir, "parity", overwrite=False)
    config = {"options": asdict(options), "versions": versions(), "command": sys.argv}
    write_config(folder, config)
    rows = []
    interrupted = False
    try:
        for row in run.compare(ready, options.timeout, folder, options.device):
            rows.append(row)
            # At once: a run that is killed leaves what it has found.
            report.write_json(rows, folder)
    except KeyboardInterrupt:
        interrupted = True
    print(f"\n{report.table(rows)}\n", flush=True)
    print(f"record: {report.write_json(rows, folder)}")
    bad = sum(not row.passed for row in rows)
    # A layout makes several trainings, one for each optimizer.
    layouts = {(row.model, row.layout, row.technique) for row in rows}
    seconds = time.perf_counter() - began
    loss_limit = report.LOSS_LIMIT[options.dtype]
    gradient_limit = report.GRADIENT_LIMIT[options.dtype]
    trainings = counted(len(rows), "training")
    passed = f"{len(rows) - bad} of {trainings} on {counted(len(layouts), 'layout')} passed"
    limits = f"limits: loss {loss_limit:.0e}, gradient {gradient_limit:.0e}"
    print(f"{passed}, in {seconds:.0f} s; {limits}")
    if interrupted:
        not_tried = len(ready) - len(layouts)
        print(f"interrupted: {not_tried} of {len(ready)} layouts were not tried", file=sys.stderr)
        return INTERRUPTED
    return 1 if bad else 0


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
