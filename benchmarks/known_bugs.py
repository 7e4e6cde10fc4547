"""Verifies the right and the wrong program of each public bug in tests/mmm_verify/known_bugs, and writes a table.

    python3 benchmarks/known_bugs.py                                   # all kinds, in float64 and float32: minutes
    python3 benchmarks/known_bugs.py --only router tied                # some of them, with the whole verdicts
    python3 benchmarks/known_bugs.py --table docs/known-bugs.md

The exit code is 1 if a right program is accused, or a wrong one is not caught or not named as its file says.
"""

from __future__ import annotations

import argparse
import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from mmm_verify.verdict import Verdict  # noqa: E402
from support.known_bugs import KnownBug, first_named, known_bugs  # noqa: E402

BEGIN = "<!-- known bugs: python3 benchmarks/known_bugs.py --table docs/known-bugs.md -->"
END = "<!-- end -->"


DTYPES = ("float64", "float32")


@dataclass
class Row:
    """What was seen of one kind.

    Attributes:
        name: the file's name.
        bug: the two programs.
        right: by type, the verdict on the right program.
        wrong: by type, the verdict on the wrong one.
        seconds: by type, CPU seconds of both verdicts, all processes together.
    """

    name: str
    bug: KnownBug
    right: dict[str, Verdict]
    wrong: dict[str, Verdict]
    seconds: dict[str, float]

    def caught(self, dtype: str) -> bool:
        return self.wrong[dtype].result == self.bug.result

    def named(self, dtype: str) -> bool:
        """Whether the verdict names first what the file says, and says of it what the file says."""
        wrong = self.wrong[dtype]
        relation = "\n".join(map(str, wrong.findings)) or wrong.reason
        return self.bug.first in first_named(wrong) and bool(re.search(self.bug.says, relation))

    @property
    def as_expected(self) -> bool:
        return all(self.right[dtype].same and self.caught(dtype) and self.named(dtype) for dtype in DTYPES)


def cpu_seconds() -> float:
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used


def run(name: str, bug: KnownBug) -> Row:
    row = Row(name, bug, {}, {}, {})
    for dtype in DTYPES:
        begin = cpu_seconds()
        row.right[dtype] = bug.verify(bug.right, dtype=dtype)
        row.wrong[dtype] = bug.verify(bug.wrong, dtype=dtype)
        row.seconds[dtype] = cpu_seconds() - begin
    return row


def columns(row: Row) -> list[str]:
    """The cells of a row: kind, reports, mesh, what is named first, what is said of it, seconds."""
    links = []
    for report in row.bug.reports:
        repository, _, issue = report.partition("#")
        links.append(f"[{report}](https://github.com/{repository}/issues/{issue})")
    # Both types name the same: float64 shows more digits.
    wrong = row.wrong["float64"]
    if wrong.findings:
        remark = wrong.findings[0].relation
        first = first_named(wrong).removesuffix(" (first in backward order)")
    else:
        remark = wrong.reason.partition(":")[0]
        first = wrong.result
    kind = row.bug.title
    if not row.bug.is_origin:
        kind += " *"
    seconds = ", ".join(f"{row.seconds[dtype]:.1f}" for dtype in DTYPES)
    return [kind, ", ".join(links), row.bug.mesh, first, remark, seconds]


def table(rows: list[Row]) -> str:
    lines = [
        "| what goes wrong | reports | mesh | the verdict names first | and says | CPU s in float64, float32 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    # By mesh: data parallel, tensor parallel, … in one block each.
    for row in sorted(rows, key=lambda row: row.bug.mesh):
        cells = [cell.replace("|", "\\|") for cell in columns(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    sentences = []
    for dtype in DTYPES:
        caught = sum(row.caught(dtype) for row in rows)
        named = sum(row.named(dtype) and row.bug.is_origin for row in rows)
        accused = sum(not row.right[dtype].same for row in rows)
        sentences.append(
            f"In {dtype}, {caught} of {len(rows)} wrong programs are caught, and {named} are named by the tensor or "
            f"module where the mistake is; {accused} of {len(rows)} right programs are accused."
        )
    return "\n".join(sentences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kinds with one of these words in their file's name")
    parser.add_argument("--table", type=Path, help="write the table into this page, between its markers")
    args = parser.parse_args()
    rows = []
    for name, bug in known_bugs().items():
        if args.only and not any(word in name for word in args.only):
            continue
        row = run(name, bug)
        rows.append(row)
        state = "ok" if row.as_expected else "NOT AS EXPECTED"
        print(f"{name}: {state}: {first_named(row.wrong['float64'])}", flush=True)
        if args.only or not row.as_expected:
            for dtype in DTYPES:
                print(row.right[dtype], row.wrong[dtype], sep="\n")
    print(summary(rows))
    if args.table:
        made = f"Made with PyTorch {torch.__version__}, Python {platform.python_version()}."
        inner = "\n".join([BEGIN, "", summary(rows), "", table(rows), "", made, END])
        page = args.table.read_text(encoding="utf-8")
        written = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: inner, page, flags=re.DOTALL)
        args.table.write_text(written, encoding="utf-8")
    return 0 if all(row.as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
