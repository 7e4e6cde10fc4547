"""The ``mmm`` command: one small file a subcommand. Imports no torch until a subcommand needs it."""

import sys
from collections.abc import Sequence
from itertools import takewhile

CONTEXT = 8  # characters that are shown before the first that differs
LARGE = 1e9  # from which on a number is shown with an exponent


def whole(number: float) -> str:
    """A count, such as a step, in full: 1234567."""
    return f"{number:.15g}"


def decimal(number: float, digits: int) -> str:
    """A number with so many digits after the point, or where that is too many in all, or none that counts, 3 digits."""
    plain = number == 0 or 10.0 ** (1 - digits) <= abs(number) < LARGE
    return f"{number:,.{digits}f}" if plain else f"{number:.3g}"


def told_apart(texts: Sequence[str], longest: int) -> list[str]:
    """Texts of one thing in at most so many characters, long ones from where they begin to differ; uncut if two that
    differ would look alike."""
    values = [text for text in texts if len(text) > 1]  # a dash stands for none
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*values, strict=False))
    begin = max(sum(1 for _ in same) - CONTEXT, 0) if len(set(values)) > 1 else 0
    short = [text if len(text) <= longest else f"…{text[begin:]}" if begin else text for text in texts]
    short = [text if len(text) <= longest else f"{text[: longest - 1]}…" for text in short]
    return short if len(set(short)) == len(set(texts)) else list(texts)


def show(text: str) -> None:
    """Print `text` without a line break at its end; what the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
