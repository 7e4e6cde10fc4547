"""The contract between `launch` and its ranks. It imports only the standard library.

It has the names of environment variables, the variables by which launchers such as mpiexec number their processes, the
number of files that a process may open, a rank's report on the failure socket, the times of a start-up, and how to read
a file that somebody else wrote. It is the one module of this package that `mmm` imports.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

# Launch shares the cores of a host among its ranks, and programs among their workers.
from mmm_launch.cores import usable_cores as usable_cores

# Both read files that others wrote, and print what is in them.
from mmm_launch.files import LARGEST as LARGEST
from mmm_launch.files import LONGEST_SHOWN as LONGEST_SHOWN
from mmm_launch.files import open_file as open_file
from mmm_launch.files import parse_json as parse_json
from mmm_launch.files import printable as printable
from mmm_launch.files import printable_lines as printable_lines
from mmm_launch.files import read_file as read_file
from mmm_launch.files import read_json as read_json
from mmm_launch.files import short as short

# Path of the file that says why launch ends the run. It is empty until launch does.
VERDICT_VARIABLE = "MMM_LAUNCH_VERDICT"
# The same value in every process of one launch, and in no other process of the host.
MARKER_VARIABLE = "MMM_LAUNCH_ID"
# The device type that was chosen or found: cpu, cuda, xpu, mps.
DEVICE_VARIABLE = "MMM_DEVICE"
# 0, 1, …: how often --retries or --elastic has started the program again.
ATTEMPT_VARIABLE = "MMM_ATTEMPT"
# The same value in all attempts of one launch, and in no other launch.
ATTEMPTS_VARIABLE = "MMM_ATTEMPTS_OF"
# MIN:MAX. Attempts have different numbers of ranks, and resume from a checkpoint.
ELASTIC_VARIABLE = "MMM_ELASTIC"
# The command line as typed, for the run's record.
LINE_VARIABLE = "MMM_LAUNCH_LINE"
# JSON, for the run's record: the known machine, and what launch has set for it.
SITE_VARIABLE = "MMM_SITE"
# When launch itself was started, in seconds since 1970.
BEGAN_VARIABLE = "MMM_LAUNCH_BEGAN"
# When the job was started, if the job's script says so. It replaces the time above.
STARTED_VARIABLE = "MMM_STARTED_AT"
# FD:PID. The process PID, a rank, sends its `Report`s to this file descriptor.
SOCKET_VARIABLE = "MMM_FAILURE_SOCKET"
# JSON: when the program began, and how long the imports before the fork took.
PROGRAM_VARIABLE = "MMM_PROGRAM"

# Each of these ends a run: launch, and every rank, which may first save and clean up.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ports for rank 0. They lie below the range from which systems number outgoing connections.
PORTS = range(20_000, 32_000)
USER_ERROR_EXIT = 2
# A rank exits with it when a signal has stopped the run and its state is saved: EX_TEMPFAIL, "try again".
SAVED_EXIT = 75
# Seconds in which a host has to reach itself.
SELF_TIMEOUT = 5.0
# A second SIGINT within this many seconds is the same Ctrl-C: the terminal signals the whole
# process group, and mpiexec or srun passes it on once more.
REPEAT = 0.3

# A rank's traceback contains one of these when the rank failed because another rank was gone.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "DistNetworkError",
    "DistStoreError",
    "failed to recv",
    "Timed out waiting",
    "NCCL communicator was aborted",
)


# The launcher (`LaunchSpec.launcher`) → the variable in which it tells each process its number.
NUMBERED_BY = {
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "pals": "PALS_RANKID",
    "hydra": "PMI_RANK",
    "srun": "SLURM_PROCID",
    "flux": "FLUX_TASK_RANK",
}


class RankVariables(NamedTuple):
    """The variables in which a launcher tells its processes their numbers; of each tuple, the first that is set counts.

    Attributes:
        rank: variables of the rank.
        world: variables of the world size.
        local_rank: variables of the local rank.
        local_world: variables of the number of ranks on the host.
    """

    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]


# A launcher whose ranks find their places without `launch` is one entry here, and one row in docs/clusters.md. The
# order matters: a launcher that is usually started by another one, and so is closer to the process, comes before it.
RANK_VARIABLES = {
    "torchrun": RankVariables(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "openmpi": RankVariables(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "pals": RankVariables(
        ("PALS_RANKID",),
        ("PMI_SIZE", "PALS_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ),
    "mpich": RankVariables(
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    "mvapich": RankVariables(
        ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
    ),
    "jsrun": RankVariables(
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    "flux": RankVariables(("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), ()),
    "slurm": RankVariables(("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
}

# Variables of launchers that tell a rank but no world size, and the form of names that no launcher known here uses.
UNSIZED = ("PMIX_RANK", "ALPS_APP_PE", "PMI_ID", "MPI_RANKID", "MPIRUN_RANK", "MP_CHILD", "HOROVOD_RANK")
RANK_LIKE = re.compile(r"\w+_(COMM_WORLD|WORLD|GLOBAL|NAMESPACE|JOB|TASK|APP)_(RANK|RANKID|PROCID|PE)")


def numbering(environ: Mapping[str, str]) -> str | None:
    """Name the launcher that has made this process a rank, as in `RANK_VARIABLES`. None: no launcher known here has."""
    for source, names in RANK_VARIABLES.items():
        variable = first_set(environ, names.rank)
        if variable is None:
            continue
        if source != "slurm":
            return source
        # A batch script of Slurm's has SLURM_PROCID=0 and SLURM_NTASKS=N too, but only a process inside a step is a
        # rank. PRRTE starts its daemons by srun, so that their Slurm ranks are in the environment of PRRTE's ranks.
        slurm_rank = environ[variable]
        if "SLURM_STEP_ID" in environ and environ.get("PMIX_RANK", slurm_rank) == slurm_rank:
            return source
    return None


def first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first of the variables `names` that is set. None: none of them is."""
    for name in names:
        if name in environ:
            return name
    return None


def unknown_numbering(environ: Mapping[str, str]) -> str | None:
    """Return the variable by which a launcher that is not in `RANK_VARIABLES` says that this process is a rank."""
    for name in sorted(environ):
        if environ[name].isdigit() and _says_rank(name, environ):
            return name
    return None


def _says_rank(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable of an unknown launcher tells a rank, by its own name or by a size above 1 of the same name."""
    if name in UNSIZED or RANK_LIKE.fullmatch(name) is not None:
        return True
    prefix, _, ending = name.rpartition("_")
    if ending != "RANK" or prefix in ("LOCAL", "NODE", "GROUP"):
        return False
    size = environ.get(f"{prefix}_SIZE", "")
    return size.isdigit() and int(size) > 1


def place_of_rank(environ: Mapping[str, str]) -> str | None:
    """Return the variable by which a launcher has made this process one of several ranks. None: it is not a rank."""
    name = first_set(environ, ("RANK", "WORLD_SIZE"))
    if name is not None:
        return name
    source = numbering(environ)
    if source is None:
        return unknown_numbering(environ)
    variables = RANK_VARIABLES[source]
    # `mpiexec -n 1 launch …`: a single process may start ranks.
    if environ.get(first_set(environ, variables.world) or "") == "1":
        return None
    return first_set(environ, variables.rank)


# The most hosts of a job. The largest machines have 160,000.
MOST_HOSTS = 200_000


def counts_of_nodes(text: str) -> list[int] | None:
    """Read what Slurm says of each node: `4(x2),3` → 4, 4, 3. None: `text` is not such a list, or a longer one."""
    counts: list[int] = []
    for entry in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", entry)
        if match is None:
            return None
        repeats = int(match[2] or 1)
        if len(counts) + repeats > MOST_HOSTS:
            return None
        counts += [int(match[1])] * repeats
    return counts


def unreachable(address: str, port: int = 0) -> str:
    """Say why this host cannot listen at an address, or cannot reach itself there. "": it can."""
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6
    try:
        with socket.create_server((address, port), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=SELF_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def missing_folder() -> str:
    """Say that the working folder is gone: relative paths mean nothing there, and some libraries abort. Else ""."""
    try:
        os.getcwd()
    except OSError as error:
        return f"the working folder is gone ({error.strerror}): it was removed or renamed. Change to one that exists."
    return ""


def open_files() -> int:
    """Raise this process's limit of file descriptors as far as allowed, and return it. −1: there is no limit."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports "unlimited" as the limit, and then refuses to set it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# The failure socket.

# The most characters of a report. A datagram has to fit in the socket's buffer.
MAX_TEXT = 60_000
SOCKET_BUFFER = 1 << 20
# Seconds. launch reads all the time, so only a launch that hangs lets a rank wait this long.
SEND_TIMEOUT = 1.0


@dataclass(frozen=True)
class Report:
    """A rank's own report of why it ends.

    Attributes:
        rank: number of the rank.
        kind: "traceback": an exception that nobody caught. "user": a `UserError`, of which only `error: <text>` is
            printed. "layout": the same, but another number of ranks may work. "exit": `sys.exit("text")`, printed as
            it is. "saves": the rank does not end now, but will save its state when somebody ends the run.
        text: the traceback or the message.
        exit_code: the rank's exit code.
        time: when the exception was caught, by `time.monotonic()` of the rank's host.
    """

    rank: int
    kind: str
    text: str
    exit_code: int
    time: float

    @property
    def is_users(self) -> bool:
        return self.kind in ("user", "layout")

    def dumps(self) -> bytes:
        fields = asdict(self) | {"text": shorten(self.text)}
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace")

    @classmethod
    def loads(cls, data: bytes) -> "Report":
        return cls(**json.loads(data))


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Cut a text to `limit` characters: a third from its beginning, the rest from its end, where an error is named."""
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = limit - head
    return f"{text[:head]}\n… {len(text) - limit} characters left out …\n{text[-tail:]}"


def attach(fd: int) -> None:
    """Make the socket `fd` the one to which this process sends its reports. A rank calls it before its program runs."""
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)
    end.settimeout(SEND_TIMEOUT)
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    end.detach()
    # A process that the rank starts inherits this variable. It has another pid, so it sends no reports.
    os.environ[SOCKET_VARIABLE] = f"{fd}:{os.getpid()}"


def attached() -> bool:
    """Say whether launch listens to this process: it is a rank, and not a process that a rank has started."""
    return os.environ.get(SOCKET_VARIABLE, "").endswith(f":{os.getpid()}")


def report(kind: str, text: str, exit_code: int, caught: float | None = None) -> bool:
    """Send launch a `Report`. Returns False if launch does not listen: then the caller has to print.

    Args:
        caught: when the exception was caught. None: now.
    """
    if not attached():
        return False
    message = Report(int(os.environ["RANK"]), kind, text, exit_code, caught or time.monotonic())
    end = socket.socket(fileno=int(os.environ[SOCKET_VARIABLE].partition(":")[0]))
    try:
        end.send(message.dumps())
    except OSError:
        return False
    finally:
        # Closing the socket object would close the rank's descriptor too, which later reports need.
        end.detach()
    return True


def first_failure() -> str | None:
    """Say in one line why launch ends this run, for a rank that has received SIGTERM: what failed first, and where.

    None if launch knows of no failure. Then somebody has ended the run (Ctrl-C, the scheduler), or launch has not
    decided yet: a rank may ask before, if it fails itself or because of another rank's failure. Also None without
    launch, and where there is no /proc.
    """
    path = os.environ.get(VERDICT_VARIABLE)
    if not path:
        return None
    try:
        return Path(path).read_text("utf-8") or None
    except (OSError, ValueError):
        return None


# The start-up.

# Package → seconds that its imports took before the ranks were forked.
shared_imports: dict[str, float] = {}


def note_start() -> None:
    """Note in the environment that the program begins now, and what was imported for all ranks before."""
    os.environ[PROGRAM_VARIABLE] = json.dumps({"began": time.time(), "shared": shared_imports})


class ProgramStart(NamedTuple):
    """What launch has told this process of the program's start.

    Attributes:
        began: when the program began, in seconds since 1970; None without launch.
        shared: package → seconds of its import before the ranks were forked.
    """

    began: float | None = None
    shared: Mapping[str, float] = {}


def program_start() -> ProgramStart:
    """Return when the program began, as launch has noted it."""
    text = os.environ.get(PROGRAM_VARIABLE)
    if text is None:
        return ProgramStart()
    return ProgramStart(**json.loads(text))


def process_start() -> float | None:
    """Return when this process was started, in seconds since 1970, to a hundredth. None: this system has no /proc.

    It is the time of the shell's fork, which is earlier than anything that the process's own code could note.
    """
    try:
        # Field 22 is in clock ticks since the host has booted. Field 2, a name in parentheses, may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
