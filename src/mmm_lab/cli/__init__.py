"""The ``mmm`` command: one small file a subcommand. Imports no torch until a subcommand needs it."""

import sys
from collections.abc import Sequence

LARGE = 1e9  # from which on a number is shown with an exponent


def whole(number: float) -> str:
    """A count, such as a step, in full: 1234567."""
    return f"{number:.15g}"


def decimal(number: float, digits: int) -> str:
    """A number with so many digits after the point, or where that is too many in all, or none that counts, 3 digits."""
    plain = number == 0 or 10.0 ** (1 - digits) <= abs(number) < LARGE
    return f"{number:,.{digits}f}" if plain else f"{number:.3g}"


def told_apart(texts: Sequence[str], longest: int) -> list[str]:
    """Texts of one thing in at most so many characters: of long ones their end; uncut if two would look alike."""
    short = [text if len(text) <= longest else f"…{text[1 - longest :]}" for text in texts]
    return short if len(set(short)) == len(set(texts)) else list(texts)


def show(text: str) -> None:
    """Print `text` without a line break at its end; what the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
