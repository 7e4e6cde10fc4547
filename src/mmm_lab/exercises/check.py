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
from mmm_verify.run import verify_subject
from mmm_verify.subject import make_subject
from mmm_verify.verdict import Verdict

TIMEOUT = 60.0  # s that the ranks may take
UNWRITTEN = "raise NotImplementedError"  # the last line of a file to begin with
MOST_LINES = 4  # of a failure
# Where files are not the reader's, who may well work in a folder that is called mmm, too.
ELSEWHERE = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "site-packages")


@dataclass(frozen=True)
class Result:
    """How an answer did: whether it is right, and what is to be said."""

    right: bool
    text: str


def exercise(name: str) -> ModuleType:
    """An exercise's module. Raises ConfigError."""
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or f" There are {', '.join(NAMES)}"
        raise ConfigError(f"{name}: there is no such exercise.{hint}")
    return importlib.import_module(f"mmm_lab.exercises.{name}")


def file_of(name: str) -> str:
    """The file that an exercise begins with."""
    module = exercise(name)
    text = (module.__doc__ or "").strip()
    return f'"""{text}\n\n    mmm exercise check {name}.py\n"""\n\nEXERCISE = "{name}"\n\n{module.TEMPLATE.strip()}\n'


def check_file(path: Path) -> Result:
    """Check a reader's file.

    Raises:
        ConfigError: it cannot be read or imported, or is of no exercise.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    named = re.search(r'^EXERCISE = "(\w+)"', text, re.MULTILINE)
    if named is None:
        raise ConfigError(f'{path} does not say which exercise it is: keep its line EXERCISE = "…"')
    module = exercise(named[1])
    spec = importlib.util.spec_from_file_location(f"answer_to_{named[1]}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file: call it {named[1]}.py")
    answer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = answer
    try:
        spec.loader.exec_module(answer)
    except Exception as error:  # whatever the reader's code raises
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(answer, module.FUNCTION, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {module.FUNCTION}")
    return module.check(function)


def verified(function: str, meshes: tuple[str, ...], **program: Any) -> Result:
    """Verify a program on meshes, until one is not the same.

    Args:
        function: the reader's, for messages. program: as `mmm_verify.verify` takes it.
    """
    lines: list[str] = []
    for mesh in meshes:
        settings = dict(program)
        subject = make_subject(
            settings.pop("model_fn"),
            settings.pop("parallelize_fn"),
            settings.pop("batch_fn"),
            settings.pop("step_fn", None),
            mesh,
            **settings,
        )
        verdict = verify_subject(subject, TIMEOUT)
        if not verdict:
            return Result(False, "\n".join([*lines, _said(function, verdict)]))
        lines.append(f"{verdict.layout}: the same as on one device: {', '.join(verdict.compared)}")
    return Result(True, "\n".join(lines))


def _said(function: str, verdict: Verdict) -> str:
    """What is wrong on a mesh."""
    if UNWRITTEN in _own(verdict.details):
        return f"nothing is written yet: write {function}"
    if verdict.details:
        failure = f"{verdict.layout}: {function} fails: {verdict.first.partition(': ')[2]}"
        return f"{failure}\n{_own(verdict.details)}".rstrip()
    lines = [f"{verdict.layout}: {verdict.result}: they part at {verdict.first}"]
    lines += [f"  {finding}" for finding in verdict.findings[:MOST_LINES]]
    return "\n".join(lines)


def _own(details: str) -> str:
    """Of a traceback, the lines of the reader's file."""
    frames = re.findall(r'  File "([^"]+)", line (\d+), in (\w+)\n    (.+)', details)
    own = [(line, code) for file, line, _, code in frames if not any(place in file for place in ELSEWHERE)]
    return "\n".join(f"  line {line}: {code}" for line, code in own)


def failed(function: str, error: Exception, details: str) -> Result:
    """Of a check that forks ranks itself: one of them failed."""
    if UNWRITTEN in _own(details):
        return Result(False, f"nothing is written yet: write {function}")
    return Result(False, "\n".join([f"{function} fails: {error}", _own(details)]).rstrip())
