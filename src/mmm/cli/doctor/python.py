"""Python itself, and the packages: from their metadata, none is imported."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from mmm.cli.doctor.finding import Finding, Place

OLDEST = (3, 10)


def check_python(place: Place, version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """The interpreter, and whether it is a virtual environment's."""
    seen = f"{'.'.join(map(str, version))} ({platform.machine()}), {sys.executable}"
    if version[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        yield Finding("python", "fail", seen, f"mmm needs Python {wanted} or newer: make the environment with one")
    else:
        yield Finding("python", "ok", seen)
    if "PYTHONHOME" in place.environ:
        yield Finding(
            "PYTHONHOME",
            "warn",
            place.environ["PYTHONHOME"],
            "another Python's modules may be found first: unset PYTHONHOME",
        )


def check_packages(place: Place, distribution: str = "mmm") -> Iterator[Finding]:
    """What mmm's own metadata asks for: required packages in the versions it names, optional ones by their extra."""
    try:
        requires = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            "warn",
            f"{distribution} is not installed here, so what it needs is not known",
            "pip install --editable . in its folder",
        )
        return
    missing, old, there = [], [], []
    optional: dict[str, list[str]] = {}
    for line in requires:
        name, oldest, extra = _requirement(line)
        found = _version(name)
        if extra:
            if extra not in ("dev", "test", "interop-test"):
                optional.setdefault(extra, []).append(f"{name} {found}" if found else f"no {name}")
        elif found is None:
            missing.append(name)
        elif oldest and _numbers(found) < _numbers(oldest):
            old.append(f"{name} {found} < {oldest}")
        else:
            there.append(f"{name} {found}")
    if missing or old:
        seen = ", ".join([*(f"no {name}" for name in missing), *old])
        names = " ".join(
            f"'{line.split(';')[0].strip()}'"
            for line in requires
            if _requirement(line)[0] in [*missing, *(text.split()[0] for text in old)]
        )
        yield Finding("packages", "fail", seen, f"{os.path.basename(sys.executable)} -m pip install {names}")
    else:
        yield Finding("packages", "ok", ", ".join(there))
    if optional:
        seen = "; ".join(f"{extra}: {', '.join(names)}" for extra, names in optional.items())
        lack = [extra for extra, names in optional.items() if any(text.startswith("no ") for text in names)]
        note = f"none is needed; to have them: pip install 'mmm[{','.join(lack)}]'" if lack else ""
        yield Finding("optional", "ok", seen, note)


def _requirement(line: str) -> tuple[str, str, str]:
    """``ruff>=0.6; extra == "dev"`` → name, oldest version or "", extra or ""."""
    match = re.match(r"[\w.-]+", line)
    oldest = re.search(r">=\s*([\w.]+)", line.split(";")[0])
    extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)""", line)
    return match[0] if match else line, oldest[1] if oldest else "", extra[1] if extra else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))
