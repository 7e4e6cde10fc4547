"""Real MPIs, a real Slurm of two nodes, and two hosts made of network namespaces, all on this machine, as root.

A tool that is missing is a skip that can be seen, or a failure where MMM_CLUSTER_TESTS=required is set.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from support.clock import PATIENCE

SLURM_CONF = """
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SwitchType=switch/none
KillWait=5
OverTimeLimit=0
MailProg=/bin/true
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=4 RealMemory=4000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


# Files that munged would share with one that is installed.
MUNGE_FILES = ("socket", "key-file", "pid-file", "log-file", "seed-file")


def free_ports(count):
    """So many ports in a row that nobody listens on."""
    for first in range(17000 + os.getpid() % 700 * 4, 20000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


class Mpi:
    def __init__(self, name):
        self.mpiexec = {"mpich": "mpiexec.mpich", "openmpi": "mpirun.openmpi"}[name]
        self.name = name
        self.host = ["--hosts", "localhost", "--mpiexec", self.mpiexec]
        self.options = [*self.host, "-n", "4"]
        self.variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Slurm:
    """Two nodes, n1 and n2, whose names nobody can resolve: MASTER_ADDR has to be set."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        for name in ("state", "log", "munge"):
            (folder / name).mkdir()
        first = free_ports(3)
        host = socket.gethostname().partition(".")[0]
        self.conf = folder / "slurm.conf"
        ports = {"control": first, "first": first + 1, "second": first + 2}
        self.conf.write_text(SLURM_CONF.format(host=host, folder=folder, **ports))
        self.variables = {"SLURM_CONF": str(self.conf)}

    def start(self):
        munge = self.folder / "munge"
        munge.chmod(0o755)
        subprocess.run(["mungekey", "--create", f"--keyfile={munge}/key"], check=True)
        files = [f"--{name}={munge}/{name.partition('-')[0]}" for name in MUNGE_FILES]
        self.daemon("munged", "--foreground", "--force", *files)
        self.wait(lambda: (munge / "socket").exists(), "munged")
        self.daemon("slurmctld", "-D", "-f", str(self.conf))
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-D", "-f", str(self.conf), "-N", node)
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.strip() == "idle 2", "two idle nodes")

    def daemon(self, name, *argv):
        path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        log = (self.folder / f"{name}.{len(self.daemons)}.out").open("w")
        options = {"env": os.environ | self.variables, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        self.daemons.append(subprocess.Popen([path, *argv], start_new_session=True, **options))

    def run(self, *argv, variables=None, cwd=None):
        env = os.environ | self.variables | (variables or {})
        return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)

    def wait(self, check, event, timeout=PATIENCE):
        deadline = time.monotonic() + timeout
        while not check():
            logs = "".join(path.read_text()[-1500:] for path in self.folder.rglob("*.out"))
            assert time.monotonic() < deadline, f"no {event} after {timeout} s\n{logs}"
            time.sleep(0.1)

    def allocate(self):
        """A job of both nodes, two tasks each; the variables of a shell in it."""
        done = self.run("salloc", "--no-shell", "-N2", "--ntasks-per-node=2")
        job = done.stderr.split("Granted job allocation ")[1].split()[0]
        nodes = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "2"}
        return job, self.variables | nodes | {"MASTER_ADDR": "127.0.0.1"}

    def idle(self):
        """Wait until no job is left."""
        self.wait(lambda: not self.run("squeue", "-h").stdout.strip(), "empty queue", 40)

    def end(self):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.run("scancel", "--user", "root")
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()


class Namespaces:
    """Hosts `mmmA` and `mmmB`, and a spare one: own network, own host name, a bridge on mmmA. `ssh` is a script."""

    NAMES = ("mmmA", "mmmB")
    SPARE = "mmmC"

    def __init__(self, folder):
        self.folder = folder
        self.ssh = folder / "ssh.sh"
        self.variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def start(self):
        # Tests that were killed leave their hosts.
        self.end()
        names = (*self.NAMES, self.SPARE)
        for name in names:
            ip("netns", "add", name)
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 mmmA\n10.77.0.2 mmmB\n10.77.0.3 mmmC\n")
        ip("-n", "mmmA", "link", "add", "vmmmA", "type", "bridge")
        for index, name in enumerate(names, start=1):
            if name != "mmmA":
                ip("-n", name, "link", "add", f"v{name}", "type", "veth", "peer", "name", f"p{name}", "netns", "mmmA")
                ip("-n", "mmmA", "link", "set", f"p{name}", "master", "vmmmA", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{index}/24", "dev", f"v{name}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"v{name}", "up")
        # As an sshd would: in a session of its own, and with no more of the environment than a login has.
        self.ssh.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            'exec env -i PATH="$PATH" HOME="$HOME" setsid --wait ip netns exec "$host" unshare --uts '
            'sh -c \'hostname "$0"; exec sh -c "$*"\' "$host" "$@"\n'
        )
        self.ssh.chmod(0o755)

    def separate(self, disk, megabytes, hidden):
        """Give mmmB a disk of its own of that size at `disk`, seen here as the returned folder, and hide `hidden`."""
        seen = self.folder / "disk-of-mmmB"
        seen.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "mmm", seen], check=True)
        mounts = f'mount --bind "{seen}" "{disk}" && mount -t tmpfs mmm "{hidden}" && '
        text = self.ssh.read_text().replace("--uts ", "--uts --mount ")
        self.ssh.write_text(text.replace('exec sh -c "$*"', f'{mounts}exec sh -c "$*"'))
        return seen

    def options(self, mpi):
        settings = {
            "mpich": f"-launcher ssh -launcher-exec {self.ssh}",
            "openmpi": f"--mca plm_rsh_agent {self.ssh} --mca btl_tcp_if_include 10.77.0.0/24 "
            "--mca oob_tcp_if_include 10.77.0.0/24",
        }[mpi]
        return [
            "--hosts",
            ",".join(self.NAMES),
            "-ppn",
            "2",
            "--mpiexec",
            Mpi(mpi).mpiexec,
            f"--launcher-args={settings}",
        ]

    def start_words(self):
        """What a program is started with to run on the first host."""
        return ["ip", "netns", "exec", "mmmA", "unshare", "--uts", "sh", "-c", 'hostname mmmA; exec "$0" "$@"']

    def cut(self):
        ip("-n", "mmmB", "link", "set", "vmmmB", "down")

    def end(self):
        subprocess.run(["umount", "-l", self.folder / "disk-of-mmmB"], stderr=subprocess.DEVNULL)
        for name in (*self.NAMES, self.SPARE):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def ip(*argv):
    subprocess.run(["ip", *argv], check=True, capture_output=True)


# Where CI asks for it, a missing MPI or Slurm is a failure.
STRICT = os.environ.get("MMM_CLUSTER_TESTS") == "required"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/cluster" in str(item.path):
            item.add_marker(pytest.mark.cluster)


def need(*programs, root=False):
    missing = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    missing += ["root's rights"] if root and os.geteuid() != 0 else []
    if missing:
        (pytest.fail if STRICT else pytest.skip)(f"missing for this test: {', '.join(missing)}")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    need("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "munged", "mungekey", root=True)
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture
def two_hosts(tmp_path):
    need("ip", "unshare", "mpiexec.mpich", "mpirun.openmpi", "setsid", root=True)
    made = Namespaces(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture
def mpi_of():
    """Four ranks on this host, by the MPI of a name."""

    def make(name):
        made = Mpi(name)
        need(made.mpiexec)
        return made

    return make


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request, mpi_of):
    return mpi_of(request.param)
