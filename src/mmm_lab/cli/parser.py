"""What a subcommand's command line is read by."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mmm.errors import ConfigError
from mmm_launch.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse's parser, for all subcommands.

    A wrong flag is one message, like every other error of a user's, without the usage in front of it, and with the flag
    that may have been meant. Description and epilog keep their lines.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's. Raises ConfigError: words that no flag takes."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            hints = [did_you_mean(word.partition("=")[0], flags) for word in unknown if word.startswith("--")]
            hint = next(filter(None, hints), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'.' if hint else ''}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
