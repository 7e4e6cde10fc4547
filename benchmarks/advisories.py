"""Are the advisories of `mmm-verify audit` so? The program of each, and its control, with versions that it names.

    python3 benchmarks/advisories.py --only deepspeed-7837      # some minutes; the first time it installs the versions
    python3 benchmarks/advisories.py --page docs/advisories.md  # no run: the page's table from all results

Each version is installed by pip into a folder of its own, a PyTorch as a virtual environment, other packages for this
Python's PyTorch. An advisory stands if its program is "not the same" with the wrong versions and "same" with the right
ones, and its control is "same" with the nearest of both. Results are kept in benchmarks/advisories/results.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PROGRAMS = Path(__file__).parent / "advisories"
SOURCE = Path(__file__).parent.parent / "src"
RESULTS = PROGRAMS / "results.csv"
CACHE = Path(os.environ.get("MMM_ADVISORIES", Path.home() / ".cache/mmm/advisories"))
BEGIN = "<!-- advisories: python3 benchmarks/advisories.py --page docs/advisories.md -->"
END = "<!-- end -->"
FIELDS = ("id", "package", "version", "torch", "what", "verdict", "first")
# Packages that are built here, without their operators.
BUILD = {"DS_BUILD_OPS": "0"}
# mmm-verify without torchvision: a build of it that does not fit the PyTorch ends what imports it.
START = """
import json, sys
sys.modules["torchvision"] = None
from mmm_verify.command import main
for line in json.loads(sys.argv[1]):
    main(line)
"""

sys.path.insert(0, str(SOURCE))
from mmm_verify.audit import advisories, parse  # noqa: E402


def environment(entry: dict[str, Any], version: str) -> tuple[str, list[str]]:
    """Install a version of an entry's package. Returns the Python, and the folders in front of its packages."""
    package = entry["package"]
    folder = CACHE / f"{package}-{version}"
    if package == "torch":
        python = str(folder / "bin/python")
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={version}", "numpy"], check=True)
        return python, []
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    if not folder.exists():
        subprocess.run([*install, folder, f"{package}=={version}"], check=True, env=os.environ | BUILD)
    requirements = bounded(entry["needs"], folder)
    # Versions with the same bounds share a folder.
    needs = CACHE / f"needs-{zlib.crc32(repr(requirements).encode()):08x}"
    if requirements and not needs.exists():
        subprocess.run([*install, needs, *requirements], check=True)
    return sys.executable, [str(folder), str(needs)]


def bounded(needs: list[str], folder: Path) -> list[str]:
    """What an entry needs, in the versions that the package in the folder asks for."""
    bounds = dict.fromkeys(needs, "")
    for package in metadata.distributions(path=[str(folder)]):
        for text in package.requires or []:
            requirement = Requirement(text)
            if requirement.name in bounds and not requirement.marker:
                bounds[requirement.name] = str(requirement.specifier)
    return [name + bound for name, bound in bounds.items()]


def run(version: str, cases: list[tuple[dict[str, Any], str]]) -> Iterator[dict[str, str]]:
    """Run programs and controls of entries with a version of their package, in one process, which imports it once."""
    python, folders = environment(cases[0][0], version)
    with tempfile.TemporaryDirectory() as folder:
        # No torchvision, for those that read only which version is installed.
        hidden = Path(folder, "torchvision-0.dist-info")
        hidden.mkdir()
        (hidden / "METADATA").write_text("Name: torchvision\nVersion: none\n")
        search = os.pathsep.join([folder, *folders, str(SOURCE)])
        variables = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        files = [Path(folder, f"{index}.json") for index in range(len(cases))]
        lines = []
        for (entry, role), file in zip(cases, files, strict=True):
            lines.append([*shlex.split(entry[role]), "--timeout", "400", "--json", str(file)])
        command = [python, "-c", START, json.dumps(lines)]
        process = subprocess.run(command, env=variables, cwd=PROGRAMS, capture_output=True, text=True)
        for (entry, role), file in zip(cases, files, strict=True):
            if file.exists():
                yield row_of(entry, version, role, json.loads(file.read_text()))
            else:
                output = f"{process.stdout[-900:]}{process.stderr[-900:]}"
                print(f"{entry['id']}, {role} with {version}: no verdict: {output}", file=sys.stderr)


def row_of(entry: dict[str, Any], version: str, role: str, certificate: dict[str, Any]) -> dict[str, str]:
    """A row of results.csv, from what ``--json`` has written."""
    (verdict,) = certificate["verdicts"]
    findings = verdict["findings"]
    first = f"{findings[0]['name']} {findings[0]['relation']}" if findings else verdict["reason"]
    # A program that fell back to another PyTorch would prove nothing.
    torch = certificate["versions"]["torch"]
    if entry["package"] == "torch" and parse(torch) != parse(version):
        sys.exit(f"{entry['id']}: it ran with torch {torch}, and {version} was to be tested")
    values = (entry["id"], entry["package"], version, torch, role, verdict["result"], first)
    return dict(zip(FIELDS, values, strict=True))


def versions_of(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """What is run: (version, "program" or "control"). The control at the last wrong version and the first right one."""
    runs = [(version, "program") for version in [*entry["wrong"], *entry["right"]]]
    ends = (max(entry["wrong"], key=parse), min(entry["right"], key=parse))
    return [*runs, *((version, "control") for version in ends)]


def problems(entry: dict[str, Any], rows: dict[tuple[str, str, str], dict[str, str]]) -> list[str]:
    """Why an entry does not stand: what was not run, or not seen as it says. Empty if it stands."""
    wrong = []
    for version, role in versions_of(entry):
        expected = "not the same" if role == "program" and version in entry["wrong"] else "same"
        row = rows.get((entry["id"], version, role))
        verdict = "not run" if row is None else row["verdict"]
        if verdict != expected:
            wrong.append(f"{entry['id']}, {role} with {version}: {verdict}, and {expected} was expected")
    return wrong


def file_of(line: str) -> str:
    """The program that a line of arguments names, as ``file:function`` or after ``--program``."""
    return re.split(r"[:.]", line.removeprefix("--program "))[0]


def page_of(rows: dict[tuple[str, str, str], dict[str, str]]) -> str:
    """The part of the page that is made."""
    entries = advisories()
    packages = sorted({entry["package"] for entry in entries})
    lines = [BEGIN, "", f"{len(entries)} advisories about {len(packages)} packages:", ""]
    for package in packages:
        links = [f"[{entry['id']}](#{entry['id']})" for entry in entries if entry["package"] == package]
        lines.append(f"- {package}: {', '.join(links)}")
    lines.append("")
    for entry in entries:
        lines += [f"### {entry['id']}", ""]
        lines += [f"{entry['package']}, if {entry['when']}: {entry['says']}. Remedy: {entry['remedy']}.", ""]
        lines += [" ".join(f"<{thread}>" for thread in entry["threads"]) or "No public report was found.", ""]
        lines += ["| version | what | verdict | first difference |", "| --- | --- | --- | --- |"]
        for version, role in sorted(versions_of(entry), key=lambda pair: (pair[1] == "control", parse(pair[0]))):
            row = rows[entry["id"], version, role]
            named = entry["control_is"] if role == "control" else file_of(entry["program"])
            lines.append(f"| {version} | {named} | {row['verdict']} | {row['first']} |")
        lines.append("")
    return "\n".join([*lines, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="run these advisories")
    parser.add_argument("--page", type=Path, help="write the results into this page")
    args = parser.parse_args()
    rows = {}
    if RESULTS.exists():
        with RESULTS.open() as file:
            rows = {(row["id"], row["version"], row["what"]): row for row in csv.DictReader(file)}
    # By what is installed: (entry, "program" or "control").
    cases = defaultdict(list)
    for entry in advisories():
        for version, role in versions_of(entry) if entry["id"] in args.only else []:
            cases[entry["package"], version, tuple(entry["needs"])].append((entry, role))
    for (_, version, _), of_version in cases.items():
        for row in run(version, of_version):
            print(f"{row['id']}, {row['what']} with {version}: {row['verdict']}. {row['first']}", flush=True)
            rows[row["id"], version, row["what"]] = row
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        wanted = [(entry["id"], version, role) for entry in advisories() for version, role in versions_of(entry)]
        writer.writerows(rows[key] for key in sorted(wanted) if key in rows)
    wrong = [problem for entry in advisories() for problem in problems(entry, rows)]
    if args.page and not wrong:
        page = args.page.read_text()
        made = page_of(rows)
        args.page.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, page, flags=re.DOTALL))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
