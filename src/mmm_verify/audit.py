"""``mmm-verify audit``: which versions that are installed here are known to compute something wrong without a word?"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from mmm_verify.errors import ConfigError

EPILOG = """\
An advisory was seen by running: a program that is wrong with one version of a package, and right with another one, and
a control that is right with both (benchmarks/advisories.py runs them, docs/advisories.md has the results). It applies
to the versions that were seen to be wrong, and to those between two of them; nothing is said of others.

exit codes: 0 none applies; 1 some apply, under the condition that each names
"""
Version = tuple[int, ...]


def advisories() -> list[dict[str, Any]]:
    """All entries of advisories.toml, which says what their fields are.

    Raises:
        ConfigError: Python is 3.10, and pip, which has what 3.11 has, is not installed.
    """
    text = Path(__file__).with_name("advisories.toml").read_text()
    for module in ("tomllib", "pip._vendor.tomli"):
        try:
            entries: list[dict[str, Any]] = import_module(module).loads(text)["advisory"]
        except ModuleNotFoundError:
            continue
        return entries
    raise ConfigError("the list of advisories is a TOML file, which Python reads from 3.11 on, or with pip")


def parse(version: str) -> Version:
    """The numbers of a release, without the build after a plus sign. Empty for others, such as nightly builds."""
    release, _, _ = version.partition("+")
    if not re.fullmatch(r"\d+(\.\d+)*", release):
        return ()
    return tuple(map(int, release.split(".")))


def is_wrong(version: str, entry: dict[str, Any]) -> bool:
    """Whether a version was seen to be wrong, or is between two that were, with no right one between them."""
    own = parse(version)
    wrong = sorted(map(parse, entry["wrong"]))
    seen = sorted([*wrong, *map(parse, entry["right"])])
    below = [other for other in seen if other <= own]
    above = [other for other in seen if other >= own]
    return bool(own and below and above) and below[-1] in wrong and above[0] in wrong


def applying() -> dict[str, list[dict[str, Any]]]:
    """What of the packages that advisories are about is installed, such as ``torch 2.13.0``, with those that apply."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for entry in advisories():
        package = entry["package"]
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        concerned = entries.setdefault(f"{package} {version}", [])
        if is_wrong(version, entry):
            concerned.append(entry)
    return entries


def main(argv: Sequence[str], program: str) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} audit",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    n_applying = 0
    for installed, entries in applying().items():
        n_applying += len(entries)
        print(f"{installed}: advisories that apply: {len(entries) or 'none'}")
        for entry in entries:
            print(f"  {entry['id']}")
            print(f"    if      {entry['when']}")
            print(f"    then    {entry['says']}")
            print(f"    remedy  {entry['remedy']}")
            print(f"    seen    wrong with {', '.join(entry['wrong'])}, right with {', '.join(entry['right'])}")
            for thread in entry["threads"]:
                print(f"    report  {thread}")
    packages = ", ".join(sorted({entry["package"] for entry in advisories()}))
    print(f"{len(advisories())} advisories are known, about {packages}")
    return 1 if n_applying else 0
