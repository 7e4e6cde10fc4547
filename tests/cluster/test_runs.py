"""The main example on real launchers: the losses of the local run, also on hosts with different numbers of slots; and
what a scheduler does to a run on its way."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import mmm.history
from mmm_launch.spec.hosts import free_port
from support.clock import PATIENCE, stretched

FLAGS = "--tpsize 2 --preset debug --dtype fp64 --max_iters 3 --no-plots --seq_length 32 --batch_size 2 --device cpu"
# What each run trains.
EXAMPLE = f"python3 -m mmm.examples.fsdp_tp {FLAGS} --outdir out".split()
LAUNCH = [sys.executable, "-m", "mmm_launch"]
# Files that ranks write once they run.
READY = tuple(f"ready-{rank}" for rank in range(4))


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """The losses on 4 ranks of this host."""
    folder = tmp_path_factory.mktemp("local")
    done = subprocess.run([*LAUNCH, "-n", "4", *EXAMPLE], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    losses = mmm.history.load(folder / "out").loss.values
    assert len(losses) == 3
    return losses


def same(launcher, done, local, ranks=4):
    assert done.returncode == 0, done.stderr
    data = mmm.history.load(launcher.folder / "out")
    assert data.sizes["rank"] == ranks
    assert abs(data.loss.values / local - 1).max() < 1e-9
    assert launcher.gone(within=2)


def test_one_host(launcher, mpi, local):
    same(launcher, launcher.run(*mpi.options, *EXAMPLE, timeout=PATIENCE, **mpi.variables), local)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_two_hosts(launcher, two_hosts, mpi, local):
    launcher.prefix = two_hosts.start_words()
    argv = [*two_hosts.options(mpi), *EXAMPLE, "--verbose"]
    done = launcher.run(*argv, timeout=PATIENCE, **two_hosts.variables)
    same(launcher, done, local)
    # Rank 3, local rank 1.
    assert re.search(r"\n +3 +1 +mmmB ", done.stdout), done.stdout


def test_salloc(launcher, slurm, local):
    argv = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2", *LAUNCH, *EXAMPLE]
    done = slurm.run(*argv, variables=launcher.environment(MASTER_ADDR="127.0.0.1"), cwd=launcher.folder)
    slurm.idle()
    same(launcher, done, local)
    assert "hosts           2: n1 n2" in done.stderr


def submit(launcher, slurm, text, *options):
    """A batch script of two nodes."""
    script = launcher.write("batch.sh", f"#!/bin/sh\n{text}")
    argv = ["sbatch", "-N2", "--ntasks-per-node=2", *options, str(script)]
    return slurm.run(*argv, variables=launcher.environment(MASTER_ADDR="127.0.0.1"), cwd=launcher.folder)


def batch(launcher, slurm, *argv, before=":"):
    """Run launch in a batch script of two nodes; the script's exit code and output."""
    line = " ".join([*LAUNCH, *argv])
    done = submit(launcher, slurm, f"{before}\n{line}\necho exit code $?\n: > over\n", "-o", "batch.out")
    # Sbatch --wait asks ever more rarely.
    launcher.wait_for("over", timeout=PATIENCE)
    slurm.idle()
    return done, (launcher.folder / "batch.out").read_text()


def test_sbatch(launcher, slurm, local):
    """The batch script has SLURM_PROCID=0 and is no rank."""
    done, text = batch(launcher, slurm, *EXAMPLE)
    assert "exit code 0" in text, text
    same(launcher, done, local)


def test_srun_by_itself(launcher, slurm, local):
    """Without launch: ranks find their place in Slurm's variables."""
    variables = launcher.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    done = slurm.run("srun", "-N2", "-n4", sys.executable, *EXAMPLE[1:], cwd=launcher.folder, variables=variables)
    slurm.idle()
    same(launcher, done, local)


def test_mpiexec_by_itself(launcher, mpi, local):
    """Without launch, and without a port: the ranks agree on one by what they have in common."""
    own = ["--oversubscribe", "--bind-to", "none"] if mpi.name == "openmpi" else []
    argv = [mpi.mpiexec, "-n", "4", *own, sys.executable, *EXAMPLE[1:]]
    env = launcher.environment(OMP_NUM_THREADS="1", **mpi.variables)
    done = subprocess.run(argv, cwd=launcher.folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    same(launcher, done, local)


def test_pbs_with_repeated_hosts(launcher, local):
    """A PBS job made by hand, on a real MPICH: each host twice in the node file; PBS's OMP_NUM_THREADS is not used."""
    host = os.uname().nodename
    launcher.write("nodes", f"{host}\n{host}\n{host}\n{host}\n")
    variables = {"PBS_JOBID": "12.mini", "PBS_NODEFILE": str(launcher.folder / "nodes"), "PBS_ENVIRONMENT": "PBS_BATCH"}
    variables["OMP_NUM_THREADS"] = "64"
    done = launcher.run("--mpiexec", "mpiexec.mpich", *EXAMPLE, timeout=PATIENCE, **variables)
    same(launcher, done, local)
    assert re.search(r"hosts +1: \S+ ", done.stderr)
    assert f"mpiexec.mpich -n 1 -ppn 1 -hosts {host} " in done.stderr
    looked = launcher.run("--mpiexec", "mpiexec.mpich", "sh", "-c", "echo $RANK $OMP_NUM_THREADS", **variables)
    assert {line.split()[0] for line in looked.stdout.splitlines()} == {"0", "1", "2", "3"}
    assert "64" not in looked.stdout


def test_retries_and_the_record(launcher, mpi):
    """The first try is killed after two rows: they can be read; the second goes through."""
    launcher.write(
        "t.py",
        """
import os, signal, sys, time
import mmm.history
from mmm.examples import fsdp_tp
from mmm.run.run import Run
if os.environ["MMM_ATTEMPT"] == "0":
    row = Run.row
    def dying(self, at, *args, **kw):
        done = row(self, at, *args, **kw)
        if at["iter"] == 1:
            time.sleep(0.3 * self.rank.rank)
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    Run.row = dying
sys.argv[1:1] = sys.argv.pop(1).split()
if os.environ["MMM_ATTEMPT"] == "1":
    sys.argv[sys.argv.index("--outdir") + 1] = "again"
fsdp_tp.train(fsdp_tp.example.parse(fsdp_tp.Config))
""",
    )
    flags = " ".join([*EXAMPLE[3:], "--flush_every", "1"])
    done = launcher.run(*mpi.options, "--retries", "1", "python3", "t.py", flags, timeout=PATIENCE, **mpi.variables)
    assert done.returncode == 0, done.stderr
    assert "launch: exit code 137: starting again" in done.stderr
    assert len(mmm.history.load(launcher.folder / "out").loss) == 2
    assert len(mmm.history.load(launcher.folder / "again").loss) == 3


WAITING = """
import os, signal, sys, time
rank = os.environ["RANK"]
def note(number, frame):
    open("seen-" + rank, "a").write(signal.Signals(number).name + " ")
signal.signal(signal.SIGUSR1, note)
open("ready-" + rank, "w")
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not (os.path.exists("seen-" + rank) and "leave" in sys.argv): time.sleep(0.05)
"""


def test_slurms_signal_before_the_end(launcher, slurm):
    """What `sbatch --signal=USR1@…` does, at once: each process of the step gets it. Ranks see it once, others not."""
    launcher.write("t.py", WAITING)
    line = " ".join([*LAUNCH, "--device cpu python3 t.py 60 leave > o 2> e"])
    text = f"{line}\necho $? > code.part\nmv code.part code\n"
    submit(launcher, slurm, text)
    launcher.wait_for(*READY, timeout=PATIENCE)
    job = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
    slurm.run("scancel", "--signal=USR1", job)
    launcher.wait_for("code", timeout=PATIENCE)
    slurm.idle()
    assert (launcher.folder / "code").read_text() == "0\n", (launcher.folder / "e").read_text()
    for rank in range(4):
        assert (launcher.folder / f"seen-{rank}").read_text().strip() == "SIGUSR1"


def test_a_job_that_was_submitted_without_an_environment(launcher, slurm):
    """`sbatch --export=NONE` leaves a variable by which every srun of the job starts without one, too."""
    launcher.write("t.py", "import os\nprint('rank', os.environ['RANK'], os.environ['MASTER_ADDR'], flush=True)\n")
    _, text = batch(launcher, slurm, "--device", "cpu", "python3", "t.py", before="export SLURM_EXPORT_ENV=NONE")
    assert "exit code 0" in text, text
    assert all(f"rank {rank} 127.0.0.1" in text for rank in range(4)), text


def test_the_batch_jobs_own_signal_is_passed_on(launcher, slurm):
    """What `sbatch --signal=B:USR1@…` does: it comes to the batch shell alone, which is launch, if that was exec'd."""
    launcher.write("t.py", WAITING)
    text = f"exec {' '.join(LAUNCH)} --device cpu python3 t.py 60 leave\n"
    submit(launcher, slurm, text)
    launcher.wait_for(*READY, timeout=PATIENCE)
    job = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    launcher.wait_for("seen-0", "seen-3", timeout=PATIENCE)
    slurm.idle()
    assert launcher.gone(within=2)


def test_slurms_time_limit(launcher, slurm):
    """A minute, and up to half a minute until Slurm looks. The batch shell is not asked to end, launch is told why."""
    launcher.write("t.py", WAITING)
    text = f"{' '.join(LAUNCH)} --device cpu python3 t.py 100 > o 2> e\necho $? > code\n"
    submit(launcher, slurm, text, "--time=1")
    launcher.wait_for(*READY, timeout=PATIENCE)
    # A minute, and Slurm looks every half.
    deadline = time.monotonic() + 110
    while not launcher.gone(within=0):
        if "TIMEOUT" in slurm.run("squeue", "-h", "-t", "all", "-o", "%T").stdout:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert launcher.gone(within=10), "left 10 s after the time limit"
    slurm.idle()
    err = (launcher.folder / "e").read_text()
    assert "TIME LIMIT" in err
    assert "SIGTERM" in err


def test_a_master_address_that_is_taken(launcher, mpi):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = launcher.run(*mpi.options, "sh", "-c", "sleep 20", MASTER_PORT=port, **mpi.variables)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr
    assert done.stderr.count("error:") == 1


def test_mpiexec_of_another_kind(launcher):
    """The wrong --mpi: the ranks' variables are not those that it sets."""
    argv = ["--hosts", "localhost", "-n", "2", "--mpiexec", "mpiexec.mpich", "--mpi", "pals"]
    done = launcher.run(*argv, "--launcher-args=-hosts localhost", "sh", "-c", "sleep 20")
    assert done.returncode != 0
    assert "launch:" in done.stderr


def test_a_second_ctrl_c_kills_at_once(launcher, mpi):
    deaf = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program = deaf + "open('ready-' + os.environ['RANK'], 'w')\ntime.sleep(60)"
    process = launcher.begin(program, *mpi.host, ranks=4, **mpi.variables)
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert launcher.gone(within=2)
    assert time.monotonic() - begin < stretched(4)


def test_hosts_that_do_not_start(launcher, mpi):
    """An mpiexec that ends before its ranks are there is said, with what it printed."""
    argv = f"--hosts localhost,no-such-host-1 -ppn 1 --mpiexec {mpi.mpiexec} --start-timeout 8 sh -c true".split()
    done = launcher.run(*argv, timeout=PATIENCE, **mpi.variables)
    assert done.returncode not in (0, 2)
    assert "have not connected to launch" in done.stderr
    assert "no-such-host-1" in done.stderr
    assert launcher.gone(within=2)


PROGRAM = """
import os, socket
import torch, torch.distributed as dist
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import whoami
me = whoami()
with process_group(me, torch.device("cpu"), 60.0):
    total = torch.ones(1)
    dist.all_reduce(total)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    place = f"{me.rank}/{me.world_size} {me.local_rank}/{me.local_world_size} {host} {total.item():g}\\n"
    print(place, end="", flush=True)
"""


def places(text, *hosts):
    """What the program prints where the hosts have these ranks: name and number."""
    total = sum(n_ranks for _, n_ranks in hosts)
    expected = []
    for name, n_ranks in hosts:
        # Ranks of the hosts before it.
        first = len(expected)
        expected += [f"{first + i}/{total} {i}/{n_ranks} {name} {total}" for i in range(n_ranks)]
    return sorted(line for line in text.splitlines() if line.endswith(f" {total}")) == sorted(expected)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
def test_an_uneven_list_of_hosts(launcher, two_hosts, mpi, sizes):
    launcher.write("t.py", PROGRAM)
    launcher.prefix = two_hosts.start_words()
    _, _, _, _, *options = two_hosts.options(mpi)
    hosts = [*zip(two_hosts.NAMES, sizes, strict=True)]
    named = ",".join(f"{name}:{n_ranks}" for name, n_ranks in hosts)
    argv = ["--hosts", named, *options, "--device", "cpu", "python3", "t.py"]
    done = launcher.run(*argv, timeout=PATIENCE, **two_hosts.variables)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout, *hosts), done.stdout


@pytest.mark.parametrize(("asked", "sizes"), [(["-n6"], (4, 2)), (["-N2", "-n5", "--exclusive"], (3, 2))])
def test_uneven_salloc(launcher, slurm, asked, sizes):
    launcher.write("t.py", PROGRAM)
    argv = ["salloc", "--quiet", *asked, *LAUNCH, "--device", "cpu", "python3", "t.py"]
    variables = launcher.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    done = slurm.run(*argv, variables=variables, cwd=launcher.folder)
    slurm.idle()
    assert done.returncode == 0, done.stderr
    assert places(done.stdout, *zip(("n1", "n2"), sizes, strict=True)), done.stdout + done.stderr


@pytest.mark.parametrize("asked", [["-N2", "-n3", "--ntasks-per-node=2"], ["-N1", "-n1", "--ntasks-per-node=2"]])
def test_sbatch_has_as_many_as_srun_starts(launcher, slurm, asked):
    """Its variables name three numbers, of which srun takes SLURM_NTASKS."""
    launcher.write("t.py", PROGRAM)
    lines = [
        "#!/bin/sh",
        "srun sh -c 'echo srun'",
        " ".join([*LAUNCH, "--device", "cpu", "python3", "t.py"]),
        ": > over",
    ]
    script = launcher.write("batch.sh", "\n".join(lines) + "\n")
    variables = launcher.environment(MASTER_ADDR="127.0.0.1")
    slurm.run("sbatch", "-o", "batch.out", *asked, str(script), variables=variables, cwd=launcher.folder)
    launcher.wait_for("over", timeout=PATIENCE)
    slurm.idle()
    text = (launcher.folder / "batch.out").read_text()
    n_ranks = text.splitlines().count("srun")
    assert n_ranks == int(asked[1].removeprefix("-n"))
    assert places(text, *{1: [("n1", 1)], 3: [("n1", 2), ("n2", 1)]}[n_ranks]), text
