"""What a program does differently as a rank of ``mmm dry-run``: it makes a few steps, and leaves nothing behind."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from mmm.errors import ConfigError
from mmm.runtime.ranks import DRY_RUN, command_line, whoami

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
}
ALIAS = "dry_run"
# Flags of programs that once asked for a dry run → those of ``mmm dry-run``.
ALIASES = {f"{ALIAS}_{name}": f"--{name}" for name in ("rank", "memory", "json")}


def for_a_few_steps(options: Any) -> Any:
    """The options of a rank's program in a dry run. Raises ConfigError for a mistake on purpose: it would not show."""
    if getattr(options, "break_", None) is not None:
        raise ConfigError("--break in a dry run: no loss is computed that could differ; leave --break out")
    few = getattr(options, "parallel", "ddp") != "ddp"
    changes = {"max_iters": STEPS if few else MORE_STEPS, **WITHOUT}
    names = {field.name for field in fields(options)}
    return replace(options, **{name: value for name, value in changes.items() if name in names})


def follow_alias() -> None:
    """If the command line has ``--dry_run WORLD_SIZE``, an alias: say what it stands for, and run that instead, on
    rank 0 alone."""
    asked, argv = split_alias(sys.argv[1:])
    if asked is None or whoami().source == DRY_RUN:
        return
    if not whoami().is_main:
        sys.exit(0)
    program = command_line()[: -len(sys.argv[1:])]
    line = ["dry-run", *asked, "--", *program, *argv]
    print(f"--{ALIAS} is an alias of: mmm {shlex.join(line)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "mmm.cli.main", *line])


def split_alias(argv: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """What a program's command line says to ``mmm dry-run``, None where it does not ask; and the rest of it."""
    world_size: list[str] | None = None
    flags, rest, words = list[str](), list[str](), list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        flag = name[2:].replace("-", "_") if name.startswith("--") else ""
        if flag != ALIAS and flag not in ALIASES:
            rest.append(word)
            continue
        values = [value] if equals else [words.pop(0)] if words else []
        if flag == ALIAS:
            world_size = values
        else:
            flags += [ALIASES[flag], *values]
    return (None, list(argv)) if world_size is None else ([*world_size, *flags], rest)
