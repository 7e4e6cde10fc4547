"""``--dry_run WORLD_SIZE``: what a run of so many ranks would hold and send, without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from mmm.errors import ConfigError
from mmm.runtime.device import choose_device
from mmm.runtime.memory import device_memory
from mmm.runtime.ranks import command_line, whoami

if TYPE_CHECKING:
    from mmm.plan.machine import Machine

STEPS = 2  # the first makes the optimizer's state, and a pipeline sends shapes in it
MORE_STEPS = 3  # DDP packs its gradients anew in the second
# What the steps of a dry run go without: it leaves nothing behind, and evaluates one batch at its end.
WITHOUT: dict[str, Any] = {
    "epochs": None,
    "log_every": 1,
    "plots": False,
    "outdir": None,
    "overwrite": False,
    "eval_every": 0,
    "eval_batches": 1,
    "save_model": False,
    "checkpoint_every": None,
    "keep": None,
    "keep_every": None,
    "checkpoint_mode": None,
    "replica": None,
    "resume": None,
    "compile": False,
    "dry_run": None,
    "dry_run_rank": None,
    "dry_run_memory": None,
    "dry_run_json": None,
    "dry_run_trace": None,
    "dry_run_trace_all": False,
    "dry_run_machine": None,
}
WITH_DRY_RUN = [name for name in WITHOUT if name.startswith("dry_run_")]
NOT_FITTING_EXIT = 1


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """Flags of a dry run."""

    SEVERAL_MODELS: ClassVar = False  # one after the other, in one run
    dry_run: Annotated[int | None, tyro.conf.arg(metavar="WORLD_SIZE")] = None
    """Run nothing: try the program of one rank of so many on tensors without elements, and print its memory at the peak
    and its collectives. Exit code 0 if it runs and fits, 1 if it does not fit."""
    dry_run_rank: int | None = None
    """With --dry_run, which rank. Default: 0; of a pipeline also the first of the largest and of the last stage."""
    dry_run_memory: str | None = None
    """With --dry_run, what a rank's device has, such as 64GiB. Default: what the device here has, if there is one."""
    dry_run_json: Path | None = None
    """With --dry_run, where to write all of it."""
    dry_run_trace: Annotated[Path | None, tyro.conf.arg(aliases=["--trace"], metavar="NAME")] = None
    """With --dry_run, write each rank's step as an execution trace: NAME.<rank>.et (Chakra), NAME.<rank>.perfetto.json;
    NAME.json has the groups of ranks."""
    dry_run_trace_all: bool = False
    """With --dry_run_trace, of every rank, as simulators of a network want it. Default: of those that are tried."""
    dry_run_machine: str | None = None
    """With --dry_run_trace, the machine that predicts durations: a name of `mmm plan --site`, or a file."""

    def check_dry_run(self) -> None:
        """Raises ConfigError for values that are wrong by themselves."""
        if self.dry_run is None:
            for name in WITH_DRY_RUN:
                if getattr(self, name) not in (None, False):
                    raise ConfigError(f"--{name} without --dry_run: give --dry_run WORLD_SIZE, or leave it out")
            return
        if self.SEVERAL_MODELS:
            raise ConfigError("--dry_run: this program trains several models in one run; try one with mmm.trainer.lm")
        if getattr(self, "break_", None) is not None:
            raise ConfigError("--dry_run with --break: no loss is computed that could differ; leave one of them out")
        if self.dry_run < 1:
            raise ConfigError(f"--dry_run {self.dry_run}: it must be at least 1 rank")
        if self.dry_run_rank is not None and not 0 <= self.dry_run_rank < self.dry_run:
            raise ConfigError(f"--dry_run_rank {self.dry_run_rank}: it is not between 0 and {self.dry_run - 1}")
        if self.dry_run_memory is not None:
            from mmm.plan.machine import parse_bytes  # every run would pay for it

            parse_bytes(self.dry_run_memory, "--dry_run_memory")
        self._check_trace()

    def _check_trace(self) -> None:
        for name in ("dry_run_trace_all", "dry_run_machine"):
            if self.dry_run_trace is None and getattr(self, name) not in (None, False):
                raise ConfigError(f"--{name} without --dry_run_trace: give --dry_run_trace NAME, or leave it out")
        if self.dry_run_trace_all and self.dry_run_rank is not None:
            raise ConfigError("--dry_run_trace_all with --dry_run_rank: it is about every rank; leave one of them out")
        if self.dry_run_trace is not None and not self.dry_run_trace.parent.is_dir():
            raise ConfigError(f"--dry_run_trace {self.dry_run_trace}: there is no folder {self.dry_run_trace.parent}")
        if self.dry_run_machine is not None:
            _machine(self.dry_run_machine)


def _machine(name: str) -> Machine:
    from mmm.plan.machine import known_machines, load

    known = known_machines()
    if name.lower() not in known and not Path(name).exists():
        raise ConfigError(f"--dry_run_machine {name}: there is no such file, and the names are {', '.join(known)}")
    return load(str(known.get(name.lower(), name)), "--dry_run_machine")


class DryRunAsked(Exception):
    """The command line asks for a dry run; its options say of what."""

    def __init__(self, options: Any) -> None:
        super().__init__("a dry run")
        self.options = options


def for_a_few_steps(options: Any) -> Any:
    """The options of a rank's program in a dry run."""
    there = {field.name for field in fields(options)}
    few = getattr(options, "parallel", "ddp") != "ddp"
    options = replace(options, max_iters=STEPS if few else MORE_STEPS)
    return replace(options, **{name: value for name, value in WITHOUT.items() if name in there})


def answer(program: Callable[[], object], options: Any) -> int:
    """Make the dry run, print and write what it found. Only one rank does, if there are several here.

    Args:
        program: parses the command line, and trains.

    Returns:
        The exit code.
    """
    if not whoami().is_main:
        return 0
    from mmm.plan import dry_run_report  # a tenth of what this package adds to PyTorch's import, for every run
    from mmm.plan.dry_run import dry_run
    from mmm.plan.machine import parse_bytes

    traced, every = options.dry_run_trace is not None, options.dry_run_trace_all
    found = dry_run(program, options.dry_run, options.dry_run_rank, traced, every=every)
    if options.dry_run_memory is not None:
        budget: int | None = int(parse_bytes(options.dry_run_memory, "--dry_run_memory"))
    else:
        device = choose_device(options.device, whoami())
        budget = None if device.type == "cpu" else device_memory(device)
    print(dry_run_report.text_of(found, budget), flush=True)
    if options.dry_run_json is not None:
        options.dry_run_json.write_text(json.dumps(dry_run_report.json_of(found, budget, command_line())) + "\n")
    if traced:
        from mmm.plan.execution_trace import write

        machine = None if options.dry_run_machine is None else _machine(options.dry_run_machine)
        files = write(found, options.dry_run_trace, machine, every_rank=every)
        print(f"wrote {len(files)} files, {files[1]} the first of a rank", flush=True)
    return 0 if dry_run_report.verdict(found, budget)[0] else NOT_FITTING_EXIT
