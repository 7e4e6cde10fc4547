"""What a program and the launcher that started it agree on, seen from the program. Standard library only.

This covers the names of environment variables; the variables by which launchers number their processes; how many files
a process may open; a rank's reports to `launch`; when a start-up began, and what was imported before the program did.
The package `mmm_launch` has the same names in a module of its own: neither package imports the other.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mmm.errors import LaunchError

# Path of the file that says why launch ends the run; the file is empty until it does.
VERDICT_VARIABLE = "MMM_LAUNCH_VERDICT"
# The same value in every process of one launch, and in no other.
MARKER_VARIABLE = "MMM_LAUNCH_ID"
# The device type that was chosen or detected.
DEVICE_VARIABLE = "MMM_DEVICE"
# 0, 1, …: how often --retries has started the program again.
ATTEMPT_VARIABLE = "MMM_ATTEMPT"
# The same value in all attempts of one launch, and in no other launch.
ATTEMPTS_VARIABLE = "MMM_ATTEMPTS_OF"
# Set if the process stands for a rank that is only simulated.
DRY_RUN_VARIABLE = "MMM_DRY_RUN"
# MIN:MAX: attempts have different numbers of ranks, and resume from a checkpoint.
ELASTIC_VARIABLE = "MMM_ELASTIC"
# The command line as typed, for a run's record.
LINE_VARIABLE = "MMM_LAUNCH_LINE"
# The known machine, and what launch has set for it, for a run's record: JSON.
SITE_VARIABLE = "MMM_SITE"
# When launch itself was started, in seconds since 1970.
BEGAN_VARIABLE = "MMM_LAUNCH_BEGAN"
# When the job was started, if its script sets it: then this time counts as the start.
STARTED_VARIABLE = "MMM_STARTED_AT"
# FD:PID: the socket by which the process PID, a rank, sends its `Report`s.
SOCKET_VARIABLE = "MMM_FAILURE_SOCKET"
# JSON: when the program began, and the seconds of imports before ranks were forked.
PROGRAM_VARIABLE = "MMM_PROGRAM"

# Each of these signals ends a run, launch, and a rank in order.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ports for rank 0: below those that systems give to outgoing connections.
PORTS = range(20_000, 32_000)
USER_ERROR_EXIT = 2
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Seconds.
LOOPBACK_TIMEOUT = 5.0
# Exit code of a rank whose run was stopped by a signal and saved. It is EX_TEMPFAIL of sysexits.h: try again.
SAVED_EXIT = 75
# Seconds within which a second SIGINT is the same Ctrl-C: a terminal signals the group, and launchers pass it on.
REPEAT = 0.3

# Texts in the traceback of a rank that failed because another one had gone.
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
    """Name the launcher that has made this process a rank, as in `RANK_VARIABLES`; None if the process is not a rank.

    Args:
        environ: the environment variables to read.

    Raises:
        LaunchError: a variable says that the process is a rank, but of a launcher that is unknown or tells no world
            size.
    """
    for source, names in RANK_VARIABLES.items():
        rank_setting = read_number(environ, names.rank)
        if rank_setting is None:
            continue
        if source != "slurm":
            return source
        # A batch script of Slurm's has SLURM_PROCID=0 and SLURM_NTASKS=N too, but only a process inside a step is a
        # rank. PRRTE starts its daemons by srun, so that their Slurm ranks are in the environment of PRRTE's ranks.
        slurm_rank = environ[rank_setting[0]]
        if "SLURM_STEP_ID" in environ and environ.get("PMIX_RANK", slurm_rank) == slurm_rank:
            return source
    foreign = []
    for name, value in environ.items():
        if value.isdigit() and _says_rank(name, environ):
            foreign.append(name)
    if foreign:
        name = min(foreign)
        raise LaunchError(
            f"{name}={environ[name]} says that some launcher has started this process as a rank, but that launcher is "
            f"unknown here, or does not say how many ranks there are: each rank would be a run of its own. Set RANK, "
            f"WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, start with `launch`, or, if this is not a rank, unset {name}"
        )
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


def port_of(identity: str) -> int:
    """Choose one of `PORTS`, the same for all who know `identity`."""
    return PORTS[zlib.crc32(identity.encode()) % len(PORTS)]


def read_number(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the first of the variables `names` that is set, and its value; None if none is set.

    Raises:
        LaunchError: the value is not a whole number.
    """
    for name in names:
        if name in environ:
            try:
                return name, int(environ[name])
            except ValueError:
                raise LaunchError(f"{name}={environ[name]!r} in the environment is not a whole number") from None
    return None


def check_folder() -> None:
    """Refuse to run in a working folder that is gone: relative paths mean nothing there, and libraries abort.

    Raises:
        LaunchError: the working folder is gone.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the working folder is gone ({error.strerror}): it was removed or renamed. Change to one that exists."
        ) from None


def check_loopback(address: str = "127.0.0.1") -> None:
    """Check that this host can reach itself. Some containers have no loopback interface.

    Raises:
        LaunchError: it cannot.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            own_address = server.getsockname()[:2]
            socket.create_connection(own_address, timeout=LOOPBACK_TIMEOUT).close()
    except OSError as error:
        raise LaunchError(
            f"this host cannot reach itself at {address} ({error.strerror or error}), where its ranks are to meet: it "
            "has no loopback interface, or that is down.\n  As root: ip link set lo up. Or give the container one."
        ) from None


def open_files() -> int:
    """Raise the number of file descriptors that this process may have to the most that is allowed, and return it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS calls the limit "unlimited", and then refuses that.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return os.sysconf("SC_OPEN_MAX")
    return hard


# Characters of a report that are kept at most: a datagram has to fit into the socket's buffer.
MAX_TEXT = 60_000


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Shorten a text to about `limit` characters: one third of them from its start, two thirds from its end.

    The end gets more because an error's last lines say what it was.
    """
    if len(text) <= limit:
        return text
    n_head = limit // 3
    n_tail = limit - n_head
    head = text[:n_head]
    tail = text[-n_tail:]
    return f"{head}\n… {len(text) - limit} characters left out …\n{tail}"


def attached() -> bool:
    """Whether launch listens to this process: it is a rank of launch, and not a process that a rank started."""
    return os.environ.get(SOCKET_VARIABLE, "").endswith(f":{os.getpid()}")


def report(kind: str, text: str, exit_code: int) -> bool:
    """Tell launch why this rank ends, or what it can do.

    Args:
        kind: "user" (a `UserError`), "layout" (a `UserError` that may not occur with another number of ranks), "exit"
            (the text as it is), or "saves": the rank does not end; when somebody ends the run, it will save its state
            and then end.
        text: what to print, or "".
        exit_code: the exit code of this rank.

    Returns:
        False if nobody listens. Then the caller has to print the text.
    """
    if not attached():
        return False
    fields = {
        "rank": int(os.environ["RANK"]),
        "kind": kind,
        "text": shorten(text),
        "exit_code": exit_code,
        "time": time.monotonic(),
    }
    message = json.dumps(fields, ensure_ascii=False)
    descriptor = int(os.environ[SOCKET_VARIABLE].partition(":")[0])
    channel = socket.socket(fileno=descriptor)
    try:
        channel.send(message.encode("utf-8", "backslashreplace"))
    except OSError:
        return False
    finally:
        # The descriptor stays open for the next report.
        channel.detach()
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


PROC = Path("/proc")

# Seconds by which a time may lie in the future. A later one is from another clock, or from before this one was set
# back.
AHEAD = 1.0


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


def process_start(name: str = "self") -> float | None:
    """Return when a process was started, in seconds since 1970, to a hundredth; None where there is no /proc.

    This is the time of the shell's fork, which is earlier than any time that the process's own code could note.

    Args:
        name: the process's folder in /proc.
    """
    try:
        stat = (PROC / name / "stat").read_text()
        # The process's name, in parentheses, may contain spaces. The 20th field after it is the start, in ticks since
        # the system booted.
        ticks = int(stat.rpartition(")")[2].split()[19])
        boot_time = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot_time + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def started(environ: Mapping[str, str], otherwise: float) -> tuple[float, str]:
    """Return when the start-up of this process began, and who says so: ``MMM_STARTED_AT``, ``launch`` or ``process``.

    Args:
        environ: the environment variables to read.
        otherwise: the time to take if neither the environment nor the system tells one.

    Raises:
        LaunchError: a variable's value is not a time. One in the future is ignored.
    """
    for name, source in ((STARTED_VARIABLE, STARTED_VARIABLE), (BEGAN_VARIABLE, "launch")):
        if environ.get(name):
            began = _time(name, environ[name])
            if began < time.time() + AHEAD:
                return began, source
    return process_start() or otherwise, "process"


def _time(name: str, text: str) -> float:
    """Read the time that a variable has as its value, in seconds since 1970."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    # Written so that NaN is refused as well.
    if not seconds > 0:
        raise LaunchError(
            f"{name}={text} in the environment is not a time in the past, in seconds since 1970: set it "
            f"with `export {name}=$(date +%s.%N)`, or unset it"
        )
    return seconds
