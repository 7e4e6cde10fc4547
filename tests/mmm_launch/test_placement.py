"""A rank a slot, also where hosts have different numbers of slots; what -n, -ppn and -N make of them."""

import re

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.run.attempts import Attempts
from mmm_launch.spec import hosts
from mmm_launch.spec.options import Elastic
from mmm_launch.spec.table import table
from support.plans import ENTRY, OPENMPI, line, plan

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "c[1-3]"}
UNEVEN = SLURM | {"SLURM_NTASKS": "11", "SLURM_TASKS_PER_NODE": "4(x2),3"}
QUIRK = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.fixture
def pbs(tmp_path):
    """A PBS job of a node file with 4 lines of x1 and 2 of x2."""
    (tmp_path / "nodes").write_text("x1\nx1\nx1\nx1\nx2\nx2\n")
    return {"PBS_JOBID": "5.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}


@pytest.mark.parametrize(
    ("environ", "hosts", "expected"),
    [
        (UNEVEN, ("c1", "c2", "c3"), (4, 4, 3)),
        (SLURM | {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "6,1(x2)"}, ("c1", "c2", "c3"), (6, 1, 1)),
        (SLURM | QUIRK, ("c1",), (1,)),  # sbatch -n 1 --ntasks-per-node=2: srun starts one
        (SLURM | QUIRK | {"SLURM_TASKS_PER_NODE": "2"}, ("c1",), (1,)),
        (SLURM | QUIRK | {"SLURM_NTASKS": "3"}, ("c1", "c2", "c3"), (1, 1, 1)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "2"}, ("c1", "c2", "c3"), (2, 2, 2)),
        (SLURM | {"SLURM_NTASKS": "9", "SLURM_NTASKS_PER_NODE": "2"}, ("c1", "c2", "c3"), (3, 3, 3)),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4(x2),3"}, ("c1", "c2", "c3"), (1, 1, 1)),  # no number was asked for
    ],
)
def test_the_tasks_of_a_slurm_job(environ, hosts, expected):
    made = plan(environ)
    assert (made.hosts.value, made.counts.value, made.ranks) == (hosts, expected, sum(expected))
    assert made.variables["WORLD_SIZE"] == str(sum(expected))


def test_one_process_a_host_of_an_uneven_job():
    cpus = UNEVEN | {"SLURM_CPUS_ON_NODE": "4"}
    assert "-N 3 -n 3 --export=ALL --ntasks-per-node=1 --cpus-per-task=4 " in line(plan(cpus))
    cpus |= {"SLURM_JOB_CPUS_PER_NODE": "4(x2),3"}  # 4 of the last node's 3 would be refused
    assert "-N 3 -n 3 --export=ALL --ntasks-per-node=1 --cpu-bind=none " in line(plan(cpus))


def test_a_line_a_rank_in_pbs(pbs):
    assert plan(pbs).counts.value == (4, 2)
    assert line(plan(pbs)) == "mpiexec -n 2 -ppn 1 -hosts x1,x2 " + ENTRY
    assert line(plan(pbs, OPENMPI)).startswith("mpiexec -n 2 --host x1:1,x2:1 --map-by slot --bind-to none ")
    assert "6, on these hosts 4 2   (a rank a slot)" in table(plan(pbs))


def test_the_slots_of_a_host_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb:4\nc\n")
    made = plan({}, hostfile=str(path))
    assert (made.counts.value, line(made)) == ((2, 4, 1), "mpiexec -n 3 -ppn 1 -hosts a,b,c " + ENTRY)
    path.write_text("a slots=1\nb slots=1\n")
    assert plan({}, hostfile=str(path), site="polaris", mpi="hydra").counts.value == (
        1,
        1,
    )  # not one a GPU: a rank a slot
    path.write_text("a\nb\n")
    assert plan({}, hostfile=str(path), site="polaris", mpi="hydra").counts.value == (4, 4)


def test_a_list_of_hosts_inside_a_job(pbs):
    assert plan(pbs, hosts="x2,x1").counts.value == (2, 4)
    assert plan(pbs, hosts="x2").counts.value == (2,)
    assert plan(pbs, hosts="x1:1,x2:2").counts.value == (1, 2)  # what is said by hand counts
    assert plan(UNEVEN, nhosts=2).counts.value == (4, 4)
    assert plan(UNEVEN, hosts="c3").counts.value == (3,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nproc": 6}, (4, 2)),
        ({"nproc": 5}, (3, 2)),
        ({"nproc": 4}, (2, 2)),
        ({"nproc": 1}, (1,)),
        ({"ppn": 1}, (1, 1)),
        ({"ppn": 2}, (2, 2)),
        ({"nproc": 4, "ppn": 3}, (3, 1)),
        ({"nhosts": 1}, (4,)),
    ],
)
def test_what_is_asked_for_decides(pbs, options, expected):
    assert plan(pbs, **options).counts.value == expected


@pytest.mark.parametrize("options", [{"nproc": 8}, {"ppn": 4}])
def test_more_ranks_than_slots(options):
    """What is asked for decides: a job is often given one task a host, for launch to start the ranks."""
    made = plan({}, hosts="a:1,b:1", **options)
    assert made.counts.value == (4, 4)
    assert made.notes[0].endswith("ranks 8, slots 2")


def test_ranks_spread_over_hosts():
    assert hosts.spread(7, [1, 8, 8]) == [1, 3, 3]
    assert hosts.spread(6, [4, 4, 4]) == [2, 2, 2]
    assert hosts.spread(4, [4, 4, 4]) == [2, 2, 0]
    assert hosts.in_words([4] * 20, 8) == "4 a host"
    assert hosts.in_words([4, 3] * 20, 8) == "on these hosts 4 3 4 3 4 3 4 3 …"


def test_too_many_on_one_of_the_hosts():
    with pytest.raises(LaunchError, match=re.escape("5000 ranks")):
        plan({}, hosts="a:1,b:5000")


def test_an_elastic_run_has_a_rank_a_slot(pbs):
    made = plan(pbs, elastic=Elastic(2, 6), spare_hosts=["x3"], hosts="x1:4,x2:2", nproc=6, scheduler="none")
    attempts = Attempts(made, None)
    assert attempts.places == [
        *(("x1", number) for number in range(4)),
        *(("x2", number) for number in range(2)),
        *(("x3", number) for number in range(4)),
    ]
    attempts.places.remove(("x1", 1))
    attempts.ranks = 5
    assert attempts.in_use() == {"x1": [0, 2, 3], "x2": [0, 1]}


def test_a_place_that_is_left_out_is_a_device_that_is(pbs):
    """Also where a rank of another number has the places behind it."""
    left = {"x1": [0, 2, 3], "x2": [0, 1]}
    made = plan(pbs, elastic=Elastic(2, 6), nproc=6, device="cuda", places=left)
    assert (made.hosts.value, made.counts.value) == (("x1", "x2"), (3, 2))
    first, second = (made.host_command(host, 0, {}) for host in (0, 1))
    assert (first["device_variable"], first["device_order"]) == ("CUDA_VISIBLE_DEVICES", [0, 2, 3])
    assert second["device_order"] == []
