"""Who am I: a rank's place, from what each starter of processes sets."""

import pytest

from mmm.errors import LaunchError
from mmm.runtime.ranks import whoami
from mmm_launch import errors as launch_errors
from mmm_launch.spec.plan import refuse_inside_a_rank

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1234",
}
UNSAID = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}  # PyTorch's own contract
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
        ({**SLURM, **MEET, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, 2, "mpich")),  # srun --mpi=pmi2
        ({**MPICH, "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}, (1, 4, 1, 4, "mpich")),
        ({**PALS, **MEET}, (13, 24, 1, 12, "pals")),
        ({**SLURM, **MEET, **TORCHRUN}, (5, 8, 1, 4, "torchrun")),
        (MVAPICH, (1, 2, 1, 2, "mvapich")),
        ({name.replace("MV2", "MVP"): value for name, value in MVAPICH.items()}, (1, 2, 1, 2, "mvapich")),
        ({**MVAPICH, **IN_STEP, "SLURM_NTASKS": "1"}, (1, 2, 1, 2, "mvapich")),  # mpirun_rsh inside a step of Slurm's
        (JSRUN, (3, 4, 1, 2, "jsrun")),
        ({**JSRUN, "PMIX_RANK": "3"}, (3, 4, 1, 2, "jsrun")),
        ({**FLUX, "FLUX_JOB_NNODES": "1"}, (1, 2, 1, 2, "flux")),
        ({**FLUX, **MEET, "FLUX_JOB_NNODES": "2"}, (1, 2, 1, None, "flux")),
        ({**FLUX, "FLUX_JOB_NNODES": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2, "mpich")),
        ({**MPICH, **FLUX, "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, (1, 4, 1, 4, "mpich")),  # mpiexec in one task
        ({**MEET, **FLUX, "FLUX_TASK_RANK": "0", "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, None, None, "mpich")),
        ({**SLURM, **MEET, "PMIX_RANK": "3"}, (3, 4, 1, 2, "slurm")),  # srun --mpi=pmix
        ({**IN_STEP, "SLURM_NTASKS": "1", "PMIX_RANK": "0"}, (0, 1, 0, 1, "slurm")),  # srun --pty bash
        ({**OPENMPI, "PMIX_RANK": "3"}, (3, 4, 3, 4, "openmpi")),
        ({**TORCHRUN, "PMIX_RANK": "3", "ALPS_APP_PE": "2", "FLUX_TASK_RANK": "1"}, (5, 8, 1, 4, "torchrun")),
        ({"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"}, (0, 1, 0, 1, "alone")),  # flux batch
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
        {"NEW_COMM_WORLD_RANK": "1", "NEW_COMM_WORLD_SIZE": "2"},  # of some launcher to come
        {"NEW_RANK": "0", "NEW_SIZE": "2", "NEW_LOCAL_RANK": "0"},
        {"PMIX_RANK": "5", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},  # of its daemons
    ],
    ids=lambda env: " ".join(env),
)
def test_a_rank_of_a_launcher_that_is_not_known(env):
    """Alone it would be one of several runs with one folder, each with a world of one."""
    name = next(iter(env))
    with pytest.raises(LaunchError, match=f"{name}={env[name]}"):
        whoami(env)
    if name != "NEW_RANK":  # it is not called as ranks are: launch does not take it for one
        with pytest.raises(launch_errors.LaunchError, match=f"{name}={env[name]}"):
            refuse_inside_a_rank(env)


@pytest.mark.parametrize("env", [MVAPICH, JSRUN, FLUX], ids=["mvapich", "jsrun", "flux"])
def test_launch_starts_no_ranks_in_one(env):
    with pytest.raises(launch_errors.LaunchError, match=f"already a rank \\({next(iter(env))}="):
        refuse_inside_a_rank(env)
    alone = {name: "1" if name.endswith("SIZE") else "0" for name in env}
    refuse_inside_a_rank(alone)


def test_ranks_of_one_mpiexec_agree_on_a_port():
    first, second = whoami(MPICH), whoami({**MPICH, "PMI_RANK": "2", "MPI_LOCALRANKID": "2"})
    assert first.address == second.address == "127.0.0.1"
    assert first.port == second.port
    assert 20_000 <= first.port < 32_000
    assert whoami({**MPICH, **MEET}).port == 29500


@pytest.mark.parametrize(
    ("env", "words"),
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
def test_what_cannot_be(env, words):
    with pytest.raises(LaunchError, match=words):
        whoami(env)
