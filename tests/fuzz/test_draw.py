"""What the fuzzer draws: every flag there is, the same for the same seed, small, and mostly runs."""

import shlex
from pathlib import Path

import pytest

from fuzz.draw import draw
from fuzz.flags import PROGRAMS, arguments
from mmm.trainer.config.command_line import parse

DATA = Path("/data")


@pytest.fixture(scope="module")
def cases():
    return [draw(1, number, DATA) for number in range(6000)]


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
