"""What the environment says of a job: PBS, Slurm, both, none; host lists in every form they are written in."""

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.scheduler import detect

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}


def test_none():
    job = detect({"PATH": "/usr/bin", "PBS_O_HOST": "login", "SLURM_CLUSTER_NAME": "mini", "PBS_JOBID": "1"})
    assert (job.scheduler, job.hosts) == ("none", ())


def test_pbs_repeated_hosts(pbs):
    """`select=2:mpiprocs=2`: each host twice, and in a Torque file not even side by side."""
    for lines in (["a", "a", "b", "b"], ["a", "b", "a", "b"]):
        job = detect(pbs(*lines))
        assert (job.hosts, job.tasks, job.hostfile) == (("a", "b"), (2, 2), None)
    uneven = detect(pbs("a", "b", "a", "a"))
    assert (uneven.hosts, uneven.tasks, uneven.hostfile) == (("a", "b"), (3, 1), None)


def test_pbs_node_file_that_is_gone_or_empty(pbs, tmp_path):
    with pytest.raises(LaunchError, match="cannot be read"):
        detect({"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "none")})
    with pytest.raises(LaunchError, match="names no host"):
        detect(pbs("# nothing"))


def test_where_slurm_counts_pbs_is_not_read(pbs, tmp_path):
    gone = pbs("a") | SLURM | {"PBS_NODEFILE": str(tmp_path / "gone")}
    assert detect(gone).scheduler == "slurm"


@pytest.mark.parametrize("scheduler", ["pbs", "slurm"])
def test_a_scheduler_asked_for_that_is_not_there(scheduler):
    with pytest.raises(LaunchError, match=f"--scheduler {scheduler}"):
        detect({}, scheduler)


def test_a_slurm_variable_that_is_no_number():
    for text in ("four", "99999999999", "9" * 5000, "²"):
        with pytest.raises(LaunchError, match=f"SLURM_GPUS_ON_NODE={text[:80]}"):
            detect(SLURM | {"SLURM_GPUS_ON_NODE": text})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("nid[001-003,010]", "nid001 nid002 nid003 nid010"),
        ("n[9-11]", "n9 n10 n11"),
        ("a[1,3],b-c2,d[07]", "a1 a3 b-c2 d07"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("n[1-2].cluster", "n1.cluster n2.cluster"),
    ],
)
def test_slurms_host_lists(text, expected):
    assert hosts.expand(text) == expected.split()


HUGE = [
    "n[0-99999999999]",
    f"n[1-{'9' * 5000}]",
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", ["", "n[1-", "n[3-1]", "n[a]", "n[]", "n 1", "n1,,n2", "n[²]", *HUGE])
def test_host_lists_that_are_wrong(text):
    with pytest.raises(LaunchError, match="host list"):
        hosts.expand(text)


@pytest.mark.parametrize("text", ["4,x", "4(x2", "(x2)", "4(x99999999999)", "9" * 5000])
def test_tasks_of_nodes_that_cannot_be_read(text):
    with pytest.raises(LaunchError, match="is no list of numbers such as"):
        detect(SLURM | {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": text})


def test_a_host_file_in_its_dialects(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("\ufeff# mine\na\n\nb slots=4 max_slots=8\nc:2   # MPICH\na\nd\n", encoding="utf-8")
    assert hosts.parse_file(path) == {"a": 2, "b": 4, "c": 2, "d": 0}
    assert hosts.parse_list("a,b:3,c:1") == {"a": 0, "b": 3, "c": 1}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a slots=none", "'a slots=none' is not"),
        ("a slots=99999999999", "slots=99999999999' is not"),
        ("a slots=0", "'a slots=0' is not"),
        ("a ppn", "NAME slots=4"),
        ("[fe80::1]:4", "is not a host name"),
        ("-a", "'-a' is not a host name"),
        ("a;rm", "'a;rm' is not a host name"),
    ],
)
def test_a_host_file_that_is_wrong(tmp_path, line, says):
    path = tmp_path / "hosts"
    path.write_text(f"ok\n{line}\n")
    with pytest.raises(LaunchError, match=says) as caught:
        hosts.parse_file(path)
    assert "line 2" in str(caught.value)
