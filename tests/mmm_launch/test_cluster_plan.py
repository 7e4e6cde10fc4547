"""What launch would start on each machine, from an environment made by hand: of PBS, of Slurm, of lists of hosts; a
rank a slot; which of several sayings counts."""

import json
import os
import re

import pytest

from mmm_launch import main
from mmm_launch.errors import LaunchError, MachineError, UserError
from mmm_launch.program.target import Target
from mmm_launch.run.attempts import Attempts
from mmm_launch.spec import hosts, mpi
from mmm_launch.spec import plan as planning
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.options import Elastic, LaunchOptions
from mmm_launch.spec.scheduler import detect
from mmm_launch.spec.table import shown, table

TARGET = Target("module", "train", ("--lr", "1"))
ENTRY = "python3 -m mmm_launch.host.agent -m train --lr 1"
HYDRA = "HYDRA build details:\n    Version:                                 4.0.2\n"
OPENMPI = "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
PALS = "PALS version 1.3.4"
NO_GPU = Accelerators(None, 0, "torch is built for CPU")


def plan(environ, version=HYDRA, devices=NO_GPU, **options):
    return planning.plan(TARGET, LaunchOptions(**options), environ=environ, version=version, local=devices, build="cpu")


def line(made):
    return " ".join(shown(made.command))


# An allocation of two hosts.
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_aurora(pbs):
    made = plan(pbs("x4102c1s0b0n0", "x4102c1s1b0n0", job="9.aurora-pbs-0001.host"), PALS)
    assert re.sub(r"/\S+/nodes", "$PBS_NODEFILE", line(made)) == (
        "mpiexec -n 2 -ppn 1 --hostfile $PBS_NODEFILE --cpu-bind none " + ENTRY
    )
    assert (made.processes, made.ranks, made.bind.value[:13]) == (2, 24, "list:4-7:8-11")
    assert made.variables["MASTER_ADDR"] == "x4102c1s0b0n0.hsn.cm.aurora.alcf.anl.gov"
    assert made.variables["MMM_DEVICE"] == "xpu"


def test_sunspot(pbs):
    """Aurora's ranks and binding; its host file names the hosts by their first adapter."""
    names = [f"x1921c1s{blade}b0n0-hsn0.hsn.cm.sunspot.alcf.anl.gov" for blade in (0, 1)]
    job = "12464028.sunspot-pbs-0001.head.cm.sunspot.alcf.anl.gov"
    made = plan(pbs(*names, job=job), PALS)
    assert line(made) == line(plan(pbs(*names, job="9.aurora-pbs-0001.host"), PALS))
    assert made.machine.value.name == "Sunspot"
    assert made.variables["MASTER_ADDR"] == names[0]
    assert plan(pbs(*names, job=job), PALS, hosts="x1921c1s1b0n0").hosts.value == ("x1921c1s1b0n0",)
    short = plan(pbs("x1921c1s0b0n0", "x1921c1s1b0n0", job=job), PALS)
    assert short.variables["MASTER_ADDR"] == "x1921c1s0b0n0.hsn.cm.sunspot.alcf.anl.gov"


def test_polaris(pbs):
    made = plan(pbs("x3005c0s7b0n0", "x3005c0s13b0n0", PBS_O_HOST="polaris-login-01"), PALS)
    assert re.sub(r"/\S+/nodes", "$PBS_NODEFILE", line(made)) == (
        "mpiexec -n 2 -ppn 1 --hostfile $PBS_NODEFILE --cpu-bind none " + ENTRY
    )
    assert (made.machine.value.device_variable, made.device_order) == ("CUDA_VISIBLE_DEVICES", [3, 2, 1, 0])
    bound = plan(pbs("x1", "x2", PBS_O_HOST="polaris-login-01"), PALS, cpu_bind="list:0:8:16:24")
    assert (made.bind.value, bound.bind.value, bound.ranks) == ("cores", "list:0:8:16:24", 8)


def test_sophia(pbs):
    made = plan(pbs("sophia-gpu-01", "sophia-gpu-02", PBS_O_HOST="sophia-login-02"), OPENMPI)
    assert line(made).startswith("mpiexec -n 2 --host sophia-gpu-01:1,sophia-gpu-02:1 --map-by slot --bind-to none ")
    assert "-x MMM_CLUSTER" in line(made)
    assert (made.launcher.value, made.device.value, made.ranks) == ("openmpi", "cuda", 16)


def test_perlmutter():
    made = plan(SLURM | {"NERSC_HOST": "perlmutter"})
    expected = "--export=ALL --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=128 --cpu-bind=none"
    assert (line(made), made.ranks) == (f"srun -N 2 -n 2 {expected} {ENTRY}", 8)
    assert (made.variables["MASTER_ADDR"], made.variables["MASTER_PORT"]) == ("n1", "29500")
    assert plan(SLURM | {"NERSC_HOST": "perlmutter"}, attempt=1).variables["MASTER_PORT"] == "29501"


def test_frontier():
    environ = SLURM | {"LMOD_SYSTEM_NAME": "frontier"}
    made = plan(environ)
    assert (line(made), made.ranks) == (
        "srun -N 2 -n 2 --export=ALL -c56 --gpus-per-node=8 --cpu-bind=none " + ENTRY,
        16,
    )
    assert made.variables["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1,hsn2,hsn3"
    own = plan(environ | {"NCCL_SOCKET_IFNAME": "eth0"})
    # The user's, which srun passes on.
    assert "NCCL_SOCKET_IFNAME" not in own.variables


def test_any_cluster_with_slurm():
    made = plan(SLURM | {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_ON_NODE": "8"}, launcher_args=["--label"])
    expected = "--export=ALL --ntasks-per-node=1 --cpus-per-task=8 --cpu-bind=none --label"
    assert (line(made), made.ranks) == (f"srun -N 2 -n 2 {expected} {ENTRY}", 4)
    assert plan(SLURM | {"SLURM_NTASKS_PER_NODE": "3"}).ranks == 6
    launched = plan(SLURM, nhosts=1, ppn=2, variables=[("A", "b,c")], cpu_bind="cores")
    assert line(launched) == "srun -N 1 -n 1 --export=ALL --nodelist=n1 --ntasks-per-node=1 --cpu-bind=none " + ENTRY
    assert (launched.environ, launched.variables["A"], launched.variables["MASTER_ADDR"]) == (
        {"A": "b,c"},
        "b,c",
        "127.0.0.1",
    )


@pytest.mark.parametrize("version", [HYDRA, PALS, OPENMPI])
def test_values_of_variables_are_on_no_command_line(version):
    """`ps` shows a command line to everybody: an MPI has them from its environment, and is told names at most."""
    made = plan({}, version, hosts="a,b", nproc=4, variables=[("TOKEN", "s3cret")])
    assert made.environ == {"TOKEN": "s3cret"}
    assert made.variables["TOKEN"] == "s3cret"
    assert ("-x TOKEN " in line(made)) == (version is OPENMPI)
    assert "s3cret" not in line(made) + table(made)
    assert "TOKEN" in table(made)


def test_pbs_with_any_mpi(pbs, tmp_path):
    once = plan(pbs("a", "b"), ppn=3, variables=[("K", "V")])
    # Which passes on its own.
    assert line(once) == f"mpiexec -n 2 -ppn 1 -f {tmp_path}/nodes " + ENTRY
    assert once.environ == {"K": "V"}
    assert once.hosts.source == f"PBS_NODEFILE={tmp_path}/nodes"


def test_a_list_of_hosts_and_a_host_file(tmp_path):
    assert line(plan({}, hosts="a,b", nproc=4)) == "mpiexec -n 2 -ppn 1 -hosts a,b " + ENTRY
    path = tmp_path / "hosts"
    path.write_text("a\nb\n")
    assert line(plan({}, hostfile=str(path), ppn=1)) == f"mpiexec -n 2 -ppn 1 -f {path} " + ENTRY
    with pytest.raises(LaunchError, match="give one of them"):
        plan({}, hosts="a", hostfile=str(path))


def test_a_program_that_is_no_python():
    made = planning.plan(
        Target("program", "bash", command=("bash", "-c", "x")),
        LaunchOptions(hosts="a", ppn=1),
        environ={},
        version=HYDRA,
        build="cpu",
    )
    assert line(made).endswith("python3 -m mmm_launch.host.agent --exec bash -c x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nhosts": 3}, "-N 3: number of hosts listed: 2"),
        ({"nproc": 9, "ppn": 4}, "-n 9 with 4 a host"),
        ({"ppn": 5000}, "from 1 to 4096"),
        ({"cpu_bind": "socket", "ppn": 1}, "--cpu-bind"),
        ({"site": "perlmuter"}, "machine perlmuter"),
    ],
)
def test_numbers_that_contradict(options, says):
    with pytest.raises(UserError, match=re.escape(says)):
        plan({}, hosts="a,b", **options)


def test_hosts_that_are_not_the_jobs(pbs):
    with pytest.raises(LaunchError, match=r"123\.cluster"):
        plan(pbs("a", "b.example.org"), hosts="a,c")
    assert plan(pbs("a", "b.example.org"), hosts="b", ppn=1).hosts.value == ("b",)
    assert plan(pbs("a"), hosts="c", ppn=1, scheduler="none").hosts.value == ("c",)


# Environments of a process that is already a rank.
RANK_OF = [
    {"RANK": "0", "WORLD_SIZE": "2"},
    {"WORLD_SIZE": "4"},
    {"PMI_RANK": "0", "PMI_SIZE": "2"},
    {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    {"PALS_RANKID": "0", "PMI_SIZE": "2"},
]


@pytest.mark.parametrize("inside", RANK_OF, ids=lambda e: next(iter(e)))
@pytest.mark.parametrize("job", ["none", "pbs", "slurm", "both"])
@pytest.mark.parametrize("options", [{}, {"hosts": "n1"}], ids=["", "--hosts"])
def test_a_rank_starts_no_ranks_whatever_else_is_set(pbs, inside, job, options):
    environ = dict(inside)
    if job in ("pbs", "both"):
        environ |= pbs("n1")
    if job in ("slurm", "both"):
        environ |= SLURM
    with pytest.raises(LaunchError, match="already a rank"):
        plan(environ, **options)


@pytest.mark.parametrize(
    ("scheduler", "argv", "launcher", "hosts"),
    [
        # Slurm before PBS.
        (None, {}, "srun", ("n1", "n2")),
        ("pbs", {}, "hydra", ("p1",)),
        ("slurm", {}, "srun", ("n1", "n2")),
        # --hosts: of Slurm's job
        (None, {"hosts": "n2"}, "srun", ("n2",)),
        ("pbs", {"hosts": "p1"}, "hydra", ("p1",)),
        ("none", {"hosts": "q"}, "hydra", ("q",)),
        # An MPI's own start in a Slurm job.
        (None, {"mpiexec": "sh"}, "hydra", ("n1", "n2")),
    ],
)
def test_slurm_inside_pbs(pbs, scheduler, argv, launcher, hosts):
    made = plan(pbs("p1") | SLURM | {"PATH": os.environ["PATH"]}, scheduler=scheduler, ppn=1, **argv)
    assert (made.launcher.value, made.hosts.value) == (launcher, hosts)
    assert any("PBS job 123.cluster is in the environment too" in note for note in made.notes) == (scheduler is None)


def test_an_sbatch_script_may_launch():
    its = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert plan(SLURM | its).ranks == 2


def test_threads(pbs):
    assert plan(SLURM | {"OMP_NUM_THREADS": "3"}).threads.value == "3"
    made = plan(pbs("a", OMP_NUM_THREADS="64"), ppn=1)
    assert made.threads.value is None
    assert "OMP_NUM_THREADS" not in made.variables
    assert "the 64 in the environment is PBS's" in made.threads.source
    assert plan(SLURM, variables=[("OMP_NUM_THREADS", "2")]).variables["OMP_NUM_THREADS"] == "2"


def test_master_address():
    first = plan(SLURM)
    assert 20_000 <= int(first.variables["MASTER_PORT"]) < 32_000
    # Rank 0's host says another where it is taken.
    assert first.shared["MASTER_PORT"].is_wish
    from_user = plan(SLURM | {"MASTER_ADDR": "fast", "MASTER_PORT": "1234"})
    assert (from_user.variables["MASTER_ADDR"], from_user.variables["MASTER_PORT"]) == ("fast", "1234")
    with pytest.raises(LaunchError, match="MASTER_PORT=x"):
        plan(SLURM | {"MASTER_PORT": "x"})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (HYDRA, "hydra"),
        (OPENMPI, "openmpi"),
        ("mpirun (Open MPI) 5.0.7\n", "openmpi"),
        (PALS, "pals"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515", "hydra"),
        ("prterun (PRRTE) 3.0", "openmpi"),
        ("srun 22.05", None),
        ("", None),
    ],
)
def test_flavours(text, kind):
    assert mpi.read_version(text)[0] == kind


def test_an_mpiexec_that_is_not_known(pbs):
    with pytest.raises(LaunchError, match=r"1\.0'"):
        plan(pbs("a"), "fancy 1.0")
    assert plan(pbs("a", job="1.polaris-x"), "fancy 1.0").launcher.value == "pals"
    assert plan(pbs("a"), "fancy 1.0", mpi="openmpi").launcher.value == "openmpi"


def test_no_mpiexec_and_none_needed(tmp_path):
    with pytest.raises(LaunchError, match="PATH"):
        planning.plan(TARGET, LaunchOptions(hosts="a"), environ={"PATH": str(tmp_path)}, build="cpu")
    assert plan({}).is_local
    assert plan(SLURM, scheduler="none").is_local


def test_the_table_says_where_each_value_came_from(pbs):
    made = plan(pbs("x1", "x2", PBS_O_HOST="polaris-login-01"), PALS)
    text = table(made)
    for option in (
        "Polaris",
        "(PBS_O_HOST=polaris-login-01)",
        "pbs job 123.cluster   (PBS_JOBID=123.cluster)",
        "2: x1 x2",
        "8, 4 a host   (one per accelerator: Polaris)",
        "pals, one process a host, which starts its ranks   (mpiexec --version: PALS version 1.3.4)",
        "cores   (Polaris)",
        "3, 2, 1, 0 (CUDA_VISIBLE_DEVICES of local rank 0, 1, …)",
    ):
        assert option in text


def test_dry_run(pbs, monkeypatch, capsys, tmp_path):
    """The command itself, on a machine made of an environment and an mpiexec."""
    (tmp_path / "mpiexec").write_text(f"#!/bin/sh\necho '{PALS}'\n")
    (tmp_path / "mpiexec").chmod(0o755)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in pbs("x1", "x2", job="1.aurora-pbs", PATH=f"{tmp_path}:{os.environ['PATH']}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MMM_DEVICE", raising=False)
    assert main.main(["--dry-run", "-N", "1", "python3", "train.py"]) == 0
    captured = capsys.readouterr()
    assert "mpiexec -n 1 -ppn 1 --hosts x1 --cpu-bind none " in captured.out
    assert "1 of 2 hosts are used" in captured.err


PERLMUTTER = SLURM | {"NERSC_HOST": "perlmutter"}
FRONTIER = SLURM | {"LMOD_SYSTEM_NAME": "frontier"}


def test_devices_in_the_order_of_the_cores():
    """Perlmutter's GPUs are in reversed order; Frontier's by NUMA domain."""
    assert plan(PERLMUTTER).device_order == [3, 2, 1, 0]
    assert plan(FRONTIER).device_order == [4, 5, 2, 3, 6, 7, 0, 1]
    assert plan(FRONTIER).machine.value.device_variable == "ROCR_VISIBLE_DEVICES"
    assert plan(FRONTIER, device="cpu").device_order == []
    assert plan(PERLMUTTER, variables=[("CUDA_VISIBLE_DEVICES", "0")]).device_order == []


def test_a_sites_network_settings(pbs):
    made = plan(FRONTIER)
    assert made.variables["FI_CXI_RX_MATCH_MODE"] == "hybrid"
    # Without its plugin, or on one host, NCCL would refuse to start.
    assert "NCCL_NET" not in made.variables
    # Needs an allocation that was asked for with it.
    assert "FI_CXI_RDZV_PROTO" not in made.variables
    own = plan(FRONTIER | {"FI_MR_CACHE_MONITOR": "memhooks"}, variables=[("NCCL_CROSS_NIC", "0")])
    # The user's, which srun passes on.
    assert "FI_MR_CACHE_MONITOR" not in own.variables
    assert own.variables["NCCL_CROSS_NIC"] == "0"
    assert own.shared["NCCL_CROSS_NIC"].source == "--env"
    record = json.loads(own.variables["MMM_SITE"])
    assert (record["name"], record["device_order"]) == ("Frontier", [4, 5, 2, 3, 6, 7, 0, 1])
    assert not {"FI_MR_CACHE_MONITOR", "NCCL_CROSS_NIC"} & set(record["set"])
    assert record["set"]["NCCL_NET_GDR_LEVEL"] == "PHB"
    assert "MMM_SITE" not in plan(SLURM).variables

    aurora = plan(pbs("x1", "x2", job="9.aurora-pbs-0001.host"), PALS)
    assert aurora.variables["FI_MR_CACHE_MONITOR"] == "userfaultfd"


def test_a_sites_settings_are_said():
    explained = table(plan(FRONTIER))
    page = "https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html"
    assert re.search(rf"\nNCCL_CROSS_NIC +1   \(Frontier: {page}\)\n", explained)
    assert "MMM_SITE" not in explained
    own = table(plan(FRONTIER | {"NCCL_CROSS_NIC": "0"}))
    assert "NCCL_CROSS_NIC" not in own
    assert "RCCL uses TCP sockets, not Slingshot, unless its plugin is there" in own
    assert "advice" not in table(plan(FRONTIER, nhosts=1))


def test_two_sites_that_fit():
    with pytest.raises(MachineError, match=r"--site NAME"):
        plan(SLURM | {"NERSC_HOST": "perlmutter", "LMOD_SYSTEM_NAME": "frontier"})
    assert plan(SLURM | {"NERSC_HOST": "perlmutter", "LMOD_SYSTEM_NAME": "frontier"}, site="Frontier").ranks == 16


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


# Lists of hosts that nobody can expand.
HUGE = ["n[0-99999999999]", f"n[1-{'9' * 5000}]"]
MANY = ["n[1-999][1-999][1-999]", "n[0-999999]", "n[" + ",".join(["0-99999"] * 3) + "]", "a[0-99999],b[0-99999],c"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["", "n[1-", "n[3-1]", "n[a]", "n[]", "n 1", "n1,,n2", "n[²]", *HUGE])
def test_host_lists_that_are_wrong(text):
    with pytest.raises(LaunchError, match="host list"):
        hosts.expand(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", MANY)
def test_more_hosts_than_there_can_be(text):
    """A slip of this kind kept launch busy for a minute, or filled the memory."""
    with pytest.raises(LaunchError, match="200000 at most"):
        detect(SLURM | {"SLURM_JOB_NODELIST": text})


@pytest.mark.timeout(60)
def test_more_hosts_than_there_can_be_in_a_list_and_a_file(tmp_path, pbs):
    """None of these may be read to its end and planned for."""
    names = [f"n{index}" for index in range(200_001)]
    with pytest.raises(LaunchError, match="200000 at most"):
        hosts.parse_list(",".join(names))
    with pytest.raises(LaunchError, match="200000 at most"):
        detect(pbs(*names))
    assert len(hosts.expand("n[0-99999],m[0-99999]")) == 200_000


# A Slurm job of several parts, with other hosts in each.
HET = SLURM | {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[3-5]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "gpu7",
}


def test_components_of_a_slurm_job_that_are_not_used_are_named(pbs):
    made = plan(HET | pbs("p1"), ppn=1)
    assert made.hosts.value == ("n1", "n2")
    note, other = made.notes
    assert "SLURM_HET_SIZE=3" in note
    assert "n[3-5], gpu7" in note
    assert "n[1-2]" not in note
    assert "PBS job" in other
    assert not plan(SLURM | {"SLURM_HET_SIZE": "1"}, ppn=1).notes


# More nodes than there are.
LONG = "1(x99999),1(x99999),1(x99999)"


@pytest.mark.parametrize("text", ["4,x", "4(x2", "(x2)", "4(x99999999999)", LONG, "9" * 5000])
def test_tasks_of_nodes_that_cannot_be_read(text):
    with pytest.raises(LaunchError, match="is not a list of numbers such as"):
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


# An allocation of three hosts.
THREE = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "c[1-3]"}
UNEVEN = THREE | {"SLURM_NTASKS": "11", "SLURM_TASKS_PER_NODE": "4(x2),3"}
QUIRK = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.fixture
def slots(tmp_path):
    """A PBS job of a node file with 4 lines of x1 and 2 of x2."""
    (tmp_path / "nodes").write_text("x1\nx1\nx1\nx1\nx2\nx2\n")
    return {"PBS_JOBID": "5.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}


@pytest.mark.parametrize(
    ("environ", "hosts", "expected"),
    [
        (UNEVEN, ("c1", "c2", "c3"), (4, 4, 3)),
        (THREE | {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "6,1(x2)"}, ("c1", "c2", "c3"), (6, 1, 1)),
        # Sbatch -n 1 --ntasks-per-node=2: srun starts one.
        (THREE | QUIRK, ("c1",), (1,)),
        (THREE | QUIRK | {"SLURM_TASKS_PER_NODE": "2"}, ("c1",), (1,)),
        (THREE | QUIRK | {"SLURM_NTASKS": "3"}, ("c1", "c2", "c3"), (1, 1, 1)),
        (THREE | {"SLURM_NTASKS_PER_NODE": "2"}, ("c1", "c2", "c3"), (2, 2, 2)),
        (THREE | {"SLURM_NTASKS": "9", "SLURM_NTASKS_PER_NODE": "2"}, ("c1", "c2", "c3"), (3, 3, 3)),
        # No number was asked for.
        (THREE | {"SLURM_TASKS_PER_NODE": "4(x2),3"}, ("c1", "c2", "c3"), (1, 1, 1)),
    ],
)
def test_the_tasks_of_a_slurm_job(environ, hosts, expected):
    made = plan(environ)
    assert (made.hosts.value, made.counts.value, made.ranks) == (hosts, expected, sum(expected))
    assert made.variables["WORLD_SIZE"] == str(sum(expected))


def test_one_process_a_host_of_an_uneven_job():
    cpus = UNEVEN | {"SLURM_CPUS_ON_NODE": "4"}
    assert "-N 3 -n 3 --export=ALL --ntasks-per-node=1 --cpus-per-task=4 " in line(plan(cpus))
    # 4 of the last node's 3 would be refused
    cpus |= {"SLURM_JOB_CPUS_PER_NODE": "4(x2),3"}
    assert "-N 3 -n 3 --export=ALL --ntasks-per-node=1 --cpu-bind=none " in line(plan(cpus))


def test_a_line_a_rank_in_pbs(slots):
    assert plan(slots).counts.value == (4, 2)
    assert line(plan(slots)) == "mpiexec -n 2 -ppn 1 -hosts x1,x2 " + ENTRY
    assert line(plan(slots, OPENMPI)).startswith("mpiexec -n 2 --host x1:1,x2:1 --map-by slot --bind-to none ")
    assert "6, on these hosts 4 2   (a rank a slot)" in table(plan(slots))


def test_the_slots_of_a_host_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb:4\nc\n")
    made = plan({}, hostfile=str(path))
    assert (made.counts.value, line(made)) == ((2, 4, 1), "mpiexec -n 3 -ppn 1 -hosts a,b,c " + ENTRY)
    path.write_text("a slots=1\nb slots=1\n")
    # A rank a slot, and not one a GPU.
    assert plan({}, hostfile=str(path), site="polaris", mpi="hydra").counts.value == (1, 1)
    path.write_text("a\nb\n")
    assert plan({}, hostfile=str(path), site="polaris", mpi="hydra").counts.value == (4, 4)


def test_a_list_of_hosts_inside_a_job(slots):
    assert plan(slots, hosts="x2,x1").counts.value == (2, 4)
    assert plan(slots, hosts="x2").counts.value == (2,)
    # What is said by hand counts.
    assert plan(slots, hosts="x1:1,x2:2").counts.value == (1, 2)
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
def test_what_is_asked_for_decides(slots, options, expected):
    assert plan(slots, **options).counts.value == expected


@pytest.mark.parametrize("options", [{"nproc": 8}, {"ppn": 4}])
def test_more_ranks_than_slots(options):
    """What is asked for decides: a job is often given one task a host, for launch to start the ranks."""
    made = plan({}, hosts="a:1,b:1", **options)
    assert made.counts.value == (4, 4)
    assert made.notes[0].endswith("ranks 8, slots 2")


def test_slots_that_leave_accelerators_idle_are_told():
    """A job often gives a rank several GPUs, or a host one task: each rank uses one GPU, and nobody saw the others."""
    gpus = SLURM | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_GPUS_ON_NODE": "4"}
    made = plan(gpus | {"SLURM_GPUS_PER_TASK": "2"})
    assert made.counts.value == (2, 2)
    assert "2 of 4" in made.notes[0]
    assert "-ppn 4" in made.notes[0]
    assert not plan(gpus, ppn=4).notes[1:]
    assert not plan(gpus, device="cpu").notes
    assert not plan(gpus | {"SLURM_GPUS_ON_NODE": "2"}).notes


def test_ranks_spread_over_hosts():
    assert hosts.spread(7, [1, 8, 8]) == [1, 3, 3]
    assert hosts.spread(6, [4, 4, 4]) == [2, 2, 2]
    assert hosts.spread(4, [4, 4, 4]) == [2, 2, 0]
    assert hosts.spread(9, [5, 1, 2, 5]) == [3, 1, 2, 3]
    # at once
    assert hosts.spread(10**9 + 999, [1] * 999 + [10**9]) == [1] * 999 + [10**9]
    assert hosts.in_words([4] * 20, 8) == "4 a host"
    assert hosts.in_words([4, 3] * 20, 8) == "on these hosts 4 3 4 3 4 3 4 3 …"


def test_too_many_on_one_of_the_hosts():
    with pytest.raises(LaunchError, match=re.escape("5000 ranks")):
        plan({}, hosts="a:1,b:5000")


def test_an_elastic_run_has_a_rank_a_slot(slots):
    made = plan(slots, elastic=Elastic(2, 6), spare_hosts=["x3"], hosts="x1:4,x2:2", nproc=6, scheduler="none")
    attempts = Attempts(made, None)
    assert attempts.places == [
        (name, place) for name, size in (("x1", 4), ("x2", 2), ("x3", 4)) for place in range(size)
    ]
    attempts.places.remove(("x1", 1))
    attempts.ranks = 5
    assert attempts.in_use() == {"x1": [0, 2, 3], "x2": [0, 1]}


def test_a_place_that_is_left_out_is_a_device_that_is(slots):
    """Also where a rank of another number has the places behind it."""
    left = {"x1": [0, 2, 3], "x2": [0, 1]}
    made = plan(slots, elastic=Elastic(2, 6), nproc=6, device="cuda", places=left)
    assert (made.hosts.value, made.counts.value) == (("x1", "x2"), (3, 2))
    first, second = (made.host_command(host, 0, {}) for host in (0, 1))
    assert (first["device_variable"], first["device_order"]) == ("CUDA_VISIBLE_DEVICES", [0, 2, 3])
    assert second["device_order"] == []
