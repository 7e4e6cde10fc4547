"""What means one thing on the command line means the same in a file, or is refused: every flag in every form."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest

from mmm.errors import ConfigError
from mmm.examples import fsdp_tp
from mmm.run import config_file
from mmm.run.command_line import flags_on, parse
from mmm.run.flags import flags, read
from mmm.run.options import flags_of
from mmm.trainer import cnn, lm, vit

REFUSED = "refused"
SUFFIXES = ("yaml", "json")
# Programs with other groups of flags each.
PROGRAMS = (lm, vit, cnn, fsdp_tp)
# What somebody may write for a value, and what YAML 1.1 or JSON may take for something else.
FORMS = """
None null ~ 7 010 0o10 0x10 1_0 +5 -1 1e3 1.5 .5 1. 1,000 1:30 1:40.5 nan inf .inf true false yes No on off y
2026-01-01 2026-01-01T07:32:00 text auto ddp fp64 adamw random host a/b $HOME ~/a - -x [] = @a 1+1j
"""
# Values of flags that take two.
LISTS = (["0.5", "0.9"], ["010", "1e-3"], ["a", "b"], ["1:30", "2"], ["", "a"], ["None", "null"])


def on_the_line(known, argv):
    try:
        return repr(read(flags_on(argv), known, "--"))
    except ConfigError:
        return REFUSED


def in_a_file(known, suffix, text):
    # Thousands of files would take most of the time.
    with patch.object(config_file, "read_file", lambda path: text.encode()):
        try:
            return repr(config_file.use(Path(f"flags.{suffix}"), known))
        except ConfigError:
            return REFUSED


def of_each_kind(every):
    """Flags of all programs, by program: every one once, or one of each type."""
    seen = set()
    for program in PROGRAMS:
        known = flags(program.Config())
        for name, flag in known.items():
            kind = ("{" in flag.takes or flag.takes, flag.count, flag.optional, name if every else "")
            if kind not in seen:
                seen.add(kind)
                yield known, flag


def compare(known, flag):
    """In quotes, the value of a file is exactly that of the command line. Without quotes it is that, or is refused."""
    key = flag.names[0]
    same = 0
    choice, _, _ = flag.takes.strip("[{} .").partition(",")
    for form in (*FORMS.split(), choice, "", "two words"):
        line = on_the_line(known, [f"--{key}={form}"])
        quoted = json.dumps(form)
        in_quotes = {"yaml": f"{key}: {quoted}", "json": f'{{"{key}": {quoted}}}'}
        bare = {"yaml": f"{key}: {form}", "json": f'{{"{key}": {form}}}'}
        for suffix in SUFFIXES:
            assert in_a_file(known, suffix, in_quotes[suffix]) == line, in_quotes[suffix]
            value = in_a_file(known, suffix, bare[suffix])
            assert value in (line, REFUSED), bare[suffix]
            same += value != REFUSED
    for argv in LISTS:
        line = on_the_line(known, [f"--{key}", *argv])
        for suffix in SUFFIXES:
            content = {"yaml": f"{key}: {argv}", "json": json.dumps({key: argv})}
            assert in_a_file(known, suffix, content[suffix]) == line, content[suffix]
    return same


def test_every_type_of_flag_in_every_form():
    same = {flag.names[0]: compare(known, flag) for known, flag in of_each_kind(every=False)}
    assert len(same) > 6
    assert all(same.values())


@pytest.mark.long
def test_every_flag_in_every_form():
    same = {flag.names[0]: compare(known, flag) for known, flag in of_each_kind(every=True)}
    assert len(same) > 95
    assert all(same.values())


@dataclass(frozen=True)
class Config:
    """Flags of a program of one's own."""

    data: Path | None = None
    integer: int | None = 1
    real: float = 1.0
    name: str = "a"
    """what it is called"""
    on: bool = False
    level: Literal[1, 2] = 1
    several: tuple[int, ...] = (1, 2)
    two: tuple[float, float] = (1.0, 1.0)


# Form → what it is, by Python's own int and float, on the command line and in a file alike.
RIGHT = [
    ("integer", "010", 10),
    ("integer", "-1", -1),
    ("integer", "null", None),
    ("integer", "1:30", REFUSED),
    ("integer", "1e3", REFUSED),
    ("integer", "yes", REFUSED),
    ("real", "010", 10.0),
    ("real", "1e-3", 0.001),
    ("real", "-1e-3", -0.001),
    ("real", "1:30", REFUSED),
    ("real", "null", REFUSED),
    ("name", "010", "010"),
    ("name", "2026-01-01", "2026-01-01"),
    ("name", "yes", "yes"),
    ("name", "null", "null"),
    ("name", "1e3", "1e3"),
    ("on", "true", True),
    ("on", "no", REFUSED),
    ("on", "1", REFUSED),
    ("level", "2", 2),
    ("level", "3", REFUSED),
    ("several", "3", (3,)),
    ("several", "[]", ()),
    ("several", "x", REFUSED),
    ("two", "3", REFUSED),
]


@pytest.mark.parametrize(("name", "form", "value"), RIGHT)
def test_what_is_right(monkeypatch, tmp_path, name, form, value):
    file = tmp_path / "flags.yaml"
    file.write_text(f"{name}: {form}")
    for argv in ([f"--{name}", form], ["--config", str(file)]):
        monkeypatch.setattr(sys, "argv", ["own", "--data", "x", *argv])
        if value is REFUSED:
            with pytest.raises(ConfigError, match=f"{name} "):
                parse(Config)
        else:
            settings = flags_of(parse(Config))
            assert repr(settings[name]) == repr(value)


def test_flags_of_a_program_of_ones_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["own", "--data", "x", "--two", "2", "3", "--several", "4", "--several", "5", "6"])
    assert parse(Config) == Config(data=Path("x"), several=(4, 5, 6), two=(2.0, 3.0))
    monkeypatch.setattr(sys, "argv", ["own", "--help"])
    with pytest.raises(SystemExit):
        parse(Config)
    help_text = " ".join(capsys.readouterr().out.split())
    assert "--data PATH" in help_text
    assert "--level {1,2} (default: 1)" in help_text
    assert "--two FLOAT FLOAT (default: (1.0, 1.0))" in help_text
    assert "--name STR what it is called (default: a)" in help_text


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_flag_is_there_twice_without_a_word(program):
    """Of two values the first one would be lost. A flag that takes any number of values has both."""
    known = flags(program.Config())
    taken = {"1", "x", "true", *(flag.takes.strip("[{} .").split(",")[0] for flag in known.values())}
    for flag in known.values():
        for word in taken:
            once = [f"--{flag.names[-1]}", *[word] * (flag.count or 1)]
            if flag.names[-1].startswith("no_"):
                once = once[:1]
            if on_the_line(known, once) != REFUSED:
                twice = on_the_line(known, [*once, f"--{flag.names[0]}", *once[1:]])
                assert (twice == REFUSED) == (flag.count > 0), (once, twice)
                break
        else:
            raise AssertionError(f"none of {taken} is a value of --{flag.names[0]}")
