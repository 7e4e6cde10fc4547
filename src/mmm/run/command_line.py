"""From a command line to a program's ``Config`` (`mmm.run.options`), and back for errors: the rooms below name fields
of a configuration, while the user gave flags.

As a rank of ``mmm dry-run`` a program makes a few steps, and leaves nothing behind.
"""

from __future__ import annotations

import ast
import inspect
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

from mmm.errors import ConfigError, UserError
from mmm.outside import expanded
from mmm.run import config_file
from mmm.run.flags import Flag, flags, read
from mmm.run.options import FLAGS, flags_of, groups_of, replace_flags
from mmm.runtime import failure
from mmm.runtime.failure import print_once
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
from mmm.units import counted

Config = TypeVar("Config")
HELP = {"-h", "--help"}
# Column of --help in which the text of a flag begins.
COLUMN = 27
# Width of prose in --help.
WIDTH = 79
CONFIG = "config"
CONFIG_FLAG = Flag([CONFIG], "FILE", "a file", expanded, 1, None, False)
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

    `defaults` takes the values of the flags that were given, by name; it returns those of others.
    """

    @classmethod
    def defaults(cls, flags: Mapping[str, Any]) -> dict[str, Any]: ...


def check(config: Any) -> None:
    """Call the check of every group, then that of the config, which has the rules that span groups.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    values = flags_of(config)
    for name, choices in getattr(config, "CHOICES", {}).items():
        if values[name] not in (None, *choices):
            raise ConfigError(f"--{name} {values[name]}: it is one of {', '.join(choices)}")
    itself, *groups = groups_of(config).values()
    for group in (*groups, itself):
        if isinstance(group, HasCheck):
            group.check()


def configure(config: type[Config], /, **flags: Any) -> Config:
    """A `config` with these flags, checked, as `parse` makes it from a command line. Raises ConfigError, as `check`."""
    made: Config = replace_flags(config(), **flags)
    check(made)
    return made


def parse(config: type[Config], doc: str | None = None, line: Sequence[str] | None = None) -> Config:
    """The command line as a `config`, checked. In a dry run it is the config of a few steps.

    ``--help`` prints, once for the run, and exits.

    Every program takes ``--config FILE`` (`mmm.run.config_file`). What counts, from the weakest: the defaults of the
    program, those of a preset, the file, the command line.

    Args:
        config: the program's class of flags.
        doc: description of the program, for ``--help``.
        line: the command line. None: the process's own.

    Raises:
        ConfigError: as `check`; a flag that there is not, or that does not take what it is given; or a file cannot be
            used.
    """
    # A field without a default has to be given.
    required = [field.name for field in fields(config) if field.default is field.default_factory]  # type: ignore[arg-type]
    made = config(**dict.fromkeys(required, MISSING))
    known = flags(made)
    if line is None:
        line = sys.argv[1:]
    argv = [argument for argument in line if argument not in HELP]
    values = read(arguments_on(argv), {CONFIG: CONFIG_FLAG, **known}, "--")
    in_file: Mapping[str, Any] = {}
    # A program may have a flag of its own with that name.
    if CONFIG not in known:
        config_file.facts["config_file"] = None
        if CONFIG in values:
            in_file = config_file.use(values.pop(CONFIG), known)
        config_file.counting = in_file.keys() - values.keys()
    changes = {**in_file, **values}
    if isinstance(made, WithDefaults):
        changes = {**made.defaults(changes), **changes}
    made = replace_flags(made, **changes)
    if len(argv) < len(line):
        with print_once():
            print(help_text(made, doc))
            sys.exit(0)
    for name, value in flags_of(made).items():
        if value is MISSING:
            raise ConfigError(f"--{name}: this program needs it")
    check(made)
    if whoami().source == DRY_RUN:
        return for_a_few_steps(made)
    return made


def arguments_on(argv: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The name of each flag of a command line, and the arguments behind it. Raises ConfigError: no flag comes first."""
    starts = [index for index, argument in enumerate(argv) if argument.startswith("--")]
    if argv and 0 not in starts:
        raise ConfigError(f"{argv[0]}: it is no flag; --help lists them")
    for start, end in pairwise([*starts, len(argv)]):
        name, equals, value = argv[start].removeprefix("--").partition("=")
        arguments = argv[start + 1 : end]
        if equals:
            arguments.insert(0, value)
        yield name, arguments


def help_text(config: Any, doc: str | None) -> str:
    """The text of ``--help``.

    Args:
        config: the values that are shown as defaults.
        doc: description of the program.
    """
    known = flags(config)
    width = shutil.get_terminal_size().columns
    program = command_line()
    # Without the flags.
    program = program[: len(program) - len(sys.argv[1:])]
    blocks = [f"usage: {shlex.join(program)} [-h] [OPTIONS]"]
    # Prose is wrapped, drawings stay as they are.
    for block in (doc or "").strip("\n").split("\n\n"):
        is_drawing = "\n " in f"\n{block}"
        blocks.append(block if is_drawing else textwrap.fill(block, min(width, WIDTH)))
    for title, group in groups_of(config).items():
        lines = [f"{title} options".strip(), "-" * width]
        texts = texts_of(type(group))
        if title:
            lines.append(textwrap.fill(inspect.getdoc(group) or "", width, initial_indent="  ", subsequent_indent="  "))
        else:
            lines.append(_entry("-h, --help", "Print this text, and leave.", width))
        for name, value in vars(group).items():
            is_listed = name in known and name not in getattr(config, "UNLISTED", ())
            # A group may have the name of a flag in it.
            if is_listed and not is_dataclass(value):
                flag = known[name]
                text = texts.get(name, "")
                values = value if isinstance(value, (list, tuple)) else [value]
                default = " ".join(map(str, values))
                if default and value not in (None, MISSING):
                    text = f"{text} (default: {default})"
                lines.append(_entry(flag.usage(), text, width))
        if group is config and CONFIG not in known:
            lines.append(_entry(CONFIG_FLAG.usage(), ABOUT_CONFIG, width))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _entry(usage: str, text: str, width: int) -> str:
    """The lines of a flag in ``--help``: how to give it, and from a column on what it does."""
    lines = textwrap.wrap(text, width - COLUMN)
    left = f"  {usage}".ljust(COLUMN)
    if len(left) > COLUMN:
        lines.insert(0, "")
    return left + f"\n{' ' * COLUMN}".join(lines)


def texts_of(group: type) -> dict[str, str]:
    """What the source says of each field of a dataclass: in the text below it, or in a comment behind it."""
    texts: dict[str, str] = {}
    for base in reversed(group.__mro__):
        if not is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        body: Any = ast.parse(source).body[0]
        for field, below in pairwise([*body.body, None]):
            if isinstance(field, ast.AnnAssign):
                _, _, text = lines[(field.end_lineno or 0) - 1].partition("  # ")
                if isinstance(below, ast.Expr):
                    text = ast.literal_eval(below.value)
                texts[ast.unparse(field.target)] = " ".join(text.split())
    return texts


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
    from_file = [f"--{name}" for name in config_file.counting if f"--{name} " in text]
    if from_file:
        text += f" ({', '.join(from_file)}: from {config_file.facts['config_file']['path']})"
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
