"""What counts as waiting for other ranks on an accelerator: a device that is not there, whose streams know the time."""

import inspect
import math
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Work
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmm.runtime import clock as module
from mmm.runtime.clock import OWN, WAITS, StepClock
from mmm.runtime.process_group import all_gather
from mmm.runtime.waits import timed_waits
from support import streams
from support.streams import Event, Host, Stream


@pytest.fixture
def network(monkeypatch):
    """One rank of two, whose collectives take a second on the device."""
    network = streams.start()
    monkeypatch.setattr(module, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    network.install(monkeypatch.setattr)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield network
    dist.destroy_process_group()


@pytest.fixture
def clock(network):
    clock = StepClock(torch.device("cuda"), ("dtf", "dto"))
    with timed_waits(clock):
        yield clock


def step(clock, body):
    """Seconds of a step, and of this rank's own work in it: 2 s, and what `body` does."""
    clock.start()
    Stream.current.work(2.0)
    body()
    clock.lap("dtf")
    clock.lap("dto")
    read = clock.read()
    return read["dt"], read[OWN]


X = torch.ones(2)


def test_a_collective_on_the_current_stream(clock, network):
    network.late = 10.0
    assert step(clock, lambda: dist.all_reduce(X)) == (13.0, 2.0)
    network.late = 0.0
    assert step(clock, lambda: all_gather(torch.ones(4), X)) == (3.0, 2.0)


def test_what_computation_hides_is_no_waiting(clock, network):
    def body():
        made = Event.made
        work = dist.all_reduce(X, async_op=True)
        # The call itself is no waiting, even if the host takes long for it.
        assert Event.made == made
        Stream.current.work(4.0)
        work.wait()

    assert step(clock, body) == (6.0, 6.0)
    network.late = 10.0
    assert step(clock, body) == (13.0, 6.0)


def test_options_by_keyword(clock, network):
    """A collective waits here, or not, by its options, in whatever way they are given."""
    network.late = 10.0
    options = dist.AllreduceOptions()

    def body():
        work = dist.group.WORLD.allreduce([X], opts=options)
        if options.asyncOp:
            Stream.current.work(4.0)
            work.wait()

    options.asyncOp = False
    assert step(clock, body) == (13.0, 2.0)
    options.asyncOp = True
    assert step(clock, body) == (13.0, 6.0)


def test_this_rank_is_late(clock):
    def body():
        Stream.current.work(10.0)
        dist.all_reduce(X)

    assert step(clock, body) == (13.0, 12.0)


def test_a_host_that_is_slow_makes_no_waiting(clock):
    def body():
        work = dist.all_reduce(X, async_op=True)
        Host.now += 10.0
        work.wait()
        Host.now += 10.0

    assert step(clock, body) == (20.0, 20.0)


def inside(stream, wait, event):
    """Make one stream wait while another is the current one."""
    with stream:
        wait(event)


@pytest.mark.parametrize(
    "wait",
    [
        lambda compute, own, event: compute.wait_event(event),
        lambda compute, own, event: compute.wait_stream(own),
        lambda compute, own, event: inside(own, compute.wait_event, event),
    ],
    ids=["event", "stream", "inside"],
)
def test_a_stream_of_its_own_as_fsdp_has(clock, network, wait):
    own = Stream()

    def body():
        compute, made = Stream.current, Event.made
        # Makes another stream wait.
        own.wait_stream(compute)
        with own:
            # Runs on that one.
            dist.all_reduce(X)
            network.late = 10.0
            dist.all_reduce(X)
            event = own.record_event()
        assert Event.made == made
        Stream.current.work(1.0)
        wait(compute, own, event)

    assert step(clock, body) == (2.0 + 12.0, 3.0)


def test_functional_collectives_wait_in_their_operator(clock, network):
    """As compiled graphs and C++ call it. Without a device no tensor of it can be passed, so the kernel is called."""
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this PyTorch cannot do it: the kernel cannot be called")
    kernel = torch.library.get_kernel("_c10d_functional::wait_tensor", "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    seen = []

    def body():
        before = Event.made
        assert kernel.call_boxed(keys, X) is X
        seen.append(Event.made - before)

    step(clock, body)
    assert seen == [2]


def test_one_wait_inside_of_another_counts_once(clock, network):
    def body():
        with clock.waiting():
            dist.all_reduce(X)
            with clock.waiting():
                Stream.current.work(3.0)

    assert step(clock, body) == (2.0 + 4.0, 2.0)


def test_other_threads_do_not_count(clock):
    """Such as one that saves a checkpoint while this one computes."""
    begun = threading.Event()
    over = threading.Event()

    def save():
        with clock.waiting():
            begun.set()
            over.wait(20)

    thread = threading.Thread(target=save)

    def body():
        thread.start()
        begun.wait(20)
        Stream.current.work(5.0)
        over.set()
        thread.join()

    assert step(clock, body) == (7.0, 7.0)


def test_a_backward_counts_in_whichever_thread_it_runs(clock):
    """That of an accelerator's tensors runs in a thread of PyTorch's."""

    def backward():
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda gradient: dist.all_reduce(X))
        x.sum().backward()

    def body():
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    assert step(clock, body) == (3.0, 2.0)


def test_an_evaluation_and_what_is_between_steps_do_not_count(clock):
    dist.all_reduce(X)
    clock.start()
    Stream.current.work(2.0)
    clock.pause()
    made = Event.made
    dist.all_reduce(X)
    assert Event.made == made
    clock.resume()
    dist.all_reduce(X)
    Stream.current.work(4.0)
    clock.end_step()
    dist.all_reduce(X)
    read = clock.read()
    assert (read["dt"], read[OWN]) == (7.0, 6.0)


def test_the_host_waits_in_read_alone_and_events_are_bounded(clock, monkeypatch):
    monkeypatch.setattr(module, "MOST_LAPS", 100)
    clock.start()
    for _ in range(60):
        dist.all_reduce(X)
        dist.all_reduce(X)
        clock.lap("dtf")
        assert len(clock._laps) <= 100
    Stream.current.work(7.0)
    clock.end_step()
    read = clock.read()
    assert (read["dt"], read[OWN]) == (127.0, 7.0)
    assert sum(name == WAITS for name, *_ in clock._laps) == 0


def test_what_cannot_be_told_apart_is_not_known(clock):
    """With offload, one wait is for other ranks and for the rank's own copies."""
    assert step(clock, lambda: None) == (2.0, 2.0)
    CPUOffloadPolicy()
    dt, own = step(clock, lambda: None)
    assert dt == 2.0
    assert math.isnan(own)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_everything_is_put_back(kind):
    """PyTorch's own methods, which are of C++ and need more than what `getattr` returns."""
    owners = {"wait": Work, "allreduce": ProcessGroup, "wait_event": torch.cuda.Stream, "__init__": CPUOffloadPolicy}
    before = {name: inspect.getattr_static(owner, name) for name, owner in owners.items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with timed_waits(StepClock(torch.device(kind))):
            dist.all_reduce(X)
            assert inspect.getattr_static(Work, "wait") is not before["wait"]
        assert {name: inspect.getattr_static(owner, name) for name, owner in owners.items()} == before
        dist.all_reduce(X)
        dist.all_reduce(X, async_op=True).wait()
    finally:
        dist.destroy_process_group()
