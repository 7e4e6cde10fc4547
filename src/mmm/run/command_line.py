"""From a command line to a program's ``Config`` (`mmm.run.options`), and back for errors: the rooms below name fields
of a configuration, while the user gave flags.

As a rank of ``mmm dry-run`` a program makes a few steps, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from mmm.errors import ConfigError, UserError
from mmm.run import config_file
from mmm.run.flags import Flag, flags, path_of, read
from mmm.run.options import FLAGS, flags_of, groups_of, replace_flags
from mmm.runtime import failure
from mmm.runtime.failure import print_once
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
from mmm.units import counted

Config = TypeVar("Config")
HELP = {"-h", "--help"}
# Width of prose in --help.
WIDTH = 79
CONFIG = "config"
CONFIG_FLAG = Flag([CONFIG], "FILE", path_of)
ABOUT_CONFIG = (
    "Defaults from a file: YAML or JSON, such as `lr: 0.001`; or a run's folder, to use its flags again. They "
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


def check(config: Any) -> None:
    """Call the method `check` of every group that has one, then that of the config, for the rules that span groups.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    itself, *groups = groups_of(config).values()
    for group in (*groups, itself):
        if hasattr(group, "check"):
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
    program, those of a preset (the config's method `defaults`), the file, the command line.

    Args:
        config: the program's class of flags.
        doc: description of the program, for ``--help``.
        line: the command line. None: the process's own.

    Raises:
        ConfigError: as `check`; a flag that there is not, or that does not take what it is given; or a file cannot be
            used.
    """
    arguments = sys.argv[1:] if line is None else line
    without_help = [word for word in arguments if word not in HELP]
    made: Any = config()
    known = flags(made)
    values = read(flags_on(without_help), {**known, CONFIG: CONFIG_FLAG}, "--")
    config_file.facts["config_file"] = None
    if CONFIG in values:
        values = {**config_file.use(values.pop(CONFIG), known), **values}
    if hasattr(made, "defaults"):
        values = {**made.defaults(values), **values}
    made = replace_flags(made, **values)
    if len(without_help) < len(arguments):
        with print_once():
            print(help_text(made, doc))
            sys.exit(0)
    check(made)
    if whoami().source == DRY_RUN:
        made = for_a_few_steps(made)
    return made


def flags_on(line: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The name of each flag of a command line, and the arguments behind it. Raises ConfigError: no flag comes first."""
    pairs: list[tuple[str, list[str]]] = []
    for word in line:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            pairs.append((name.removeprefix("--"), [value] if equals else []))
        elif pairs:
            _, arguments = pairs[-1]
            arguments.append(word)
        else:
            raise ConfigError(f"{word}: it is no flag; --help lists them")
    return pairs


def help_text(config: Any, doc: str | None) -> str:
    """The text of ``--help``.

    Args:
        config: the values that are shown as defaults.
        doc: description of the program.
    """
    known = flags(config)
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    for title, group in groups_of(config).items():
        section: Any = parser
        if title:
            section = parser.add_argument_group(f"{title} options", inspect.getdoc(group))
        texts = texts_of(type(group))
        for name, value in vars(group).items():
            # A group may have the name of a flag in it.
            if name not in known or name in getattr(config, "UNLISTED", ()) or is_dataclass(value):
                continue
            text = texts.get(name, "").replace("%", "%%")
            if value not in (None, ()):
                text += f" (default: {value})"
            names = [f"--{word}" for word in known[name].names]
            kind = {"action": "store_true"} if isinstance(value, bool) else {"metavar": known[name].takes}
            section.add_argument(*names, **kind, help=text)
    parser.add_argument("--config", metavar=CONFIG_FLAG.takes, help=ABOUT_CONFIG)
    program = command_line()
    # Without the flags.
    program = program[: len(program) - len(sys.argv[1:])]
    blocks = [f"usage: {shlex.join(program)} [OPTIONS]"]
    # Prose is wrapped, drawings stay as they are. A terminal needs no marks of reStructuredText.
    plain = (doc or "").strip("\n").replace("::\n", ":\n").replace("``", "`")
    for block in plain.split("\n\n"):
        is_drawing = "\n " in f"\n{block}"
        blocks.append(block if is_drawing else textwrap.fill(block, WIDTH))
    return "\n\n".join([*blocks, parser.format_help()])


def texts_of(group: type) -> dict[str, str]:
    """What the source of a dataclass says of each field, in the text below it."""
    texts = {}
    for base in reversed(group.__mro__[:-1]):
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        for field, below in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = ast.literal_eval(below.value)
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
    changes = {"max_iters": steps, **WITHOUT}
    # Without --max_iters, --epochs is a script's own: a number that it multiplies.
    if "max_iters" not in flags:
        del changes["epochs"]
    # A program has only some of these flags.
    changes = {name: value for name, value in changes.items() if name in flags}
    return replace_flags(config, **changes)


def with_flags(error: UserError) -> str:
    """The message of an error, with flags for its fields and the user's own command line for its `ranks`.

    ``microbatches 3: …`` becomes ``--microbatches 3: …``; ``start 8 ranks`` becomes a line that starts them.
    """

    text = error.with_fields(lambda name: f"--{FLAGS.get(name, name)}")
    if error.ranks is not None:
        program = shlex.join(command_line())
        if whoami().source == DRY_RUN:
            line = f"try that many, `mmm dry-run {error.ranks} -- {program}`"
        else:
            line = f"start that many, `launch -n {error.ranks} --device cpu {program}`"
        advice = f"start {counted(error.ranks, 'rank')}"
        text = text.replace(advice, line)
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
