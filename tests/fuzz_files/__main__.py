"""Change files of every kind that mmm reads, have it read them, and look at what comes of it.

    make fuzz-files                                five minutes
    make fuzz-files MINUTES=20 SEED=7
    PYTHONPATH=tests python -m fuzz_files --case safetensors:713   one case again, with all that is known of it

Exit code 1 if a reader ended by anything but its own word for a bad file (`mmm.errors.UserError`), took more than 10 s
or 1 GB, started a program, or wrote outside of the files' folder.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

from fuzz_files import data, records, weights
from fuzz_files.child import FAULTS, Child, Outcome, outcome_of
from fuzz_files.kinds import Kind
from fuzz_files.mutate import mutate

# Every kind of file that mmm reads.
KINDS = (*weights.KINDS, *data.KINDS, *records.KINDS)
# Cases under way: one that hangs does not keep the others waiting.
AT_ONCE = 4
# What is counted for each kind of file.
COLUMNS = ("cases", "refused", "read", *FAULTS)


class Fuzzer:
    """Runs cases, and keeps what came of them.

    Args:
        scratch: a folder of its own. kinds: each is made once, and read as it is: what does not work unchanged is no
            kind.
    """

    def __init__(self, scratch: Path, kinds: tuple[Kind, ...]) -> None:
        self.scratch = scratch
        self.kinds = {kind.name: kind for kind in kinds}
        self.counts: dict[str, Counter[str]] = {kind.name: Counter() for kind in kinds}
        self.faults: dict[tuple[str, str], list[tuple[str, str, Outcome]]] = {}
        self.under_way: list[tuple[Child, str, str]] = []
        shutil.rmtree(scratch, ignore_errors=True)
        for kind in kinds:
            made = scratch / "valid" / kind.name
            made.mkdir(parents=True)
            kind.make(made)
            self._check(kind)

    def _check(self, kind: Kind) -> None:
        """Read the valid files in this process, which imports what that needs. Raises RuntimeError: refused."""
        folder = self._folder(kind, "warm")
        if kind.seal is not None:
            kind.seal(folder / "case")
        before = Path.cwd()
        streams = [os.dup(1), os.dup(2)]
        with open(folder / "printed", "w") as printed:
            try:
                os.chdir(folder / "case")
                for fd in (1, 2):
                    os.dup2(printed.fileno(), fd)
                outcome = outcome_of(kind, folder / "case")
                sys.stdout.flush()
            finally:
                for fd, old in enumerate(streams, start=1):
                    os.dup2(old, fd)
                    os.close(old)
                os.chdir(before)
        if outcome.kind != "read":
            raise RuntimeError(f"{kind.name}: valid files are {outcome.kind}: {outcome.about}\n{outcome.text}")
        shutil.rmtree(folder)

    def _folder(self, kind: Kind, name: str) -> Path:
        """A folder with the valid files in ``case``, and one outside of that for links to point to."""
        folder = self.scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "outside").mkdir(parents=True)
        (folder / "outside" / "kept").write_text("kept")
        shutil.copytree(self.scratch / "valid" / kind.name, folder / "case", symlinks=True)
        return folder

    def start(self, name: str, seed: int) -> str:
        """Begin a case; what was changed in it."""
        kind = self.kinds[name]
        key = f"{name}:{seed}"
        folder = self._folder(kind, f"{name}-{seed}")
        change = mutate(kind, folder / "case", Random(key))
        if kind.seal is not None:
            kind.seal(folder / "case")
        self.under_way.append((Child(kind, folder), key, change))
        return change

    def finish(self, most: int) -> None:
        """Wait until no more than so many cases are under way."""
        while True:
            for entry in list(self.under_way):
                child, key, change = entry
                if (outcome := child.poll()) is not None:
                    self.under_way.remove(entry)
                    self._take(child, key, change, outcome)
            if len(self.under_way) <= most:
                return
            time.sleep(0.002)

    def _take(self, child: Child, key: str, change: str, outcome: Outcome) -> None:
        """Count a case, and say a fault at the first of its kind."""
        shutil.rmtree(child.folder, ignore_errors=True)
        self.counts[child.kind.name].update(("cases", outcome.kind))
        if outcome.fault:
            known = self.faults.setdefault((outcome.kind, outcome.where), [])
            known.append((key, change, outcome))
            if len(known) == 1:
                place = f"{outcome.kind:10} {outcome.where}"
                say(f"{place}\n    --case {key}   {change[:200]}\n    {one_line(outcome.about)}")

    def stop(self) -> None:
        """End what is under way."""
        for child, *_ in self.under_way:
            child.end()
        self.under_way.clear()

    def summary(self, seconds: float) -> None:
        total = sum(self.counts.values(), Counter[str]())
        wide = max(map(len, self.counts))
        shown = [name for name in COLUMNS if total[name] or name not in FAULTS]
        say(f"\n{'':{wide}}" + "".join(f"{name:>11}" for name in shown))
        for name, count in [*self.counts.items(), ("all", total)]:
            say(f"{name:{wide}}" + "".join(f"{count[column] or '·':>11}" for column in shown))
        say(f"\n{total['cases']} cases in {seconds:.0f} s")
        if self.faults:
            say(f"\n{len(self.faults)} faults (times, fault, place, one of them):")
        for (fault, where), cases in sorted(self.faults.items(), key=lambda item: -len(item[1])):
            kinds = ", ".join(sorted({key.partition(":")[0] for key, *_ in cases}))
            say(f"{len(cases):5} {fault:10} {where}  ({kinds})")
            key, _, outcome = cases[0]
            say(f"      --case {key}  {one_line(outcome.about)}")


def one_line(text: str) -> str:
    return repr(text.strip().replace("\n", " ")[:220])


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: list[str] | None = None, kinds: tuple[Kind, ...] = KINDS) -> int:
    parser = argparse.ArgumentParser("fuzz_files", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, help="end after this many")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="default: another each time")
    parser.add_argument("--case", metavar="KIND:SEED", help="this one alone")
    parser.add_argument("--kinds", metavar="A,B", help=f"these alone, of {', '.join(kind.name for kind in kinds)}")
    scratch = Path(tempfile.gettempdir()) / f"mmm-fuzz-files-{os.getuid()}-{os.getpid()}"
    parser.add_argument("--scratch", type=Path, default=scratch, help="folder for the files; it is emptied")
    options = parser.parse_args(argv)
    name, _, index = (options.case or "").partition(":")
    wanted = [name] if name else options.kinds.split(",") if options.kinds else [kind.name for kind in kinds]
    if unknown := set(wanted) - {kind.name for kind in kinds}:
        parser.error(f"no kind is called {', '.join(unknown)}")
    # Cases are forked from here: no threads of OpenMP or of tokenizers.
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    scratch = options.scratch.resolve()
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"):
        # Nothing of the user's own is read.
        os.environ[variable] = str(scratch / "home")
    try:
        fuzzer = Fuzzer(scratch, tuple(kind for kind in kinds if kind.name in wanted))
        # Pages that a collection in each case would copy.
        gc.freeze()
        if name:
            return one(fuzzer, name, int(index))
        return many(fuzzer, options.minutes, options.cases, options.seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def one(fuzzer: Fuzzer, name: str, seed: int) -> int:
    """One case again, with its traceback. Returns the exit code."""
    say(f"{name}:{seed}: {fuzzer.start(name, seed)}")
    child = fuzzer.under_way[0][0]
    while (outcome := child.poll()) is None:
        time.sleep(0.01)
    say(f"{outcome.kind}: {outcome.about!r}\n{outcome.where}\n{outcome.text}")
    say(f"{outcome.seconds:.1f} s, {outcome.memory:,} bytes")
    return int(outcome.fault)


def many(fuzzer: Fuzzer, minutes: float, cases: int | None, seed: int) -> int:
    """New cases until the time is over. Returns the exit code."""
    say(f"SEED={seed}")
    began = time.monotonic()
    done = 0
    names = list(fuzzer.kinds)
    try:
        while time.monotonic() < began + 60 * minutes and (cases is None or done < cases):
            # The kinds in turn, and with each round another seed.
            fuzzer.start(names[done % len(names)], seed + done // len(names))
            fuzzer.finish(AT_ONCE - 1)
            done += 1
        fuzzer.finish(0)
    except KeyboardInterrupt:
        say("\nstopped")
    finally:
        fuzzer.stop()
    fuzzer.summary(time.monotonic() - began)
    return int(bool(fuzzer.faults))


if __name__ == "__main__":
    sys.exit(main())
