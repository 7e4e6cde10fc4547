"""Draw runs of the trainers, and hold each against itself on one rank.

    make fuzz                               five minutes
    make fuzz MINUTES=20 SEED=7
    PYTHONPATH=tests python -m fuzz --case 7/113      one case again, with what its ranks said

Exit code 1 if anything crashed, differed from one rank, or was refused for a reason that is not true.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from fuzz import data
from fuzz.compare import Verdict, judge, kind_of, twin
from fuzz.draw import Case, draw
from fuzz.flags import arguments
from fuzz.run import Outcome, Plant, run_case


class Fuzzer:
    """Runs cases, and keeps what came of them. plant: as for `run_case`, on all runs of more than one rank."""

    def __init__(self, scratch: Path, plant: Plant | None = None) -> None:
        self.scratch, self.plant = scratch, plant
        self.data = data.make(scratch / "data")
        self.twins: dict[tuple[str, ...], Outcome] = {}
        self.counts: Counter[str] = Counter()
        self.refusals: dict[str, tuple[int, str, str]] = {}
        self.faults: dict[str, list[tuple[Case, Verdict]]] = {}
        self.seconds = 0.0

    def verdict(self, case: Case) -> tuple[Verdict, Outcome]:
        many = run_case(case, self.scratch, self.plant if case.ranks > 1 else None)
        return judge(case, many, self.alone), many

    def alone(self, one: Case) -> Outcome:
        """The outcome on one rank, worked out once."""
        key = (one.program, *arguments(one.program, one.flags))
        if key not in self.twins:
            # An outcome has all numbers of a run: only those of late are kept.
            if len(self.twins) > 200:
                self.twins.pop(next(iter(self.twins)))
            self.twins[key] = run_case(one, self.scratch)
        return self.twins[key]

    def take(self, case: Case) -> Verdict:
        """Run a case and say what came of it."""
        began = time.monotonic()
        verdict, many = self.verdict(case)
        took = time.monotonic() - began
        self.seconds += took
        self.counts[verdict.kind] += 1
        where = many.facts.get("layout", f"{case.ranks} ranks")
        where += " resumed" if case.before else ""
        about = verdict.about[:150]
        say(f"{case.key:>8} {case.program:8} {where:24} {verdict.kind:12} {took:5.1f} s  {about}")
        if verdict.kind == "refused":
            kind = kind_of(verdict.about)
            count, about, line = self.refusals.get(kind, (0, verdict.about, case.command()))
            self.refusals[kind] = (count + 1, about, line)
        if verdict.fault:
            known = self.faults.setdefault(verdict.signature, [])
            known.append((case, verdict))
            if len(known) == 1:
                self.explain(case, verdict, many)
        return verdict

    def explain(self, case: Case, verdict: Verdict, many: Outcome) -> None:
        """All that is known of a fault, and the commands that show it."""
        spoilt = f", spoilt: {', '.join(case.spoilt)}" if case.spoilt else ""
        say(f"\n=== {verdict.kind}: case {case.key}{spoilt}")
        say(verdict.about)
        say(many.details.strip())
        say(f"    {case.commands()}")
        say(f"    {twin(case, many.facts or None).command()}")
        say("===\n")

    def summary(self) -> None:
        cases = sum(self.counts.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        say(f"\n{cases} cases, {self.seconds / max(cases, 1):.1f} s each: {kinds}")
        if self.refusals:
            say(f"\n{len(self.refusals)} reasons to refuse (times, one of them, its command):")
        for count, about, line in sorted(self.refusals.values(), key=lambda entry: -entry[0]):
            say(f"{count:4} {about}\n       {line}")
        for cases_of_fault in self.faults.values():
            case, verdict = cases_of_fault[0]
            say(f"\n{len(cases_of_fault)} × {verdict.kind}: {verdict.about[:300]}")
            say(f"    cases {' '.join(case.key for case, _ in cases_of_fault[:12])}")
            say(f"    {case.commands()}")


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: list[str] | None = None, plant: Plant | None = None) -> int:
    parser = argparse.ArgumentParser("fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, help="end after this many")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="default: another each time")
    parser.add_argument("--case", help="SEED/NUMBER: this one alone")
    parser.add_argument("--program", help="one of the programs alone")
    scratch = Path(tempfile.gettempdir()) / f"mmm-fuzz-{os.getuid()}"
    parser.add_argument("--scratch", type=Path, default=scratch, help="folder for data and records")
    options = parser.parse_args(argv)
    # Ranks are forked from here: no OpenMP threads, nor pages that a collection in each rank would copy.
    torch.set_num_threads(1)
    gc.freeze()
    fuzzer = Fuzzer(options.scratch.resolve(), plant)
    if options.case:
        seed, _, index = options.case.partition("/")
        fuzzer.take(draw(int(seed), int(index), fuzzer.data))
        return int(bool(fuzzer.faults))
    say(f"SEED={options.seed}, records and data in {fuzzer.scratch}")
    deadline = time.monotonic() + 60 * options.minutes
    drawn = 0
    while time.monotonic() < deadline and (options.cases is None or drawn < options.cases):
        case = draw(options.seed, drawn, fuzzer.data)
        if options.program in (None, case.program):
            fuzzer.take(case)
        drawn += 1
    fuzzer.summary()
    return int(bool(fuzzer.faults))


if __name__ == "__main__":
    sys.exit(main())
