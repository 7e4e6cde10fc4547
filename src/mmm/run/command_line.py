"""From a command line to a program's ``Config`` (`mmm.run.options`), and back, for errors: the rooms below name fields
of a configuration, the user gave flags.

As a rank of ``mmm dry-run`` a program makes a few steps, and leaves nothing behind.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar, get_type_hints, runtime_checkable

import tyro

from mmm.errors import ConfigError, UserError
from mmm.run.options import FLAGS, flags_of, replace_flags
from mmm.runtime import failure
from mmm.runtime.failure import print_once
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
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
    """A `Config` some of whose defaults follow from other flags.

    `defaults` takes the flags that were given, by name, as text; it returns the values of others.
    """

    @classmethod
    def defaults(cls, given: Mapping[str, str]) -> dict[str, Any]: ...


def check(config: Any) -> None:
    """Every group's own check, then the config's, of rules that span groups.

    Raises:
        ConfigError: of the first that is broken.
    """
    for field in fields(config):
        group = getattr(config, field.name)
        if is_dataclass(group):
            check(group)
    flags = flags_of(config)
    for name, choices in getattr(config, "CHOICES", {}).items():
        if flags[name] not in (None, *choices):
            raise ConfigError(f"--{name} {flags[name]}: it is one of {', '.join(choices)}")
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

    A `config` with ``UNLISTED`` flags takes ``--config FILE``: JSON, a value by the name of its flag, or the
    config.json of a run. The command line counts where it says otherwise.

    In a dry run the options are those of a few steps.

    Raises:
        ConfigError: of `check`; or a flag whose value is empty, as of a shell's variable that is not set: a path would
            be the current folder; or a file that cannot be used.
    """
    words = sys.argv[1:]
    _refuse_empty(words)
    unlisted: Collection[str] = getattr(config, "UNLISTED", ())
    path = None
    if unlisted:
        path, words = _config_file(words)
    in_file = {} if path is None else _read_file(path, config)
    given = {name: str(value) for name, value in in_file.items() if value is not None} | given_on(words)
    shown = as_shown(config, without=unlisted if {"-h", "--help"} & set(words) else ())
    default: Any = tyro.MISSING_NONPROP
    if issubclass(config, WithDefaults):
        start = replace_flags(config(), **config.defaults(given))
        words = [*_words_of(in_file, flags_of(start)), *words]
        default = _converted(start, shown)
    with print_once(), real_defaults():
        made = tyro.cli(
            shown,
            prog=shlex.join(command_line()[: -len(sys.argv[1:]) or None]),
            args=host_left_out(words),
            description=None if doc is None else _wrapped(doc),
            default=default,
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    flags: Config = _converted(made, config)
    check(flags)
    return for_a_few_steps(flags) if whoami().source == DRY_RUN else flags


def _refuse_empty(words: Sequence[str]) -> None:
    for before, value in pairwise(["", *words]):
        flag = value[:-1] if value.startswith("--") and value.endswith("=") else before
        if flag.startswith("--") and value in ("", f"{flag}="):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave {flag} out")


def given_on(words: Sequence[str]) -> dict[str, str]:
    """The flags of a command line, by name, each with the word that follows it: its value, where it has one."""
    given = {}
    for word, after in pairwise([*words, ""]):
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            given[flag.replace("-", "_")] = value or after
    return given


def _config_file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of ``--config``, and the other words."""
    path = None
    others: list[str] = []
    for word in words:
        if others and others[-1] == "--config":
            others.pop()
            path = Path(word)
        elif word.startswith("--config="):
            path = Path(word.partition("=")[2])
        else:
            others.append(word)
    if others and others[-1] == "--config":
        raise ConfigError("--config without a file: give one")
    return path, others


def _read_file(path: Path, config: type) -> dict[str, Any]:
    """The flags of a file, by name. Raises ConfigError where it has others than the program."""
    try:
        flags = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: it cannot be read as JSON: {error}") from None
    if isinstance(flags, dict) and isinstance(flags.get("options"), dict):
        flags = flags["options"]  # a run's config.json
    if not isinstance(flags, dict):
        raise ConfigError(f"--config {path}: it has no flags: give an object, a value by the name of its flag")
    unknown = [name for name in flags if name not in flags_of(config())]
    if unknown:
        raise ConfigError(f"--config {path}: {', '.join(unknown)}: this program has no such flag")
    return flags


def _words_of(flags: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The words of a command line that sets these flags. A value that is null, or the default, needs none."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value == json.loads(json.dumps(defaults[name], default=str)):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *(str(part) for part in value)]
        else:
            words += [f"--{name}", str(value)]
    return words


def as_shown(config: type, without: Collection[str] = ()) -> type:
    """A `config` as the command line has it: with the choices of ``CHOICES``, without the flags of ``LEFT_OUT``.

    Args:
        without: further flags, which ``--help`` does not list.
    """
    hints = get_type_hints(config, include_extras=True)
    changed: dict[str, tuple[Any, Any]] = {}
    for field in fields(config):
        group = hints[field.name]
        if is_dataclass(group) and isinstance(group, type):
            shown = _group_as_shown(group, config, without)
            if shown is not group:
                changed[field.name] = (shown, _converted(field.default, shown))
    if getattr(config, "UNLISTED", None):
        file = tyro.conf.arg(metavar="FILE", help="Flags from a file: JSON, or a run's config.json.")
        changed["config"] = (Annotated[Path | None, file], None)
    return _derived(config, changed) if changed else config


def _group_as_shown(group: type, config: type, without: Collection[str]) -> type:
    left_out = {*getattr(config, "LEFT_OUT", ()), *without}
    choices = getattr(config, "CHOICES", {})
    changed: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if field.name in choices:
            hint = Literal[tuple(choices[field.name])]
            if field.default is None:
                hint = hint | None
        if field.name in left_out:
            hint = Annotated[hint, tyro.conf.Fixed, tyro.conf.Suppress]
        if hint is not hints[field.name]:
            changed[field.name] = (hint, field.default)
    return _derived(group, changed) if changed else group


def _derived(base: type, changed: Mapping[str, tuple[Any, Any]]) -> type:
    """The dataclass with other types and defaults of some fields."""
    namespace: dict[str, Any] = {name: default for name, (_, default) in changed.items()}
    namespace["__annotations__"] = {name: hint for name, (hint, _) in changed.items()}
    namespace |= {"__module__": base.__module__, "__doc__": base.__doc__}
    return dataclass(frozen=True, kw_only=True)(type(base.__name__, (base,), namespace))


def _converted(config: Any, kind: type) -> Any:
    """The same values in a dataclass of another kind: a group as it is shown, or as it is."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        value = getattr(config, field.name, field.default)
        if is_dataclass(value) and is_dataclass(field.default):
            value = _converted(value, type(field.default))
        values[field.name] = value
    return kind(**values)


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
