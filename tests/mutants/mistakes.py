"""The list of mistakes: a table a room, ``<room>.toml``."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mutants.planting import planted

if sys.version_info >= (3, 11):
    import tomllib
else:
    # Which pytest needs there.
    import tomli as tomllib

TESTS = Path("tests")


class Mistake(NamedTuple):
    """One to plant.

    Attributes:
        room: of the table that it stands in.
        function: where it is planted, by its qualified name; of a constant, its name.
        before: the code there, which the function has once.
        after: what takes its place.
        tests: below tests/, files or file::test, that ought to see it. seen: what a user would see.
        module: the end of the module's name, where several define the function.
        long: the tests are of `make test-long`.
    """

    room: str
    name: str
    function: str
    before: str
    after: str
    tests: str
    seen: str
    module: str = ""
    long: bool = False

    @property
    def paths(self) -> list[str]:
        """The tests, for pytest."""
        return [str(TESTS / test) for test in self.tests.split()]

    def planted(self) -> tuple[Path, str]:
        """The file that it is in, and its text with the mistake. Raises ValueError: the code is not there once."""
        try:
            return planted(self.function, self.before, self.after, self.module)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error


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
    if minutes is None:
        return chosen
    return random.sample(chosen, len(chosen))
