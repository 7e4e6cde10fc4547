"""Process groups: every group of the mesh gives up after the timeout, and numbers come together by rank."""

import os
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mmm.errors import DeviceError, LaunchError
from mmm.parallel import Layout, build_mesh
from mmm.runtime import agreement
from mmm.runtime import process_group as groups
from mmm.runtime.process_group import gather_floats, locate, process_group
from mmm.runtime.ranks import Rank
from mmm_verify.testing import fork_ranks
from support.clock import PATIENCE

CPU = torch.device("cpu")


def gathered(rank):
    return gather_floats([float(rank.rank), 0.1], CPU)


def test_gather(run_on_ranks):
    assert run_on_ranks(gathered, 3) == [[[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]]] * 3


def waits_for_nobody(rank):
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", timeout=1.0)
    if rank.rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
            dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        return time.monotonic() - begin
    time.sleep(3)  # alive, but not coming
    return None


@pytest.mark.long
def test_groups_of_the_mesh_time_out(run_on_ranks):
    """By default they would wait half an hour, whatever the timeout of the default group."""
    assert run_on_ranks(waits_for_nobody, 4)[0] < 2.5


def test_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(LaunchError, match=f"MASTER_PORT {port}"),
            process_group(Rank(0, 2, 0, 2, "torchrun", "127.0.0.1", port), CPU, 5),
        ):
            pass


def located(rank, hosts):
    """The local numbers of a rank that was told none; and that it meets the others by the same store."""
    told = replace(rank, local_rank=None, local_world_size=None, port=rank.port)
    with patch.object(agreement.socket, "gethostname", lambda: hosts[rank.rank]):
        rank = locate(told, 20.0)
    with process_group(rank, CPU, 20.0):
        assert gather_floats([1.0], CPU) == [[1.0]] * rank.world_size
    return rank.local_rank, rank.local_world_size


def with_few_files(rank):
    """The world, two axes and their product: more sockets than this process may open at first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (os.open(os.devnull, os.O_RDONLY) + 16, hard))
    with process_group(rank, CPU, 20.0):
        mesh = build_mesh(Layout(dp_shard=2, cp=3), "cpu", 20.0)
        dist.barrier(mesh["dp_shard_cp"].get_group())
        dist.barrier()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def test_a_rank_may_open_as_many_sockets_as_the_system_allows():
    """Gloo connects every rank with every other, once a group: 1,024 files, as systems begin with, end near there."""
    assert fork_ranks(with_few_files, 6, timeout=PATIENCE) == [True] * 6


def test_local_numbers_that_nobody_says_come_from_the_hosts():
    found = fork_ranks(located, 4, "abab", timeout=PATIENCE)
    assert found == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_local_numbers_that_are_said_stay():
    rank = Rank(1, 2, 1, 2, "torchrun", "nowhere", 1)
    assert locate(rank) is rank
    assert locate(Rank(0, 1, 0, 1, "alone")).store is None


def on_one_device(rank):
    """As `launch -n 2` on a host with one GPU: before the backend starts."""
    with (
        patch.object(groups, "identity", lambda device: "GPU-1"),
        patch.object(agreement, "FIRST_WORD", 0.0),
        pytest.raises(DeviceError, match=r"0-1"),
        process_group(rank, torch.device("cuda", 0), 20.0),
    ):
        pass
    return dist.is_initialized()


def test_two_ranks_on_one_device_are_refused_before_its_backend_starts():
    assert fork_ranks(on_one_device, 2, timeout=PATIENCE) == [False, False]


def test_a_fork_after_a_run_has_a_group_of_its_own():
    """Not the threads of the run's, for which it would wait."""
    with process_group(Rank(0, 1, 0, 1, "alone"), CPU):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    del model
    assert fork_ranks(located, 2, "ab", timeout=PATIENCE) == [(0, 1), (0, 1)]


def again(rank, keeps, late):
    """Two runs of one process, rank `late` late for the second. keeps: the store that they meet by outlives a run."""
    told = locate(replace(rank, local_rank=None, local_world_size=None), 20.0) if keeps else rank
    for run in range(2):
        time.sleep(run * (rank.rank == late))
        with process_group(told, CPU, 20.0):
            assert gather_floats([1.0], CPU) == [[1.0]] * rank.world_size
    return True


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_next_run_of_a_process_does_not_meet_where_the_last_one_did(keeps, late):
    """Where the store outlives a run, as torchrun's does, a rank would read where the others listened before."""
    assert fork_ranks(again, 2, keeps, late, timeout=PATIENCE) == [True, True]


def test_alone():
    with process_group(Rank(0, 1, 0, 1, "alone"), CPU):
        assert dist.get_world_size() == 1
        assert gather_floats([2.0], CPU) == [[2.0]]
    assert not dist.is_initialized()


def where_the_store_listens(rank, address):
    with process_group(replace(rank, address=address), CPU, 20.0):
        tables = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        listening = [words[1] for words in tables if words[3] == "0A"]
        dist.barrier()
        return [place for place, _, port in (each.rpartition(":") for each in listening) if int(port, 16) == rank.port]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_the_store_of_a_run_on_one_host_listens_on_loopback_alone(address):
    loopback = "0" * 24 + "01000000" if ":" in address else "0100007F"
    assert fork_ranks(where_the_store_listens, 2, address, timeout=PATIENCE) == [[loopback]] * 2
