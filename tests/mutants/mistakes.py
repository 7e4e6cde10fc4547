"""The list of mistakes: a table a room, ``<room>.toml``."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = Path("src") / "mmm", Path("tests")


class Mistake(NamedTuple):
    """One to plant.

    Attributes:
        room: of the table that it stands in.
        file: below src/mmm. before: the text there, which it has once. after: what takes its place.
        tests: below tests/, files or file::test, that ought to see it. seen: what a user would see.
        long: the tests are of `make test-long`.
    """

    room: str
    name: str
    file: str
    before: str
    after: str
    tests: str
    seen: str
    long: bool = False

    @property
    def paths(self) -> list[str]:
        """The tests, for pytest."""
        return [str(TESTS / test) for test in self.tests.split()]

    def planted(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError: the text to replace is not there once."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.file} has the text to replace {count} times, not once")
        return text.replace(self.before, self.after)


def all_mistakes() -> list[Mistake]:
    tables = sorted(Path(__file__).parent.glob("*.toml"))
    return [
        Mistake(path.stem, **fields) for path in tables for fields in tomllib.loads(path.read_text("utf-8"))["mistake"]
    ]


def choose(only: Sequence[str], minutes: float | None) -> list[Mistake]:
    """The mistakes to plant, where there is little time by chance. Raises SystemExit for a name that there is not."""
    chosen = all_mistakes()
    if unknown := set(only) - {mistake.name for mistake in chosen}:
        raise SystemExit(f"no mistake has the name {min(unknown)}")
    chosen = [mistake for mistake in chosen if not only or mistake.name in only]
    return chosen if minutes is None else random.sample(chosen, len(chosen))
