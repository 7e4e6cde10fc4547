"""From a command line to a program's ``Config``: a dataclass whose fields are flags, or groups of flags; and back, for
errors: the rooms below name fields of a configuration, the user gave flags.

As a rank of ``mmm dry-run`` a program makes a few steps, and leaves nothing behind.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import tyro

from mmm.errors import ConfigError, UserError
from mmm.runtime import failure
from mmm.runtime.failure import print_once
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
from mmm.trainer.config.run import FLAGS, flags_of, replace_flags
from mmm.units import counted

Config = TypeVar("Config")
WIDTH = 79  # of prose in --help
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
    "checkpoint_mode": None,
    "resume": None,
    "compile": False,
}


@runtime_checkable
class HasCheck(Protocol):
    """A group, or a config, that knows whether its values are right."""

    def check(self) -> None: ...


@runtime_checkable
class WithDefaults(Protocol):
    """A `Config` some of whose defaults follow from other flags of a command line."""

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> dict[str, Any]: ...


def check(config: Any) -> None:
    """Every group's own check, then the config's, of rules that span groups.

    Raises:
        ConfigError: of the first that is broken.
    """
    for field in fields(config):
        if is_dataclass(group := getattr(config, field.name)):
            check(group)
    if isinstance(config, HasCheck):
        config.check()


def configure(config: type[Config], **flags: Any) -> Config:
    """A `config` with these flags, checked, as `parse` makes it of a command line. Raises ConfigError: of `check`."""
    made: Config = replace_flags(config(), **flags)
    check(made)
    return made


def parse(config: type[Config], doc: str | None = None) -> Config:
    """The command line as a `config`, checked. ``--help`` prints and leaves; so does a wrong flag, with the near miss
    and exit code 2. Either is printed once for the run.

    In a dry run the options are those of a few steps.

    Raises:
        ConfigError: of `check`; or a flag whose value is empty, as of a shell's variable that is not set: a path would
            be the current folder.
    """
    for before, value in pairwise(["", *sys.argv[1:]]):
        flag = value[:-1] if value.startswith("--") and value.endswith("=") else before
        if flag.startswith("--") and value in ("", f"{flag}="):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave {flag} out")
    default: Any = tyro.MISSING_NONPROP
    if issubclass(config, WithDefaults):
        default = replace_flags(config(), **config.defaults(sys.argv[1:]))
    with print_once(), real_defaults():
        made: Config = tyro.cli(
            config,
            prog=shlex.join(command_line()[: -len(sys.argv[1:]) or None]),
            args=host_left_out(sys.argv[1:]),
            description=None if doc is None else _wrapped(doc),
            default=default,
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    check(made)
    return for_a_few_steps(made) if whoami().source == DRY_RUN else made


@contextmanager
def real_defaults() -> Iterator[None]:
    """Inside, nothing printed speaks of None, which nobody gives: a flag's text says what is taken without it."""
    out = io.StringIO()
    errors = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            yield
    finally:
        sys.stdout.write(without_none(out.getvalue()))
        sys.stderr.write(without_none(errors.getvalue()))


def without_none(text: str) -> str:
    """A text of ``--help`` without ``{None}|`` and ``(default: None)``, or an error without the choice ``'None'``; its
    columns stay."""
    text = re.sub(r"'None', ?", "", text)
    text = re.sub(r",\s+'None'\)", ")", text)
    lines = []
    for line in text.split("\n"):
        short = line.replace("{None}|", "").replace("{None,", "{")
        gap = re.search(r"(?<=\S)(?=  )", short)
        at = gap.start() if gap else len(short)
        lines.append(short[:at] + " " * (len(line) - len(short)) + short[at:])
    marked = re.sub(r" ?\(default:(\s*?)(\n?)(\s*)(None)?\)", r"\0\2\0", "\n".join(lines))
    kept = [line for line in marked.split("\n") if "\0" not in line or line.strip(" \0")]
    return "\n".join(line.replace("\0", "").rstrip() for line in kept)


def host_left_out(argv: Sequence[str]) -> list[str]:
    """A command line with `--offload host` as `--offload`: the host is the only place."""
    shorter: list[str] = []
    for word in argv:
        if word == "host" and shorter and shorter[-1] == "--offload":
            continue
        shorter.append(word)
    return shorter


def _wrapped(doc: str) -> str:
    """Prose in lines of a terminal's width; drawings as they are. To tyro, a line that begins with a space is one."""
    blocks = []
    for block in doc.strip().split("\n\n"):
        if any(line.startswith(" ") for line in block.splitlines()):
            blocks.append(textwrap.indent(block.strip("\n"), " "))
        else:
            blocks.append(textwrap.fill(block, WIDTH, initial_indent=" ", subsequent_indent=" "))
    return "\n\n".join(blocks)


def for_a_few_steps(config: Config) -> Config:
    """The config of a rank's program in a dry run. Raises ConfigError for a mistake on purpose: it would not show."""
    flags = flags_of(config)
    if flags.get("break_") is not None:
        raise ConfigError("--break in a dry run: no loss is computed that could differ; leave --break out")
    few = flags.get("parallel", "ddp") != "ddp"
    changes = {"max_iters": STEPS if few else MORE_STEPS, **WITHOUT}
    return replace_flags(config, **{name: value for name, value in changes.items() if name in flags})


def with_flags(error: UserError) -> str:
    """The message of an error, its fields written as flags, ``microbatches 3: …`` as ``--microbatches 3: …``, and its
    `ranks` as the user's own line."""
    text = error.with_fields(lambda name: f"--{FLAGS.get(name, name)}")
    if error.ranks is not None:
        dry = whoami().source == DRY_RUN
        start = f"mmm dry-run {error.ranks} --" if dry else f"launch -n {error.ranks} --device cpu"
        line = f"{'try' if dry else 'start'} that many, `{start} {shlex.join(command_line())}`"
        text = text.replace(f"start {counted(error.ranks, 'rank')}", line)
    return text


def run_main(fn: Callable[[], object]) -> NoReturn:
    """`mmm.runtime.failure.run_main`, for a program whose flags `parse` makes."""

    def main() -> None:
        try:
            fn()
        except UserError as error:
            error.args = (with_flags(error), *error.args[1:])
            error.ranks = None
            raise

    failure.run_main(main)
