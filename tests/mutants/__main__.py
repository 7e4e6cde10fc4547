"""Plants one mistake after another in a copy of this package, and runs the tests that ought to see it.

    make mutants                                    all of the tables of tests/mutants
    make mutants ONLY="ring-sees-the-future tie-untied"
    make mutants MINUTES=5                          some, by chance, as many as that takes

The tests are of `make test`, or where a mistake says so of `make test-long`. Without MINUTES they first have to
pass in the copy as it is. The exit code is 0 where each was caught, 1 where one was not, or could not be planted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from mutants.mistakes import TESTS, Mistake, choose
from mutants.planting import ROOT

# What a copy of the repository does not need.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", "outputs", "build", "dist")
# At the end of the copy's tests/conftest.py: what the tests import is the copy's.
PROOF = "\nimport mmm\n\nassert Path(mmm.__file__).parents[2] == Path(__file__).parents[1], mmm.__file__\n"
FLAGS = ("-q", "--tb=line", "-rfE", "-p", "no:cacheprovider", "--timeout=120")
LONG = ("-m", "long")
# S for the tests of one mistake.
LONGEST = 300.0
# A line of pytest's summary.
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", re.MULTILINE)


class Result(NamedTuple):
    """verdict: ``caught``, ``not caught``, or why neither is known. test: that failed first."""

    mistake: Mistake
    verdict: str
    test: str = ""
    seconds: float = 0.0


def copy_of_package(copy: Path) -> Path:
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
    with (copy / TESTS / "conftest.py").open("a") as file:
        file.write(PROOF)
    # By their hash: a file that is changed twice within a second is compiled twice.
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src", "tests"]
    subprocess.run(compiled, cwd=copy, check=True)
    return copy


def run_tests(copy: Path, paths: Iterable[str], *flags: str, longest: float = LONGEST) -> tuple[int | None, str]:
    """Pytest's exit code, None if it took too long, and what it has printed."""
    command = [sys.executable, "-m", "pytest", *paths, *FLAGS, *flags]
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(command, cwd=copy, env=env, start_new_session=True, **piped) as process:
        try:
            output, _ = process.communicate(timeout=longest)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
    return process.returncode, output


def plant(copy: Path, mistake: Mistake) -> Result:
    try:
        file, wrong = mistake.planted()
    except ValueError as error:
        return Result(mistake, str(error))
    path = copy / file.relative_to(ROOT)
    text = path.read_text("utf-8")
    path.write_text(wrong, "utf-8")
    began = time.monotonic()
    try:
        code, output = run_tests(copy, mistake.paths, "-x", "--numprocesses=0", *(LONG if mistake.long else ()))
    finally:
        path.write_text(text, "utf-8")
    seconds = time.monotonic() - began
    failed = FAILED.search(output)
    if code == 1 and failed:
        return Result(mistake, "caught", failed[1], seconds)
    if code == 0:
        return Result(mistake, "not caught", seconds=seconds)
    return Result(mistake, f"no verdict (exit code {code}):\n{output[-2000:]}", seconds=seconds)


def is_sound(copy: Path, chosen: Sequence[Mistake]) -> bool:
    """Whether the tests pass without a mistake; says what does not."""
    for flags in ((), LONG):
        some = [mistake for mistake in chosen if mistake.long == bool(flags)]
        paths = dict.fromkeys(path for mistake in some for path in mistake.paths)
        code, output = run_tests(copy, paths, *flags, longest=3600.0) if paths else (0, "")
        if code != 0:
            print(f"{output[-4000:]}\nthe tests do not pass without a mistake (exit code {code})")
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser("mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="NAME", help="plant these alone")
    parser.add_argument("--minutes", type=float, help="begin no other mistake after so many")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which mistakes are tried at the same time")
    args = parser.parse_args()
    chosen = choose(args.only, args.minutes)
    began = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mmm-mutants-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = SimpleQueue[Path]()
        for worker in range(args.jobs):
            copies.put(copy_of_package(Path(folder) / str(worker)))
        if args.minutes is None and not is_sound(Path(folder) / "0", chosen):
            return 1
        print(f"the copy was made and tried in {time.monotonic() - began:.0f} s", flush=True)

        def in_turn(mistake: Mistake) -> Result | None:
            if args.minutes is not None and time.monotonic() - began >= 60 * args.minutes:
                return None
            copy = copies.get()
            try:
                return plant(copy, mistake)
            finally:
                copies.put(copy)

        for result in filter(None, pool.map(in_turn, chosen)):
            results.append(result)
            print(f"{result.mistake.name:<32} {result.verdict:<10} {result.seconds:5.1f} s  {result.test}", flush=True)
    missed = [result for result in results if result.verdict != "caught"]
    caught = len(results) - len(missed)
    seconds = time.monotonic() - began
    print(f"\n{caught} of {len(results)} mistakes caught, in {seconds:.0f} s")
    for result in missed:
        print(f"{result.mistake.name}: {result.verdict}: {result.mistake.seen}")
    if len(results) < len(chosen):
        print(f"{len(chosen) - len(results)} were not tried")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
