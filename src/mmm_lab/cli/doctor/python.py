"""Python itself, and the packages: from their metadata, none is imported."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from mmm_lab.cli.doctor.finding import Finding, Place

OLDEST = (3, 10)


def check_python(place: Place, version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """Look at the interpreter's version."""
    text = ".".join(map(str, version))
    seen = f"{text} ({platform.machine()}), {sys.executable}"
    if version[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        yield Finding("python", "fail", seen, f"mmm needs Python {wanted} or newer: make the environment with one")
    else:
        yield Finding("python", "ok", seen)


def check_packages(place: Place, distribution: str = "mmm") -> Iterator[Finding]:
    """Are the packages that mmm's own metadata asks for installed, in the versions that it names?"""
    # From metadata: importing the packages would take seconds, and a broken one would end this check.
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        seen = f"{distribution} is not installed here, so what it needs is not known"
        yield Finding("packages", "warn", seen, "pip install --editable . in its folder")
        return
    installed = []
    wrong = []
    to_install = []
    for requirement in requirements:
        # An optional one.
        if "extra ==" in requirement:
            continue
        # "rich>=13; python_version < '4'"
        wanted = requirement.split(";")[0].strip()
        name = re.split(r"[^\w.-]", wanted)[0]
        oldest = re.search(r">=\s*([\w.]+)", wanted)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problem = f"no {name}"
        else:
            problem = ""
            if oldest and as_numbers(version) < as_numbers(oldest[1]):
                problem = f"{name} {version} < {oldest[1]}"
        if problem:
            wrong.append(problem)
            # Quoted: to a shell, > writes a file.
            to_install.append(f"'{wanted}'")
        else:
            installed.append(f"{name} {version}")
    if wrong:
        fix = f"{os.path.basename(sys.executable)} -m pip install {' '.join(to_install)}"
        yield Finding("packages", "fail", ", ".join(wrong), fix)
    else:
        yield Finding("packages", "ok", ", ".join(installed))


def as_numbers(version: str) -> list[int]:
    """Convert ``2.13.0+cpu`` to [2, 13, 0]: as text, 2.9 would be newer than 2.13."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        return [0]
    return [int(digits) for digits in match[0].split(".")]
