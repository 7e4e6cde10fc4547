"""Reads a subcommand's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mmm.errors import ConfigError
from mmm.outside import expanded
from mmm_launch.errors import did_you_mean
from mmm_launch.spec.options import Once

STANDARD_OUTPUT = Path("-")  # what ``--json`` without FILE writes to
MOST = 10**7  # that there may be of anything that is counted


def path(text: str) -> Path:
    """A path, with ~ and variables replaced. argparse shows the text of this kind of error alone."""
    try:
        return expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{value}: it must be from 1 to {MOST:,}")
    return value


class Parser(argparse.ArgumentParser):
    """argparse's parser, for all subcommands.

    A wrong flag is one message, like every other error of a user's, without the usage in front of it, and with the flag
    that may have been meant. The description and the epilog keep their lines.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("action", None, Once)
        self.register("type", Path, path)

    def add_json(self, content: str) -> None:
        """Add ``--json [FILE]``, which `written.write_json` writes. Without FILE it is `STANDARD_OUTPUT`."""
        self.add_argument(
            "--json",
            metavar="FILE",
            type=Path,
            nargs="?",
            const=STANDARD_OUTPUT,
            help=f"write {content} to FILE as JSON; without FILE, print it and nothing else",
        )

    def error(self, message: str) -> NoReturn:
        # Only the first word: later ones are often the values of a mistyped flag.
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        hint = ""
        if unknown.startswith("--"):
            hint = did_you_mean(unknown, self._option_string_actions)
        raise ConfigError(f"{message}.{hint}" if hint else message)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``[FLAGS] -- COMMAND`` into the subcommand's own words, and those of the command to run."""
    if "--" not in argv:
        return list(argv), []
    # Only the first one: a later one is a word of the command's.
    place = argv.index("--")
    return list(argv[:place]), list(argv[place + 1 :])
