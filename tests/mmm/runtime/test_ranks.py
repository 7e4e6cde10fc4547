"""Who am I: a rank's place, from what each starter of processes sets. Process groups: every group of the mesh gives up
after the timeout, and numbers come together by rank."""

import os
import resource
import socket
import time
from dataclasses import replace
from datetime import timedelta
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
from mmm.runtime.ranks import Rank, whoami
from mmm.torch_private.groups import default_store
from mmm_launch import errors as launch_errors
from mmm_launch.spec.plan import refuse_inside_a_rank
from mmm_verify.testing import fork_ranks
from support.clock import PATIENCE

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1234",
}
# PyTorch's own contract.
UNSAID = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPENMPI = {
    f"OMPI_COMM_WORLD_{k}": v
    for k, v in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "3", "LOCAL_SIZE": "4", "NODE_RANK": "3"}.items()
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "7",
}
MVAPICH = {
    f"MV2_COMM_WORLD_{k}": v for k, v in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}
JSRUN = {f"JSM_NAMESPACE_{k}": v for k, v in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}
JSRUN |= {"MASTER_ADDR": "x1", "MASTER_PORT": "29500"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}
IN_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
PALS = {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PMI_SIZE": "24", "PMI_LOCAL_SIZE": "12"}
MEET = {"MASTER_ADDR": "x1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, (0, 1, 0, 1, "alone")),
        (TORCHRUN, (5, 8, 1, 4, "torchrun")),
        ({**TORCHRUN, "MMM_LAUNCH_ID": "1"}, (5, 8, 1, 4, "launch")),
        (MPICH, (1, 4, 1, 4, "mpich")),
        (OPENMPI, (3, 4, 3, 4, "openmpi")),
        ({**SLURM, **MEET}, (3, 4, 1, 2, "slurm")),
        (
            {**SLURM, **MEET, "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"},
            (4, 5, 1, 2, "slurm"),
        ),
        # Srun --mpi=pmi2.
        ({**SLURM, **MEET, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, 2, "mpich")),
        ({**MPICH, "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}, (1, 4, 1, 4, "mpich")),
        ({**PALS, **MEET}, (13, 24, 1, 12, "pals")),
        ({**SLURM, **MEET, **TORCHRUN}, (5, 8, 1, 4, "torchrun")),
        (MVAPICH, (1, 2, 1, 2, "mvapich")),
        ({name.replace("MV2", "MVP"): value for name, value in MVAPICH.items()}, (1, 2, 1, 2, "mvapich")),
        # mpirun_rsh inside a step of Slurm's
        ({**MVAPICH, **IN_STEP, "SLURM_NTASKS": "1"}, (1, 2, 1, 2, "mvapich")),
        (JSRUN, (3, 4, 1, 2, "jsrun")),
        ({**JSRUN, "PMIX_RANK": "3"}, (3, 4, 1, 2, "jsrun")),
        ({**FLUX, "FLUX_JOB_NNODES": "1"}, (1, 2, 1, 2, "flux")),
        ({**FLUX, **MEET, "FLUX_JOB_NNODES": "2"}, (1, 2, 1, None, "flux")),
        ({**FLUX, "FLUX_JOB_NNODES": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2, "mpich")),
        # Mpiexec in one task.
        ({**MPICH, **FLUX, "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, (1, 4, 1, 4, "mpich")),
        ({**MEET, **FLUX, "FLUX_TASK_RANK": "0", "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, None, None, "mpich")),
        # Srun --mpi=pmix.
        ({**SLURM, **MEET, "PMIX_RANK": "3"}, (3, 4, 1, 2, "slurm")),
        # Srun --pty bash.
        ({**IN_STEP, "SLURM_NTASKS": "1", "PMIX_RANK": "0"}, (0, 1, 0, 1, "slurm")),
        ({**OPENMPI, "PMIX_RANK": "3"}, (3, 4, 3, 4, "openmpi")),
        ({**TORCHRUN, "PMIX_RANK": "3", "ALPS_APP_PE": "2", "FLUX_TASK_RANK": "1"}, (5, 8, 1, 4, "torchrun")),
        # flux batch
        ({"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"}, (0, 1, 0, 1, "alone")),
        ({"NODE_RANK": "1", "GROUP_RANK": "1", "LOCAL_RANK": "1", "X_TASK_RANK": ""}, (0, 1, 0, 1, "alone")),
        ({"NODE_RANK": "1", "NODE_SIZE": "4", "X_RANK": "0", "X_SIZE": "1"}, (0, 1, 0, 1, "alone")),
        (UNSAID, (5, 8, 1, None, "torchrun")),
        ({**UNSAID, "MASTER_ADDR": "127.0.0.1"}, (5, 8, 1, 8, "torchrun")),
        ({**UNSAID, "RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 1, 1, "torchrun")),
        ({**MEET, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, None, None, "mpich")),
    ],
)
def test_place(env, place):
    me = whoami(env)
    assert (me.rank, me.world_size, me.local_rank, me.local_world_size, me.source) == place


def test_a_batch_script_is_no_rank():
    script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert whoami(script).source == "alone"


@pytest.mark.parametrize(
    "env",
    [
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-x@1"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-x@1"},
        {"ALPS_APP_PE": "1"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
        # Of some launcher to come.
        {"NEW_COMM_WORLD_RANK": "1", "NEW_COMM_WORLD_SIZE": "2"},
        {"NEW_RANK": "0", "NEW_SIZE": "2", "NEW_LOCAL_RANK": "0"},
        # Of its daemons
        {"PMIX_RANK": "5", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=lambda env: " ".join(env),
)
def test_a_rank_of_a_launcher_that_is_not_known(env):
    """Alone it would be one of several runs with one folder, each with a world of one."""
    name = next(iter(env))
    with pytest.raises(LaunchError, match=f"{name}={env[name]}"):
        whoami(env)
    with pytest.raises(launch_errors.LaunchError, match=f"{name}={env[name]}"):
        refuse_inside_a_rank(env)


@pytest.mark.parametrize("env", [MVAPICH, JSRUN, FLUX], ids=["mvapich", "jsrun", "flux"])
def test_launch_starts_no_ranks_in_one(env):
    with pytest.raises(launch_errors.LaunchError, match=f"already a rank \\({next(iter(env))}="):
        refuse_inside_a_rank(env)
    alone = {name: "1" if name.endswith("SIZE") else "0" for name in env}
    refuse_inside_a_rank(alone)


def test_ranks_of_one_mpiexec_agree_on_a_port():
    first = whoami(MPICH)
    second = whoami({**MPICH, "PMI_RANK": "2", "MPI_LOCALRANKID": "2"})
    assert first.address == second.address == "127.0.0.1"
    assert first.port == second.port
    assert 20_000 <= first.port < 32_000
    assert whoami({**MPICH, **MEET}).port == 29500


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**TORCHRUN, "RANK": "one"}, "RANK='one'"),
        ({**TORCHRUN, "RANK": "8"}, "between 0 and WORLD_SIZE=8"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({k: v for k, v in PALS.items() if k != "PMI_SIZE"}, "none of PMI_SIZE, PALS_SIZE"),
        ({**SLURM}, "MASTER_ADDR and MASTER_PORT"),
        ({**SLURM, "MASTER_ADDR": "x1"}, "MASTER_PORT=29500"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4"},
            "nothing says that the ranks are on one host",
        ),  # 127.0.0.1 is each host's own
    ],
)
def test_what_cannot_be(env, message):
    with pytest.raises(LaunchError, match=message):
        whoami(env)


CPU = torch.device("cpu")


def gathered(rank):
    return gather_floats([float(rank.rank), 0.1], CPU)


def test_gather(run_on_ranks):
    assert run_on_ranks(gathered, 3) == [[[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]]] * 3


def waits_for_nobody(rank):
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", timeout=2.0)
    store = default_store()
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
            dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        store.set("timed out", "")
    # The others are alive, but do not come.
    store.wait(["timed out"], timedelta(seconds=100))


@pytest.mark.long
def test_groups_of_the_mesh_time_out(run_on_ranks):
    """By default they would wait half an hour, whatever the timeout of the default group."""
    run_on_ranks(waits_for_nobody, 4)


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
    by_rank = fork_ranks(located, 4, "abab", timeout=PATIENCE)
    assert by_rank == [(0, 2), (0, 2), (1, 2), (1, 2)]


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
        listening = [fields[1] for fields in tables if fields[3] == "0A"]
        dist.barrier()
        return [
            place
            for place, _, port in (endpoint.rpartition(":") for endpoint in listening)
            if int(port, 16) == rank.port
        ]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_the_store_of_a_run_on_one_host_listens_on_loopback_alone(address):
    loopback = "0" * 24 + "01000000" if ":" in address else "0100007F"
    assert fork_ranks(where_the_store_listens, 2, address, timeout=PATIENCE) == [[loopback]] * 2
