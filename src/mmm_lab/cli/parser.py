"""Reads a subcommand's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mmm.errors import ConfigError
from mmm.outside import expanded
from mmm_launch.errors import did_you_mean

STANDARD_OUTPUT = Path("-")  # what ``--json`` without FILE writes to


class Once(argparse.Action):
    """Stores the value of a flag that may be given once: of two values, one would be lost."""

    is_given = False

    def __call__(self, parser: Any, args: Any, value: Any, flag: str | None = None) -> None:
        if self.is_given:
            raise ConfigError(f"{flag} is given twice: leave one out")
        self.is_given = True
        setattr(args, self.dest, value)


def path(text: str) -> Path:
    """A path, with ~ and variables replaced. argparse shows the text of this kind of error alone."""
    try:
        return expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse as argparse does. Raises ConfigError: there are words that no flag takes."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            message = f"unrecognized arguments: {' '.join(unknown)}"
            # Only the first hint: later words are often the values of a mistyped flag.
            for word in unknown:
                hint = did_you_mean(word.partition("=")[0], flags)
                if hint and word.startswith("--"):
                    self.error(f"{message}.{hint}")
            self.error(message)
        return parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``[FLAGS] -- COMMAND`` into the subcommand's own words, and those of the command to run."""
    if "--" not in argv:
        return list(argv), []
    # Only the first one: a later one is a word of the command's.
    place = argv.index("--")
    return list(argv[:place]), list(argv[place + 1 :])
