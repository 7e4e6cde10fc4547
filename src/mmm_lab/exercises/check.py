"""Loads a reader's file, and says how far its answer is right."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mmm.errors import ConfigError
from mmm_lab.exercises import NAMES
from mmm_launch.errors import did_you_mean
from mmm_verify.run import verify
from mmm_verify.verdict import Verdict

TIMEOUT = 60.0  # s that the ranks may take
UNWRITTEN = "raise NotImplementedError"  # the last line of a file to begin with
MOST_FINDINGS = 4
FRAME = re.compile(r'  File "([^"]+)", line (\d+), in \w+\n    (.+)')  # of a traceback
# Folders of files that are not the reader's, who may well work in a folder that is called mmm, too.
ELSEWHERE = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "site-packages")


@dataclass(frozen=True)
class Result:
    """How an answer did: whether it is right, and what to say about it."""

    right: bool
    text: str


def exercise(name: str) -> ModuleType:
    """Returns an exercise's module. Raises ConfigError."""
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or f" There are {', '.join(NAMES)}"
        raise ConfigError(f"{name}: there is no such exercise.{hint}")
    return importlib.import_module(f"mmm_lab.exercises.{name}")


def file_of(name: str) -> str:
    """Returns the file that an exercise begins with."""
    module = exercise(name)
    question = (module.__doc__ or "").strip()
    docstring = f'"""{question}\n\n    mmm exercise check {name}.py\n"""'
    # `check_file` reads the name from this line: the reader may call the file something else.
    marker = f'EXERCISE = "{name}"'
    return f"{docstring}\n\n{marker}\n\n{module.TEMPLATE.strip()}\n"


def check_file(path: Path) -> Result:
    """Check a reader's file.

    Raises:
        ConfigError: it cannot be read or imported, or does not belong to an exercise.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    match = re.search(r'^EXERCISE = "(\w+)"', text, re.MULTILINE)
    if match is None:
        raise ConfigError(f'{path} does not say which exercise it is: keep its line EXERCISE = "…"')
    name = match[1]
    module = exercise(name)
    spec = importlib.util.spec_from_file_location(f"answer_to_{name}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file: call it {name}.py")
    answer = importlib.util.module_from_spec(spec)
    # Forked ranks look their functions up there.
    sys.modules[spec.name] = answer
    try:
        spec.loader.exec_module(answer)
    # The reader's code may raise anything.
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(answer, module.FUNCTION, None)
    # Renamed, or not written.
    if not callable(function):
        raise ConfigError(f"{path} has no function {module.FUNCTION}")
    return module.check(function)


def verified(function: str, meshes: tuple[str, ...], **program: Any) -> Result:
    """Verify a program on one mesh after another, until one is not the same.

    Args:
        function: the name of the reader's function, for messages.
        program: arguments of `mmm_verify.verify`.
    """
    lines = []
    for mesh in meshes:
        verdict = verify(mesh=mesh, timeout=TIMEOUT, **program)
        if not verdict:
            lines.append(_what_is_wrong(function, verdict))
            return Result(False, "\n".join(lines))
        lines.append(f"{verdict.layout}: the same as on one device: {', '.join(verdict.compared)}")
    return Result(True, "\n".join(lines))


def _what_is_wrong(function: str, verdict: Verdict) -> str:
    """Returns what is wrong on a mesh, as lines."""
    if verdict.details:
        # "rank 1: ZeroDivisionError: …"
        _, _, error = verdict.first.partition(": ")
        return failure(function, error, verdict.details, f"{verdict.layout}: ")
    lines = [f"{verdict.layout}: {verdict.result}: first difference: {verdict.first}"]
    for finding in verdict.findings[:MOST_FINDINGS]:
        lines.append(f"  {finding}")
    return "\n".join(lines)


def failure(function: str, error: object, traceback: str, layout: str = "") -> str:
    """Returns how an answer failed, with the lines of the reader's file that were running.

    Args:
        layout: what to begin with, where there are several meshes.
    """
    lines = [f"{layout}{function} fails: {error}"]
    for file, line, code in FRAME.findall(traceback):
        if any(folder in file for folder in ELSEWHERE):
            continue
        if UNWRITTEN in code:
            return f"nothing is written yet: write {function}"
        lines.append(f"  line {line}: {code}")
    return "\n".join(lines)
