"""What a subcommand's command line is read by."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mmm.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors are one message as every other of a user's, and no usage in front."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
