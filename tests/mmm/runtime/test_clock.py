"""Seconds of a step and of its parts. When a rank was started, what it imported, and the parts that its start is made
of."""

import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch

from mmm.errors import ConfigError, LaunchError
from mmm.runtime import clock as module
from mmm.runtime.clock import OWN, StepClock
from mmm.runtime.startup import as_record, parts, started, table
from mmm_launch import contract
from support.clock import PATIENCE, stretched

SECONDS = {"dtd": 1.0, "dtf": 2.0, "dtb": 4.0, "dto": 0.5}


class Time:
    """Of the host, and of a device. It goes on when it is told."""

    now = 0.0
    waits = 0

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = Time.now

        def synchronize(self):
            Time.waits += 1

        def elapsed_time(self, later):
            return 1000 * (later.at - self.at)


@pytest.fixture(params=["cpu", "cuda"])
def clock(request, monkeypatch):
    Time.now, Time.waits = 0.0, 0
    monkeypatch.setattr(module, "perf_counter", lambda: Time.now)
    monkeypatch.setattr(module, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Time.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "compute")
    return StepClock(torch.device(request.param))


def step(clock, slower=1.0):
    # An evaluation, a save.
    Time.now += 100
    clock.start()
    for phase, seconds in SECONDS.items():
        Time.now += slower * seconds
        clock.lap(phase)


def test_parts_of_a_step_add_up(clock):
    clock.start()
    for phase in ("dtd", "dtf", "dtb", "dtf", "dtb", "dto"):
        Time.now += SECONDS[phase]
        clock.lap(phase)
    read = clock.read()
    assert [*read] == ["dt", "dtd", "dtf", "dtb", "dto", OWN]
    assert [*read.values()][:-1] == [13.5, 1.0, 4.0, 8.0, 0.5]


def test_it_reads_the_mean_of_the_steps_since_it_was_read(clock):
    step(clock, slower=100)
    assert clock.read()["dt"] == 750
    for slower in (1, 1, 4):
        step(clock, slower)
    read = clock.read()
    assert read["dt"] == 15
    assert {phase: read[phase] for phase in SECONDS} == {phase: 2 * seconds for phase, seconds in SECONDS.items()}
    step(clock)
    assert clock.read()["dt"] == 7.5


def test_a_row_without_a_step(clock):
    with pytest.raises(ConfigError, match="no step has begun"):
        clock.read()


def wait(clock, seconds):
    with clock.waiting():
        Time.now += seconds


def test_own_work_is_the_mean_as_well(clock):
    clock.knows_waits = True
    for seconds in (0.25, 1.0, 0.25):
        # Before the step.
        wait(clock, 50)
        clock.start()
        wait(clock, seconds)
        clock.lap("dtd")
        Time.now += 2
        clock.lap("dtf")
        wait(clock, 2 * seconds)
        clock.lap("dto")
        # after it
        wait(clock, 50)
    read = clock.read()
    assert read["dt"] == 2 + 1.5
    assert read[OWN] == 2
    step(clock)
    assert clock.read()[OWN] == 7.5
    clock.knows_waits = False
    step(clock)
    assert math.isnan(clock.read()[OWN])


# Seconds from the first mark to the others, on rank 0.
AFTER = {"began": 3.0, "imported": 3.25, "ready": 4.0, "group": 4.5, "model": 5.5, "first_step": 7.5}

SLEEP = "import time\ntime.sleep({})\n"


def test_the_time_of_a_process():
    before = time.time()
    code = "import time, mmm_launch.contract as s; print(s.process_start(), time.time())"
    seconds, now = map(float, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert before - 0.05 <= seconds <= now


def test_who_says_when_it_started():
    now = time.time()
    both = {"MMM_STARTED_AT": str(now - 50), "MMM_LAUNCH_BEGAN": str(now - 5)}
    assert started(both, 1.0) == (pytest.approx(now - 50), "MMM_STARTED_AT")
    assert started({"MMM_LAUNCH_BEGAN": str(now - 5)}, 1.0) == (pytest.approx(now - 5), "launch")
    set_back = {"MMM_STARTED_AT": "9e12", "MMM_LAUNCH_BEGAN": str(now + 60)}
    for environment in ({}, set_back):
        start, source = started(environment, 1.0)
        assert (source, start <= now) == ("process", True)


@pytest.mark.parametrize("text", ["18:33:23", "nan", "-5", "0"])
def test_what_is_no_time(text):
    with pytest.raises(LaunchError, match=r"not a time in the past.*date \+%s"):
        started({"MMM_STARTED_AT": text}, 1.0)


def record(ranks=2, shared=True, first_step=True):
    """Rank r is 0.1 r later at each mark from the second on."""
    by_rank = []
    for rank in range(ranks):
        marks = {"started": 100.0}
        for name, seconds in AFTER.items():
            marks[name] = 100.0 + seconds + 0.1 * rank
        if not first_step:
            del marks["model"], marks["first_step"]
        by_rank.append(marks)
    imports = {"torch": 2.0, "small": 0.001, "tiny": 0.002} if shared else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(contract.PROGRAM_VARIABLE, json.dumps({"began": 1.0, "shared": imports}))
        return as_record("launch", by_rank)


@pytest.mark.parametrize("shared", [True, False])
def test_parts_add_up(shared):
    """Imports that ranks share lie before the program begins, and count as imports."""
    phases = parts(json.loads(json.dumps(record(shared=shared))))
    assert list(phases) == ["launch", "imports", "options, data, checks", "process group", "model", "first step"]
    for rank, total in enumerate((7.5, 7.6)):
        assert sum(values[rank] for values in phases.values()) == pytest.approx(total)
    assert phases["imports"] == pytest.approx([2.253 if shared else 0.25] * 2)
    assert phases["launch"] == pytest.approx([3.0 - 2.003, 3.1 - 2.003] if shared else [3.0, 3.1])
    assert phases["model"] == pytest.approx([1.0, 1.0])


def test_parts_of_a_record_without_the_mark_of_imports():
    """As runs had it before: the imports are in the part after them."""
    made = record()
    del made["marks"]["imported"]
    phases = parts(made)
    assert list(phases) == ["launch", "options, data, checks", "process group", "model", "first step"]
    assert sum(values[0] for values in phases.values()) == pytest.approx(7.5)


def test_a_run_without_steps_has_no_parts_of_them():
    assert list(parts(record(first_step=False))) == ["launch", "imports", "options, data, checks", "process group"]


def test_table():
    text = table(record(), ["x1", "x2"]).splitlines()
    assert text[0] == (
        "start-up: 7.55 s from launch to the end of the first step, median of 2 ranks; slowest: rank 1 on x2, 7.60 s"
    )
    assert text[1].startswith("  launch: 1.05, imports: 2.25, options, data, checks: ")
    # What took no time to import is not named.
    assert text[2] == "  imported once for all: torch 2.00"
    alone = table(record(ranks=1, shared=False), ["x1"]).splitlines()
    assert alone[0] == "start-up: 7.50 s from launch to the end of the first step"
    assert len(alone) == 2


RANK = """
import time
own = time.time()
import json, os, sys
import slow_pkg
from mmm_launch import contract
from mmm.runtime import startup
marks, source = startup.ready()
json.dump({"own": own, "marks": marks, "source": source,
           "shared": contract.program_start().shared}, open(os.environ["RANK"] + ".json", "w"))
"""


@pytest.mark.parametrize("options", [[], pytest.param(["--no-prefork"], marks=pytest.mark.long)], ids=["fork", "spawn"])
def test_ranks_know_when_launch_began(tmp_path, monkeypatch, options):
    (tmp_path / "t.py").write_text(RANK)
    # So that it counts as installed, and is imported before the fork.
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/slow_pkg.py").write_text(SLEEP.format(0.8))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site-packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = time.time()
    command = [sys.executable, "-m", "mmm_launch", "-n", "2", "--device", "cpu", *options, "python3", "t.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=PATIENCE)
    after = time.time()
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        begin, began, ready = (facts["marks"][name] for name in ("started", "began", "ready"))
        assert before - 0.05 <= begin < began < ready <= after
        # What is imported before the fork is before.
        assert began <= facts["own"] < began + stretched(0.7)
        assert facts["source"] == "launch"
        # forked: imported once, before
        assert ("slow_pkg" in facts["shared"]) == (not options)
        assert (ready - began if options else began - begin) > 0.8
