"""The process group of forked ranks: who can reach its store, and how long its groups wait."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmm_verify.ranks.group import process_group
from mmm_verify.testing import fork_ranks
from support.clock import PATIENCE

CPU = torch.device("cpu")
LOOPBACK = "0100007F"
LISTENING = "0A"


def where_the_store_listens(rank):
    with process_group(rank, CPU, 60.0):
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        places = [words[1].split(":") for words in lines if words[3] == LISTENING]
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


def test_groups_of_a_mesh_wait_no_longer_than_the_default_group():
    first, *_ = fork_ranks(wait_in_a_group_of_a_mesh, 4, timeout=PATIENCE)
    assert "Timed out" in first


def several(rank):
    totals = []
    for _ in range(2):
        with process_group(rank, CPU, 60.0):
            total = torch.ones(1)
            dist.all_reduce(total)
            totals.append(total.item())
            dist.barrier()
        rank = replace(rank, port=rank.port + 1)
    return totals


def test_one_after_the_other():
    assert fork_ranks(several, 2, timeout=PATIENCE) == [[2.0, 2.0]] * 2
