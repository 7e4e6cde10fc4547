"""What the fuzzer draws: every flag there is, the same for the same seed, small, and mostly runs."""

import shlex
from collections import defaultdict
from dataclasses import field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from fuzz import draw as drawing
from fuzz.draw import ANYTHING, GIVEN, NOT_SPOILT, UnknownFlag, draw
from fuzz.flags import HARMLESS, LAYOUT, PROGRAMS, arguments, flags_of
from mmm.trainer import lm
from mmm.trainer.config.command_line import parse
from mmm.trainer.config.layout import SequenceLayoutOptions

DATA = Path("/data")


@pytest.fixture(scope="module")
def cases():
    return [draw(1, number, DATA) for number in range(6000)]


def test_the_same_seed_gives_the_same_cases(cases):
    assert [draw(1, number, DATA) for number in range(50, 100)] == cases[50:100]
    assert [draw(2, number, DATA).command() for number in range(20)] != [case.command() for case in cases[:20]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_is_drawn(cases, program):
    """With at least two values where it has two, and a choice with all of them, but for what is fixed on purpose."""
    seen = defaultdict(set)
    for case in cases:
        if case.program == program:
            for name, value in case.flags.items():
                seen[name].add(value)
    for name, flag in flags_of(program).items():
        if name in NOT_SPOILT | GIVEN:
            continue
        assert len(seen[name] | {str(flag.default)}) >= 2, name
        assert not flag.choices or set(flag.choices) <= seen[name] | {_word(flag.default)}, name
    assert seen["plots"] == {"off"}  # no pictures
    assert seen["device"] == {"cpu"}


def test_runs_go_on_from_another_layout(cases):
    resumed = [case for case in cases if case.before]
    assert {case.program for case in resumed} == {"lm", "vit", "cnn"}
    assert len(resumed) > 200
    for case in resumed:
        assert 0 < case.before.saved <= case.before.ends_at < int(case.flags["max_iters"])
        same = [{n: v for n, v in c.flags.items() if n not in LAYOUT | HARMLESS} for c in (case, case.before)]
        assert same[0] == same[1]
    assert len({(case.ranks, case.before.ranks) for case in resumed}) > 20


def _word(default):
    return {True: "on", False: "off"}.get(default, default)


def test_a_new_flag_is_drawn_or_not_known(monkeypatch):
    """A choice is drawn as it is; a number has to be given values."""
    kind = {"frozen": True, "kw_only": True}
    grown = make_dataclass("Config", [("colour", Literal["red", "green"], "red")], bases=(lm.Config,), **kind)
    monkeypatch.setitem(PROGRAMS, "lm", SimpleNamespace(Config=grown, __name__="mmm.trainer.lm"))
    flags_of.cache_clear()
    drawn = {draw(3, number, DATA).flags.get("colour") for number in range(400)}
    assert {"red", "green"} <= drawn
    more = make_dataclass("Config", [("teeth", int, field(default=3))], bases=(grown,), **kind)
    monkeypatch.setitem(PROGRAMS, "lm", SimpleNamespace(Config=more, __name__="mmm.trainer.lm"))
    flags_of.cache_clear()
    with pytest.raises(UnknownFlag, match="lm: teeth: add values to ANYTHING"):
        [draw(3, number, DATA) for number in range(100)]
    monkeypatch.undo()
    flags_of.cache_clear()


def test_no_table_names_a_flag_that_is_none():
    everything = {name for program in PROGRAMS for name in flags_of(program)}
    assert set(ANYTHING) | set(GIVEN) | LAYOUT | HARMLESS <= everything
    assert (
        vars(SequenceLayoutOptions()).keys() <= LAYOUT
    )  # a new flag of layouts is taken away from the run on one rank


def test_command_lines_are_what_the_programs_take(cases, monkeypatch):
    for case in [case for case in cases[:40] if not case.spoilt][:20]:  # what is spoilt may be refused
        monkeypatch.setattr("sys.argv", [case.program, *arguments(case.program, case.flags)])
        config = parse(PROGRAMS[case.program].Config)
        assert str(config.run.max_iters) == case.flags["max_iters"]
        assert config.run.plots is False
        words = shlex.split(case.command())
        given = [*arguments(case.program, case.flags), *(["--resume", "auto"] if case.before else [])]
        assert words[-len(given) :] == given
        assert words[:1] == (["launch"] if case.ranks > 1 else ["python3"])


def test_nothing_is_downloaded_and_nothing_is_large(cases):
    for case in cases:
        if case.flags.get("dataset") in ("mnist", "fashion_mnist", "cifar10", "folder"):
            assert str(case.flags["data_dir"]).startswith("/data")
        assert case.program != "cnn" or case.flags["dataset"] != "folder"
        if case.program in ("lm", "vit", "fsdp_tp"):
            assert {"dim", "n_layers", "n_heads"} <= case.flags.keys()
        assert 1 <= case.ranks <= 8


def test_problems_have_several_layouts(cases):
    """So that the run on one rank is made once for all of them."""
    taken = LAYOUT | HARMLESS | {"log_every", "checkpoint_every"}  # which a run on another layout before it needs
    for first in range(0, 400, drawing.LAYOUTS_A_PROBLEM):
        group = [case for case in cases[first : first + drawing.LAYOUTS_A_PROBLEM] if not case.spoilt]
        problems = [{name: value for name, value in case.flags.items() if name not in taken} for case in group]
        assert all(problem == problems[0] for problem in problems)
    layouts = {tuple(sorted((n, str(v)) for n, v in case.flags.items() if n in LAYOUT)) for case in cases}
    assert len(layouts) > 1000
