"""Errors in the words of the command line: the rooms below name fields of a configuration, the user gave flags."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NoReturn

from mmm.errors import UserError
from mmm.runtime import failure
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
from mmm.trainer.config.layout import FLAGS


def with_flags(error: UserError) -> str:
    """The message of an error, its fields written as flags, ``microbatches 3: …`` as ``--microbatches 3: …``, and its
    `ranks` as the user's own line."""
    text = error.with_fields(lambda name: f"--{FLAGS.get(name, name)}")
    if error.ranks is not None:
        dry = whoami().source == DRY_RUN
        start = f"mmm dry-run {error.ranks} --" if dry else f"launch -n {error.ranks} --device cpu"
        line = f"{'try' if dry else 'start'} that many, `{start} {shlex.join(command_line())}`"
        text = text.replace(f"start {error.ranks} ranks", line)
    return text


def run_main(fn: Callable[[], object]) -> NoReturn:
    """`mmm.runtime.failure.run_main`, for a program whose flags are made by `mmm.trainer.config.command_line.parse`."""

    def main() -> None:
        try:
            fn()
        except UserError as error:
            error.args = (with_flags(error), *error.args[1:])
            error.ranks = None
            raise

    failure.run_main(main)
