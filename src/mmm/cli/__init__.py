"""The ``mmm`` command: one small file a subcommand. Imports no torch until a subcommand needs it."""

import sys


def show(text: str) -> None:
    """Print `text` without a line break at its end; what the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="")
