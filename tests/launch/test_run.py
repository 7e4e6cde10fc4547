"""A run's states and clocks, over a transport that is a list of what happens."""

import os
import selectors
import signal
import time

import pytest

from mmm.launch.channel.failures import Failure
from mmm.launch.run import control
from mmm.launch.run.control import Run, RunState, Transport
from mmm.launch.run.waking import Clocks


class Listed(Transport):
    """What happens, step by step: each entry is called with the run. Its ranks are there from the beginning.

    Attributes:
        seen: the state before each step. told: what the run has asked for.
    """

    def __init__(self, *steps):
        self.steps, self.seen, self.told = list(steps), [], []
        self.read, self.write = os.pipe()

    def start(self, run):
        self.run = run
        os.write(self.write, b"x")  # always something to read
        run.selector.register(self.read, selectors.EVENT_READ)
        self.seen.append(run.state)
        run.ranks_started()

    def take_in(self, ready):
        self.seen.append(self.run.state)
        if self.steps:
            self.steps.pop(0)(self.run)

    def advance(self):
        if self.run.state is RunState.STARTING:
            self.told.append(("again", self.run.exit_code, list(self.run.failures), set(self.run.ended)))
            self.run.renew(1)
            self.run.ranks_started()
        return len(self.run.ended) == self.run.total

    def forward(self, number):
        self.told.append(("forward", number))

    def end(self, number, reason, grace):
        self.told.append(("end", number, reason))
        return True

    def kill(self):
        self.told.append(("kill",))
        self.run.ended.update(range(self.run.total))

    def locate(self):
        self.run.located({}, {})

    def finish(self):
        self.told.append(("finish",))
        return "it was gone", 9

    def clean_up(self):
        for end in (self.read, self.write):
            os.close(end)


class Twice:
    """Another attempt follows the first, and none the second."""

    def __init__(self):
        self.heard = []

    def after_failure(self, cause, known):
        return None

    def go_on(self, exit_code, again):
        self.heard.append((exit_code, again))
        return len(self.heard) == 1


def ends(*ranks):
    return lambda run: [run.rank_ended(rank) for rank in ranks]


def fails(rank, exit_code):
    return lambda run: run.failed(Failure(rank, exit_code, time.monotonic(), 0, text=f"rank {rank} failed"))


def lived(transport):
    """The states that the run was in, each once."""
    return list(dict.fromkeys(transport.seen))


def test_a_good_run():
    made = Listed(ends(0), ends(1))
    run = Run(made, 2)
    assert run.run() == 0
    assert (lived(made), run.state) == ([RunState.STARTING, RunState.RUNNING], RunState.DONE)
    assert made.told == [("finish",)]


def test_a_failure_ends_the_others(capfd):
    made = Listed(fails(1, 7), *[lambda run: time.sleep(0.05)] * 3, ends(0, 1))
    run = Run(made, 2)
    assert run.run() == 7
    assert lived(made) == [RunState.STARTING, RunState.RUNNING, RunState.ENDING]
    assert made.told == [("end", signal.SIGTERM, "rank 1 failed"), ("finish",)]
    assert run.again
    assert capfd.readouterr().err == "launch: rank 1 failed\n"


def test_what_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(control, "GRACE", 0.1)
    made = Listed(lambda run: os.kill(os.getpid(), signal.SIGTERM))
    run, began = Run(made, 2), time.monotonic()
    assert run.run() == 143
    assert time.monotonic() - began < 30.0
    assert made.told == [("end", signal.SIGTERM, ""), ("kill",), ("finish",)]
    assert not run.again


def test_what_held_the_ranks_is_gone(capfd):
    class Gone(Listed):
        def advance(self):
            return True

    run = Run(Gone(), 2)
    assert (run.run(), run.again) == (9, True)
    assert capfd.readouterr().err == "launch: it was gone\n"


@pytest.mark.parametrize(("first", "heard"), [([fails(0, 7), ends(0)], (7, True)), ([ends(0)], (0, False))])
def test_another_attempt_begins_as_the_first_did(first, heard):
    """Nothing of the one before is left: not its failures, its exit code, its ranks."""
    made, attempts = Listed(*first, *[lambda run: None] * 20, ends(0)), Twice()
    assert Run(made, 1, attempts=attempts).run() == 0
    assert attempts.heard == [heard, (0, False)]
    assert ("again", None, [], set()) in made.told


def test_clocks_act_in_order_and_once():
    clocks, done = Clocks(), []

    def first():
        done.append("first")
        clocks.clear(taken_back)

    def second():
        done.append("second")

    def taken_back():
        done.append("taken back")

    now = time.monotonic()
    clocks.set(second, now - 1.0)
    clocks.set(taken_back, now - 1.5)
    clocks.set(first, now - 2.0)
    assert clocks.timeout() == 0.0
    clocks.act()
    clocks.act()
    assert done == ["first", "second"]
    assert clocks.timeout() is None
    clocks.set(first, now + 60.0)
    clocks.act()
    assert (done, clocks.is_set(first)) == (["first", "second"], True)
    assert 50.0 < clocks.timeout() <= 60.0
