"""The ``mmm`` command: one small file a subcommand. Imports no torch until a subcommand needs it."""

import sys

LARGE = 1e9  # from which on a number is shown with an exponent


def whole(number: float) -> str:
    """A count, such as a step, in full: 1234567."""
    return f"{number:.15g}"


def decimal(number: float, digits: int) -> str:
    """A number with so many digits after the point, or where that is too many in all, or none that counts, 3 digits."""
    plain = number == 0 or 10.0 ** (1 - digits) <= abs(number) < LARGE
    return f"{number:,.{digits}f}" if plain else f"{number:.3g}"


def show(text: str) -> None:
    """Print `text` without a line break at its end; what the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="")
