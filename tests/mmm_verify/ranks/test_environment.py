"""What a framework finds on a forked rank: the variables that torchrun sets, at an address where groups can be made."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from mmm_verify import verify
from mmm_verify.ranks.group import process_group
from mmm_verify.subject import plain_step
from mmm_verify.testing import fork_ranks
from support.by_hand import averaged
from support.clock import PATIENCE

CPU = torch.device("cpu")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Variables that torchrun sets for other reasons than to say which rank this is.
OTHER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "OMP_NUM_THREADS",
}


def numbers():
    return [int(os.environ[name]) for name in NAMES]


def total():
    """The number of ranks, by way of the default group."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


def a_group_of_its_own(rank):
    # As a script does under torchrun: the address comes from the environment.
    dist.init_process_group("gloo")
    count = total()
    dist.barrier()
    dist.destroy_process_group()
    return numbers(), count, dist.is_torchelastic_launched()


def test_ranks_without_a_group_can_make_one():
    assert fork_ranks(a_group_of_its_own, 2, timeout=PATIENCE) == [
        ([0, 2, 0, 2], 2, True),
        ([1, 2, 1, 2], 2, True),
    ]


def another_group(rank):
    outside = dict(os.environ)
    with process_group(rank, CPU, 60.0):
        inside = numbers()
        first = total()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        second = total()
        dist.barrier()
    return inside, first, second, dict(os.environ) == outside


def test_a_framework_can_replace_the_group_that_is_up():
    assert fork_ranks(another_group, 2, timeout=PATIENCE) == [
        ([0, 2, 0, 2], 2, 2, True),
        ([1, 2, 1, 2], 2, 2, True),
    ]


def numbers_and_total(rank):
    return numbers(), total()


def test_ranks_of_the_pool_have_the_numbers_of_each_call(run_on_ranks):
    assert run_on_ranks(numbers_and_total, 3) == [([rank, 3, rank, 3], 3) for rank in range(3)]
    assert run_on_ranks(numbers_and_total, 2) == [([rank, 2, rank, 2], 2) for rank in range(2)]


def by_the_environment(model, mesh):
    """As a framework's set-up: it makes a group unless there is one, and asks the environment for the rest."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert numbers() == [dist.get_rank(), 2, dist.get_rank(), 2]
    averaged(model, mesh)


def test_of_verify():
    def batch():
        return torch.randn(4, 3), torch.randn(4, 2)

    assert verify(lambda: torch.nn.Linear(3, 2), by_the_environment, batch, plain_step, "dp2")


def names_here(rank):
    with process_group(rank, CPU, 60.0):
        return set(os.environ)


@pytest.mark.long
def test_the_variables_are_those_of_torchrun(tmp_path):
    """By a run of torchrun itself."""
    (tmp_path / "program.py").write_text("import os; print(*os.environ, flush=True)")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "program.py"]
    environ = {name: value for name, value in os.environ.items() if name not in OTHER}
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": True}
    run = subprocess.run(command, cwd=tmp_path, env=environ, **options)
    theirs = set(run.stdout.split()) - set(environ) - OTHER
    (ours,) = fork_ranks(names_here, 1, timeout=PATIENCE)
    assert theirs == ours - set(os.environ)
