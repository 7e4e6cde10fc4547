"""Python itself, and the packages: from their metadata, none is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mmm_lab.cli.doctor.finding import Finding
from mmm_verify.audit import applying
from mmm_verify.errors import ConfigError


def check_python(outdir: Path, timeout: float) -> Iterator[Finding]:
    """Name the interpreter. One that is too old cannot install this package."""
    yield Finding("python", "ok", f"{platform.python_version()} ({platform.machine()}), {sys.executable}")


def check_packages(outdir: Path, timeout: float, distribution: str = "mmm") -> Iterator[Finding]:
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
    for requirement in map(Requirement, requirements):
        # Those of an extra are optional.
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = ""
        if version and requirement.specifier.contains(version, prereleases=True):
            installed.append(f"{requirement.name} {version}")
        else:
            wrong.append(f"{wanted} is wanted, and there is {version or 'none'}")
            # Quoted: to a shell, > writes a file.
            to_install.append(f"'{wanted}'")
    if wrong:
        yield Finding("packages", "fail", ", ".join(wrong), f"{sys.executable} -m pip install {' '.join(to_install)}")
    else:
        yield Finding("packages", "ok", ", ".join(installed))


def check_advisories(outdir: Path, timeout: float) -> Iterator[Finding]:
    """Is a version installed that is known to compute something wrong without a word?"""
    known = []
    try:
        checked = applying()
    except ConfigError as error:
        yield Finding("advisories", "warn", "not checked", str(error))
        return
    for installed, entries in checked.items():
        known += [f"{installed}: {entry['id']}" for entry in entries]
    if known:
        fix = "`mmm verify audit` says under which condition, and what helps"
        yield Finding("advisories", "warn", ", ".join(known), fix)
    else:
        yield Finding("advisories", "ok", f"none applies to {', '.join(checked)}")
