"""The pool of ranks behind `run_on_ranks`: what a call returns, and that nothing of it outlives a failure or a kill."""

import os
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mmm_verify.testing import RanksFailed
from support.processes import running, runs


def total(rank, factor):
    values = torch.full((2,), float(factor * rank.rank))
    dist.all_reduce(values)
    return values, os.getpid()


def test_ranks_stay_from_call_to_call(run_on_ranks):
    first = run_on_ranks(total, 2, 10)
    more = run_on_ranks(total, 3, 1)
    assert [values.tolist() for values, _ in first] == [[10.0] * 2] * 2
    assert [values.tolist() for values, _ in more] == [[3.0] * 2] * 3
    assert [pid for _, pid in first] == [pid for _, pid in more[:2]]


def deprecated(rank):
    warnings.warn("torch.something is deprecated", FutureWarning, stacklevel=1)


def test_what_is_deprecated_is_an_error_here_and_on_ranks(run_on_ranks):
    """By pyproject.toml, which has the exceptions."""
    with pytest.raises(FutureWarning):
        deprecated(None)
    for fresh in (False, True):
        with pytest.raises(RanksFailed, match=r"FutureWarning: torch\.something is deprecated"):
            run_on_ranks(deprecated, 1, fresh=fresh)


def without_group(rank):
    return rank.rank, dist.is_initialized(), os.getpid()


def test_fresh_ranks_are_gone_afterwards(run_on_ranks):
    ranks = run_on_ranks(without_group, 2, fresh=True)
    assert [rank[:2] for rank in ranks] == [(0, False), (1, False)]
    assert not any(runs(pid) for *_, pid in ranks)


def gather_a_sharded_tensor(rank, size):
    """Fills DTensor's caches with this call's mesh. Returns how many groups have a thread, of this call and earlier."""
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(size), mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    names = [(Path("/proc/self/task") / task / "comm").read_text() for task in os.listdir("/proc/self/task")]
    return sum("gloo_tcp_loop" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc on Linux alone")
def test_groups_of_earlier_calls_do_not_pile_up(run_on_ranks):
    counts = [max(run_on_ranks(gather_a_sharded_tensor, 2, 4 + call)) for call in range(5)]
    assert max(counts[1:]) <= counts[0], counts


def leave_a_group_at_work(rank):
    group = dist.new_group([0, 1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    # For the collector.
    model.cycle = model
    dist.all_reduce(torch.ones(30_000_000), group=group, async_op=True)
    return rank.rank


def cut(rank, *sizes):
    """The size of tp, cut out of a mesh that is cut out of another, or is the whole."""
    names = ("pp", "dp", "tp")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return mesh["dp", "tp"].size(), mesh["tp"].size()


def test_a_mesh_is_not_taken_for_a_part_of_an_earlier_one(run_on_ranks):
    """Of the same ranks, with the same names: PyTorch 2.8 then cuts nothing out of it."""
    assert run_on_ranks(cut, 4, 2, 1, 2) == [(2, 2)] * 4
    assert run_on_ranks(cut, 2, 1, 2) == [(2, 2)] * 2


def test_a_group_whose_thread_needs_python_at_the_end(run_on_ranks):
    """The reducer of DDP, freed by the collector, waits for a thread that waits for the collector's lock."""
    for _ in range(2):
        assert run_on_ranks(leave_a_group_at_work, 2, timeout=100.0) == [0, 1]


def leave_at_once(rank):
    return rank.rank


@pytest.mark.long
def test_calls_that_communicate_nothing_do_not_disturb_each_other(run_on_ranks):
    for _ in range(10):
        assert run_on_ranks(leave_at_once, 4) == [0, 1, 2, 3]


def fail_or_wait(rank, folder):
    (folder / str(rank.rank)).write_text(str(os.getpid()))
    if rank.rank:
        raise ValueError("planted")
    dist.barrier()


def test_a_failure_comes_with_its_traceback_and_ends_all(run_on_ranks, tmp_path):
    with pytest.raises(RanksFailed, match=r"^rank 1: ValueError: planted\nTraceback[\s\S]*in fail_or_wait"):
        run_on_ranks(fail_or_wait, 2, tmp_path)
    assert not running(tmp_path)
    assert len(run_on_ranks(total, 2, 1)) == 2


def sleep(rank, folder, seconds):
    (folder / str(rank.rank)).write_text(str(os.getpid()))
    time.sleep(seconds)
