"""What a subcommand's command line is read by."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from mmm.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse's parser, for all subcommands.

    A wrong flag is one message, like every other error of a user's, without the usage in front of it. Description and
    epilog keep their lines.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
