"""Errors in the words of the command line: the rooms below name fields of a configuration, the user gave flags."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from typing import NoReturn

from mmm.errors import UserError
from mmm.runtime import failure
from mmm.runtime.ranks import command_line
from mmm.trainer.dry_run import DryRunAsked, answer

# Flags that are not called as the field is, of a layout, of its techniques, or of a model's sizes.
FLAGS = {
    "tp": "tpsize",
    "data_parallel": "parallel",
    "checkpointing": "activation_checkpointing",
}


def with_flags(error: UserError, dry: bool = False) -> str:
    """The message of an error, its `fields` written as flags, ``microbatches 3: …`` as ``--microbatches 3: …``, and its
    `ranks` as the user's own line.

    Args:
        dry: whether it is a dry run's.
    """
    text = str(error)
    for field in error.fields:
        text = re.sub(rf"(?<![\w-]){re.escape(field)}(?![\w-])", f"--{FLAGS.get(field, field)}", text)
    if error.ranks is not None:
        line = f"start that many, `launch -n {error.ranks} --device cpu {shlex.join(command_line())}`"
        line = f"give --dry_run {error.ranks}" if dry else line
        text = text.replace(f"start {error.ranks} ranks", line)
    return text


def run_main(fn: Callable[[], object]) -> NoReturn:
    """`mmm.runtime.failure.run_main`, for a program whose flags are made by `mmm.trainer.options.parse`."""

    def main() -> None:
        dry = False
        try:
            try:
                fn()
            except DryRunAsked as asked:
                dry = True
                sys.exit(answer(fn, asked.options))
        except UserError as error:
            error.args = (with_flags(error, dry), *error.args[1:])
            error.fields, error.ranks = (), None
            raise

    failure.run_main(main)
