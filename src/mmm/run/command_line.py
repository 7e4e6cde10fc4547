"""From a command line to a program's ``Config`` (`mmm.run.options`), and back for errors: the rooms below name fields
of a configuration, while the user gave flags.

As a rank of ``mmm dry-run`` a program makes a few steps, and leaves nothing behind.
"""

from __future__ import annotations

import io
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

import docstring_parser
import tyro

from mmm.errors import ConfigError, UserError
from mmm.run import config_file
from mmm.run.options import FLAGS, flags_of, replace_flags
from mmm.runtime import failure
from mmm.runtime.failure import print_once
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
from mmm.units import counted

Config = TypeVar("Config")
# Width of prose in --help.
WIDTH = 79
ABOUT_CONFIG = (
    "Defaults from a file: YAML, TOML or JSON, such as `lr: 0.001`; or a run's folder, to use its flags again. They "
    "replace those of a preset; the command line replaces them."
)
# Steps of a dry run: the first makes the optimizer's state, and a pipeline sends shapes in it.
STEPS = 2
# With DDP, which packs its gradients anew in the second step.
MORE_STEPS = 3
# Flags of the steps of a dry run, which leaves nothing behind, and evaluates one batch at its end.
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
    def defaults(cls, flags: Mapping[str, str]) -> dict[str, Any]: ...


def check(config: Any) -> None:
    """Call the check of every group, then that of the config, which has the rules that span groups.

    Raises:
        ConfigError: for the first rule that is broken.
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
    """A `config` with these flags, checked, as `parse` makes it from a command line. Raises ConfigError, as `check`."""
    made: Config = replace_flags(config(), **flags)
    check(made)
    return made


def parse(config: type[Config], doc: str | None = None) -> Config:
    """The command line as a `config`, checked. In a dry run it is the config of a few steps.

    ``--help`` prints and exits; so does a wrong flag, with the near miss and exit code 2. Either is printed once for
    the run.

    Every program takes ``--config FILE`` (`mmm.run.config_file`). What counts, from the weakest: the defaults of the
    program, those of a preset, the file, the command line.

    Args:
        config: the program's class of flags.
        doc: description of the program, for ``--help``.

    Raises:
        ConfigError: as `check`; a flag has an empty value, such as that of a shell variable that is not set, which as a
            path would be the current folder; or a file cannot be used.
    """
    argv = sys.argv[1:]
    _refuse_empty(argv)
    in_file: Mapping[str, Any] = {}
    # A program may have a flag of its own with that name.
    if "config" not in config_file.flag_hints(config):
        path, argv = config_file.split(argv)
        config_file.facts["config_file"] = None
        if path is not None:
            left_out = getattr(config, "LEFT_OUT", ())
            file = config_file.read(path, as_shown(config), left_out)
            config_file.facts["config_file"] = vars(file)
            in_file = file.flags
    asks_for_help = "-h" in argv or "--help" in argv
    unlisted: Collection[str] = ()
    if asks_for_help:
        unlisted = getattr(config, "UNLISTED", ())
    shown = as_shown(config, without=unlisted, in_help=asks_for_help)
    # tyro's word for "take the defaults of the class".
    default: Any = tyro.MISSING_NONPROP
    preset_flags: dict[str, Any] = {}
    if issubclass(config, WithDefaults):
        as_text = {name: str(value) for name, value in in_file.items()}
        as_text.update(given_on(argv))
        preset_flags = config.defaults(as_text)
    if in_file or issubclass(config, WithDefaults):
        # The file counts before the preset. tyro puts the command line on top.
        changes = {**preset_flags, **in_file}
        defaults = replace_flags(config(), **changes)
        default = _converted(defaults, shown)
    # The command line without the flags.
    program = command_line()
    n_flags = len(sys.argv) - 1
    if n_flags:
        program = program[:-n_flags]
    description = None
    if doc is not None:
        description = _wrapped(doc)
    with print_once(), real_defaults():
        made = tyro.cli(
            shown,
            prog=shlex.join(program),
            args=host_left_out(argv),
            description=description,
            default=default,
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    flags: Config = _converted(made, config)
    check(flags)
    if whoami().source == DRY_RUN:
        return for_a_few_steps(flags)
    return flags


def _refuse_empty(argv: Sequence[str]) -> None:
    for before, argument in pairwise(["", *argv]):
        # "--flag=", or "--flag" and then "".
        flag = ""
        if argument == "":
            flag = before
        elif argument.endswith("="):
            flag = argument[:-1]
        # An empty text that follows no flag is for tyro to refuse.
        if flag.startswith("--"):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave {flag} out")


def given_on(argv: Sequence[str]) -> dict[str, str]:
    """The flags of a command line, by name, each with the argument that follows: its value, if it takes one."""
    flags = {}
    for argument, after in pairwise([*argv, ""]):
        if argument.startswith("--"):
            flag, _, value = argument[2:].partition("=")
            name = flag.replace("-", "_")
            flags[name] = value or after
    return flags


def as_shown(
    config: type,
    without: Collection[str] = (),
    in_help: bool = False,
) -> type:
    """A `config` as the command line has it: with the choices of ``CHOICES``, without the flags of ``LEFT_OUT``.

    Args:
        config: the program's class of flags.
        without: further flags, which ``--help`` does not list.
        in_help: whether the text of each flag is needed.
    """
    hints = get_type_hints(config, include_extras=True)
    changed: dict[str, tuple[Any, Any]] = {}
    for field in fields(config):
        group = hints[field.name]
        if is_dataclass(group) and isinstance(group, type):
            shown = _group_as_shown(group, config, without, in_help)
            # Only a group that has changed is replaced.
            if shown is not group:
                default = _converted(field.default, shown)
                changed[field.name] = (shown, default)
    if "config" not in hints:
        file = tyro.conf.arg(metavar="FILE", help=ABOUT_CONFIG)
        hint = Annotated[Path | None, file]
        changed["config"] = (hint, None)
    return _derived(config, changed)


def _group_as_shown(
    group: type,
    config: type,
    without: Collection[str],
    in_help: bool,
) -> type:
    left_out = {*getattr(config, "LEFT_OUT", ()), *without}
    choices = getattr(config, "CHOICES", {})
    # Finding the texts in the source takes as long as all the rest of the parsing, on every rank.
    described = {}
    if in_help:
        described = _described(group)
    changed: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if field.name in choices:
            hint = Literal[tuple(choices[field.name])]
            if field.default is None:
                hint = hint | None
        # tyro neither lists nor takes a flag that is fixed and suppressed.
        if field.name in left_out:
            hint = Annotated[hint, tyro.conf.Fixed, tyro.conf.Suppress]
        elif field.name in described:
            hint = Annotated[hint, tyro.conf.arg(help=described[field.name])]
        if hint is not hints[field.name]:
            changed[field.name] = (hint, field.default)
    return _derived(group, changed)


def _described(group: type) -> dict[str, str]:
    """The text below each flag of a group, on one line: tyro would keep the line breaks that it has in the source."""
    described = {}
    for parameter in docstring_parser.parse_from_object(group).params:
        text = parameter.description
        if text:
            described[parameter.arg_name] = " ".join(text.split())
    return described


def _derived(base: type, changed: Mapping[str, tuple[Any, Any]]) -> type:
    """The dataclass with other types and defaults for some fields; itself if there are none.

    Args:
        changed: type and default of each such field.
    """
    if not changed:
        return base
    namespace: dict[str, Any] = {"__annotations__": {}}
    for name, (hint, default) in changed.items():
        namespace[name] = default
        namespace["__annotations__"][name] = hint
    # tyro shows the docstring as the heading of the group.
    namespace["__module__"] = base.__module__
    namespace["__doc__"] = base.__doc__
    derived = type(base.__name__, (base,), namespace)
    return dataclass(frozen=True, kw_only=True)(derived)


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
    """Inside, nothing that is printed mentions None, which nobody gives: a flag's help says what happens without it."""
    out = io.StringIO()
    errors = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            yield
    finally:
        sys.stdout.write(without_none(out.getvalue()))
        sys.stderr.write(without_none(errors.getvalue()))


def without_none(text: str) -> str:
    """A text of ``--help`` without ``{None}|`` and ``(default: None)``, or an error without the choice ``'None'``.

    The columns stay aligned.
    """
    text = re.sub(r"'None', ?", "", text)
    text = re.sub(r",\s+'None'\)", ")", text)
    lines = []
    for line in text.split("\n"):
        short = line.replace("{None}|", "")
        short = short.replace("{None,", "{")
        # Fill up before the second column, which begins after two spaces.
        end_of_column = len(short)
        gap = re.search(r"(?<=\S)(?=  )", short)
        if gap:
            end_of_column = gap.start()
        padding = " " * (len(line) - len(short))
        lines.append(short[:end_of_column] + padding + short[end_of_column:])
    joined = "\n".join(lines)
    # "(default: None)" may be broken over two lines. The mark shows lines that are left empty by its removal.
    marked = re.sub(r" ?\(default:(\s*?)(\n?)(\s*)(None)?\)", r"\0\2\0", joined)
    left = []
    for line in marked.split("\n"):
        is_emptied = "\0" in line and not line.strip(" \0")
        if not is_emptied:
            left.append(line.replace("\0", "").rstrip())
    return "\n".join(left)


def host_left_out(argv: Sequence[str]) -> list[str]:
    """A command line with `--offload host` as `--offload`: there is no other place."""
    shorter: list[str] = []
    for argument in argv:
        if argument == "host" and shorter and shorter[-1] == "--offload":
            continue
        shorter.append(argument)
    return shorter


def _wrapped(doc: str) -> str:
    """Prose in lines of a terminal's width; drawings as they are. To tyro, a line that begins with a space is one."""
    blocks = []
    for block in doc.strip().split("\n\n"):
        lines = block.splitlines()
        if any(line.startswith(" ") for line in lines):
            drawing = block.strip("\n")
            blocks.append(textwrap.indent(drawing, " "))
        else:
            blocks.append(
                textwrap.fill(
                    block,
                    WIDTH,
                    initial_indent=" ",
                    subsequent_indent=" ",
                )
            )
    return "\n\n".join(blocks)


def for_a_few_steps(config: Config) -> Config:
    """The config of a program in a dry run.

    Raises:
        ConfigError: for --break: a mistake on purpose would not show.
    """
    flags = flags_of(config)
    if flags.get("break_") is not None:
        raise ConfigError("--break in a dry run: no loss is computed that could differ; leave --break out")
    steps = STEPS
    # A program without this flag may use DDP too.
    if flags.get("parallel", "ddp") == "ddp":
        steps = MORE_STEPS
    changes = {}
    for name, value in {"max_iters": steps, **WITHOUT}.items():
        # A program has only some of these flags.
        if name in flags:
            changes[name] = value
    return replace_flags(config, **changes)


def with_flags(error: UserError) -> str:
    """The message of an error, with flags for its fields and the user's own command line for its `ranks`.

    ``microbatches 3: …`` becomes ``--microbatches 3: …``; ``start 8 ranks`` becomes a line that starts them.
    """

    def flag_of(name: str) -> str:
        return f"--{FLAGS.get(name, name)}"

    text = error.with_fields(flag_of)
    if error.ranks is not None:
        program = shlex.join(command_line())
        if whoami().source == DRY_RUN:
            line = f"try that many, `mmm dry-run {error.ranks} -- {program}`"
        else:
            line = f"start that many, `launch -n {error.ranks} --device cpu {program}`"
        advice = f"start {counted(error.ranks, 'rank')}"
        text = text.replace(advice, line)
    # Somebody who has not typed a flag has to know where it is from.
    file = config_file.facts.get("config_file")
    if file is not None:
        typed = given_on(sys.argv)
        from_file = []
        for name in file["flags"]:
            flag = f"--{name}"
            if name not in typed and f"{flag} " in text:
                from_file.append(flag)
        if from_file:
            text += f" ({', '.join(from_file)}: from {file['path']})"
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
