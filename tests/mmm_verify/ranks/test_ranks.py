"""Forked ranks: what they return, and what is said of those that do not. They compute nothing here."""

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mmm
from mmm_verify.errors import LayoutError
from mmm_verify.ranks.group import process_group
from mmm_verify.ranks.ranks import dumps, free_port
from mmm_verify.testing import RanksFailed, fork_ranks
from support.clock import PATIENCE, stretched
from support.processes import running, wait_for, wait_for_ends
from support.signals import as_from_a_terminal
from support.thread_pool import ask_at_once, make


def place(rank, word):
    return rank.rank, rank.world_size, word, os.getppid()


def test_what_each_rank_returns():
    assert fork_ranks(place, 3, "word", timeout=PATIENCE) == [(rank, 3, "word", os.getpid()) for rank in range(3)]


def ask_for_the_thread_pool(rank):
    ask_at_once()
    return torch.get_num_threads()


def test_a_rank_has_the_thread_pool_that_the_fork_lost():
    before = torch.get_num_threads()
    make()
    try:
        assert fork_ranks(ask_for_the_thread_pool, 8, timeout=PATIENCE) == [1] * 8
    finally:
        torch.set_num_threads(before)


def fail(rank, do):
    if rank.rank == 1:
        do()
    time.sleep(0.2)
    if rank.rank == 0:
        raise RuntimeError("gloo: Connection closed by peer")
    time.sleep(200)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    # To this thread, as a fault does: `os.kill` lets any thread take it.
    signal.raise_signal(signal.SIGSEGV)


def refuse():
    raise LayoutError("does not\nfit")


def leave():
    os._exit(3)


@pytest.mark.parametrize(
    ("do", "reason", "code"),
    [
        (kill, "rank 1: killed by SIGKILL", -9),
        (crash, "rank 1: killed by SIGSEGV", -11),
        # A real-time one has no name.
        (lambda: os.kill(os.getpid(), 40), "rank 1: killed by signal 40", -40),
        (leave, "rank 1: exited with code 3 and said nothing", 3),
        (lambda: [].pop(), "rank 1: IndexError: pop from empty list", None),
        (refuse, "rank 1: does not fit", None),
        # Comes after what follows from it.
        (lambda: time.sleep(0.6) or kill(), "rank 1: killed by SIGKILL", -9),
        (lambda: None, "rank 0: RuntimeError: gloo: Connection closed by peer", None),
    ],
)
def test_the_cause_is_named(do, reason, code, monkeypatch):
    # However late it comes on a busy machine.
    if "rank 1" in reason:
        monkeypatch.setattr("mmm_verify.ranks.ranks.GRACE_DOUBTFUL", 50.0)
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        fork_ranks(fail, 3, do, timeout=PATIENCE)
    assert str(caught.value) == reason
    assert caught.value.code == code
    # It does not wait for the rank that sleeps.
    assert time.monotonic() - began < 60
    if "Index" in reason:
        assert "[].pop()" in caught.value.details
    if "SEGV" in reason:
        assert "in crash" in caught.value.details


def hang(rank, folder):
    (folder / str(rank.rank)).write_text(str(os.getpid()))
    if rank.rank:
        time.sleep(1000)


def test_ranks_that_hang_say_where_and_are_ended(tmp_path):
    with pytest.raises(RanksFailed, match=r"ranks 1, 2 of 3") as caught:
        fork_ranks(hang, 3, tmp_path, timeout=stretched(3))
    assert caught.value.details.count("in hang\n") == 2
    assert not running(tmp_path)


PROGRAM = """
import os, time
from pathlib import Path
from mmm_verify.testing import fork_ranks

def hang(rank):
    pid = os.fork()
    Path(f"{rank.rank}{'' if pid else ' forked'}").write_text(str(os.getpid()))
    time.sleep(1000)

fork_ranks(hang, 2, timeout=1000)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_nothing_outlives_the_program(tmp_path, signum):
    """Nor what its ranks have forked themselves."""
    env = {**os.environ, "PYTHONPATH": str(Path(mmm.__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_from_a_terminal(),
    )
    try:
        wait_for(tmp_path, 4)
        os.killpg(process.pid, signum)
        assert process.communicate(timeout=PATIENCE)[1].count("Traceback") == (signum == signal.SIGINT)
        wait_for_ends(tmp_path)
    finally:
        process.kill()


CPU = torch.device("cpu")
LOOPBACK = "0100007F"
LISTENING = "0A"


def where_the_store_listens(rank):
    with process_group(rank, CPU, 60.0):
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        places = [fields[1].split(":") for fields in lines if fields[3] == LISTENING]
        dist.barrier()
        return [address for address, port in places if int(port, 16) == rank.port]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_the_store_listens_on_loopback_alone():
    assert fork_ranks(where_the_store_listens, 2, timeout=PATIENCE) == [[LOOPBACK]] * 2


def wait_in_a_group_of_a_mesh(rank):
    with process_group(rank, CPU, 10.0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dist.barrier()
        if rank.rank % 2:
            time.sleep(20)
            return ""
        try:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
        except RuntimeError as error:
            return str(error)


# It waits for 20 s.
@pytest.mark.long
def test_groups_of_a_mesh_wait_no_longer_than_the_default_group():
    first, *_ = fork_ranks(wait_in_a_group_of_a_mesh, 4, timeout=PATIENCE)
    assert "Timed out" in first


def several(rank, ports):
    totals = []
    for port in ports:
        with process_group(replace(rank, port=port), CPU, 60.0):
            total = torch.ones(1)
            dist.all_reduce(total)
            totals.append(total.item())
            dist.barrier()
    return totals


def test_one_after_the_other():
    ports = [free_port() for _ in range(2)]
    assert fork_ranks(several, 2, ports, timeout=PATIENCE) == [[2.0, 2.0]] * 2


def late(rank):
    """Rank 1 still needs the store when rank 0, which has opened it, is done."""
    with process_group(rank, CPU, 60.0):
        if rank.rank == 1:
            time.sleep(0.5)
            dist.new_group([1], use_local_synchronization=True)
    return rank.rank


def test_the_store_outlives_the_rank_that_has_opened_it():
    assert fork_ranks(late, 2, timeout=PATIENCE) == [0, 1]


class Slow(dist.Store):
    """A store that answers late: its rank is connected when the others are already done."""

    def __init__(self, *args, **settings):
        super().__init__()
        self.store = TCPStore(*args, **settings)

    def get(self, key):
        time.sleep(0.05)
        return self.store.get(key)

    def set(self, *args):
        return self.store.set(*args)

    def add(self, *args):
        return self.store.add(*args)

    def wait(self, *args):
        return self.store.wait(*args)


TCPStore = dist.TCPStore


def done_at_once(rank, ports):
    if rank.rank == 1:
        dist.TCPStore = Slow
    for port in ports:
        with process_group(replace(rank, port=port), CPU, 60.0):
            pass


def test_a_rank_that_is_done_does_not_end_one_that_is_not_connected():
    """Gloo said "connection closed by peer", and a right program was accused. Which of two ranks connects is random."""
    ports = [free_port() for _ in range(8)]
    fork_ranks(done_at_once, 2, ports, timeout=PATIENCE)


def in_a_collective_alone(rank):
    with process_group(rank, CPU, 60.0):
        if rank.rank == 1:
            dist.all_reduce(torch.ones(1))


def test_connections_do_not_outlive_a_rank():
    """A rank that waits for one that is done fails at once, and not by a time-out."""
    with pytest.raises(RanksFailed, match="rank 1: RuntimeError"):
        fork_ranks(in_a_collective_alone, 2, timeout=PATIENCE)


FULL = torch.arange(12.0).reshape(3, 4)
TENSORS = [
    FULL[1:, ::2],
    FULL.t(),
    FULL > 3,
    FULL[:0],
    FULL.bfloat16()[2, 3],
    torch.complex(FULL, FULL).conj(),
    torch.nn.Parameter(FULL[2], requires_grad=False),
    FULL.clone().requires_grad_(),
]


def test_a_rank_sends_tensors_of_every_kind_and_no_more_than_their_elements():
    """A tensor goes as bytes: of a view, those that are its own, in its order."""
    came = pickle.loads(dumps(TENSORS))
    for one, other in zip(came, TENSORS, strict=True):
        assert (type(one), one.dtype, one.requires_grad) == (type(other), other.dtype, other.requires_grad)
        assert torch.equal(one, other)
    assert came[0].untyped_storage().nbytes() == 4 * 4
