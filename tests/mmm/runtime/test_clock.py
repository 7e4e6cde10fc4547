"""Seconds of a step and of its parts."""

import itertools
import math

import pytest
import torch

from mmm.errors import ConfigError
from mmm.runtime import clock as module
from mmm.runtime.clock import OWN, StepClock

SECONDS = {"dtd": 1.0, "dtf": 2.0, "dtb": 4.0, "dto": 0.5}


class Time:
    """Of the host, and of a device. It goes on when it is told."""

    now = 0.0
    waits = 0

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
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
    return StepClock(torch.device(request.param))


def step(clock, slower=1.0):
    Time.now += 100  # an evaluation, a save
    clock.start()
    for part, seconds in SECONDS.items():
        Time.now += slower * seconds
        clock.lap(part)


def test_parts_of_a_step_add_up(clock):
    clock.start()
    for part in ("dtd", "dtf", "dtb", "dtf", "dtb", "dto"):
        Time.now += SECONDS[part]
        clock.lap(part)
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
    assert {part: read[part] for part in SECONDS} == {part: 2 * seconds for part, seconds in SECONDS.items()}
    step(clock)
    assert clock.read()["dt"] == 7.5


def test_a_row_without_a_step(clock):
    with pytest.raises(ConfigError, match="no step has begun"):
        clock.read()


def test_own_work_is_the_mean_as_well(clock):
    waited = itertools.accumulate(itertools.cycle([0.0, 0.25, 0.25, 1.0, 0.0]))  # in each: start, and four parts
    clock.waited = lambda: next(waited)
    for _ in range(3):
        step(clock)
    assert clock.read()[OWN] == 7.5 - 1.5
    step(clock)
    assert clock.read()[OWN] == 7.5 - 1.5
    clock.waited = lambda: math.nan
    step(clock)
    assert math.isnan(clock.read()[OWN])
