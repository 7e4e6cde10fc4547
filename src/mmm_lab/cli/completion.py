"""``mmm --print-completion``: a script by which bash completes `mmm`, `launch`, and the programs that they start.

The words are those of each ``--help`` and, for the examples and trainers, of their flags. They are written into the
script, so that a press of Tab starts no Python.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from mmm.examples.__main__ import runnable_modules
from mmm.run.command_line import as_shown
from mmm.run.config_file import choices, flag_hints, other_names
from mmm.run.options import flags_of
from mmm_launch.machines import find

# A flag of a help text, and its choices in braces.
FLAG = re.compile(r"^ +(?:-\w[^,]*, )?(--[a-z][\w-]*)(?: \{([^}]*)\})?", re.MULTILINE)
SCRIPT = """\
# Completion for bash of mmm, launch and the programs behind `-m`. Made by: mmm --print-completion
_mmm_words() {
    case "$1" in
CASES
    esac
}

_mmm_complete() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    # bash has split --flag=value into three words.
    if [ "$current" = "=" ]; then
        current=""
    elif [ "$previous" = "=" ]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    # Whose flags are completed: those of the last program on the line before this word.
    local program=${COMP_WORDS[0]##*/} before="" index word words
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if [ "$before" = "-m" ]; then
            program=$word
        elif [ "$word" = "launch" ]; then
            program=launch
        elif [[ $word == python* || $word == *.py ]]; then
            program=""
        elif [[ $program == mmm && $word != -* ]]; then
            program="mmm $word"
        fi
        before=$word
    done
    if [ "$previous" = "-m" ]; then
        words=$(_mmm_words -m)
    else
        words=$(_mmm_words "$program $previous")
    fi
    if [[ -z $words && ( $current == -* || $program == mmm ) ]]; then
        words=$(_mmm_words "$program")
    fi
    # Nothing here: bash completes the name of a file.
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}

complete -o default -F _mmm_complete mmm launch
"""


def script(subcommands: Iterable[str], mmm: Callable[[list[str]], object]) -> str:
    """The script for bash.

    Args:
        subcommands: those of `mmm`.
        mmm: the command itself, which prints the help of a subcommand.
    """
    from mmm_launch.main import main as launch

    completions = {"mmm": [*subcommands, "--help", "--version", "--print-completion"]}
    for name in subcommands:
        completions |= _of_help(f"mmm {name}", help_of(mmm, [name, "--help"]))
    completions |= _of_help("launch", help_of(launch, ["--help"]))
    # Their texts of --help take a second each: the flags are read from their configs instead.
    modules = list(runnable_modules())
    completions["-m"] = modules
    for name in modules:
        config = getattr(importlib.import_module(name), "Config", None)
        if config is not None:
            completions |= _of_config(name, config)
    # A line of bash for each place: the words that may follow there.
    cases = []
    for place, values in completions.items():
        cases.append(f"        {shlex.quote(place)}) echo {shlex.quote(' '.join(values))} ;;")
    return SCRIPT.replace("CASES", "\n".join(cases))


def help_of(main: Callable[[list[str]], object], argv: list[str]) -> str:
    """The help text of a command, with each flag on one line."""
    out = io.StringIO()
    columns = os.environ.get("COLUMNS")
    # In a narrow terminal a flag and its choices would be on two lines.
    os.environ["COLUMNS"] = "1000"
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(argv)
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return out.getvalue()


def _of_help(command: str, text: str) -> dict[str, list[str]]:
    """The words behind a command, and behind each of its flags that has choices."""
    completions: dict[str, list[str]] = {command: []}
    for flag, values in FLAG.findall(text):
        completions[command].append(flag)
        if values:
            completions[f"{command} {flag}"] = values.split(",")
        elif flag == "--site":
            completions[f"{command} {flag}"] = sorted(find.load(os.environ))
    return completions


def _of_config(module: str, config: Any) -> dict[str, list[str]]:
    """The words behind a program, and behind each of its flags that has choices."""
    hints = flag_hints(as_shown(config))
    flags = ["--help"]
    completions = {module: flags}
    for field in flags_of(config()):
        # `break_` is --break.
        name = field.rstrip("_")
        hint = hints[field]
        names = [name, *other_names(hint)]
        values = choices(hint)
        flags += [f"--{flag}" for flag in names]
        if hint is bool:
            flags.append(f"--no_{name}")
        if values:
            for flag in names:
                completions[f"{module} --{flag}"] = values
    flags.append("--config")
    return completions
