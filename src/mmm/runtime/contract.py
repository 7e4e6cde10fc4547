"""What a program and the launcher that started it agree on, as the program has it. Standard library only.

Names of environment variables; the variables by which launchers number their processes; how many files a process may
open; a rank's report to `launch`; when a start-up began, and what was imported before the program did. The package
`mmm_launch` has the same names in a module of its own: neither imports the other.
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

VERDICT_VARIABLE = "MMM_LAUNCH_VERDICT"  # path of the file that says why launch ends the run; empty until it does
MARKER_VARIABLE = "MMM_LAUNCH_ID"  # the same in every process of one launch, and in no other
DEVICE_VARIABLE = "MMM_DEVICE"  # the device type chosen or detected
ATTEMPT_VARIABLE = "MMM_ATTEMPT"  # 0, 1, …: how often --retries has started the program again
ATTEMPTS_VARIABLE = "MMM_ATTEMPTS_OF"  # the same in all attempts of one launch, and in no other launch
DRY_RUN_VARIABLE = "MMM_DRY_RUN"  # set where the process stands for a rank that is not there
ELASTIC_VARIABLE = "MMM_ELASTIC"  # MIN:MAX: attempts have different numbers of ranks, and go on from a checkpoint
LINE_VARIABLE = "MMM_LAUNCH_LINE"  # the command line as typed, for a run's record
SITE_VARIABLE = "MMM_SITE"  # the known machine, and what launch has set for it, for a run's record: JSON
BEGAN_VARIABLE = "MMM_LAUNCH_BEGAN"  # when launch itself was started, seconds since 1970
STARTED_VARIABLE = "MMM_STARTED_AT"  # the same of the job, where its script says so: then this one counts
SOCKET_VARIABLE = "MMM_FAILURE_SOCKET"  # FD:PID: where the process PID, a rank, sends its `Report`s
PROGRAM_VARIABLE = "MMM_PROGRAM"  # JSON: when the program began, and the seconds of imports before ranks were forked

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each ends a run, launch, and a rank in order
PORTS = range(20_000, 32_000)  # for rank 0: below those that systems give to outgoing connections
USER_ERROR_EXIT = 2
LOOPBACK, LOOPBACK_TIMEOUT = ("127.0.0.1", "localhost", "::1"), 5.0  # s
SAVED_EXIT = 75  # a rank whose run a signal has stopped, once it was saved; as EX_TEMPFAIL of sysexits.h: try again
REPEAT = 0.3  # s within which a second SIGINT is the same Ctrl-C: a terminal signals the group, launchers pass it on

# What a rank's traceback says when it failed because another had gone.
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
    """The variables in which a launcher backend tells its processes their numbers; of each, the first that is set."""

    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]


# A launcher whose ranks find their places without `launch` is one row here, and one in docs/clusters.md. In this order:
# what was started last, and so stands closest to the process, comes first.
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
        ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
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

# Ranks of launchers that do not say of how many, and names that no launcher known here uses.
UNSIZED = ("PMIX_RANK", "ALPS_APP_PE", "PMI_ID", "MPI_RANKID", "MPIRUN_RANK", "MP_CHILD", "HOROVOD_RANK")
RANK_LIKE = re.compile(r"\w+_(COMM_WORLD|WORLD|GLOBAL|NAMESPACE|JOB|TASK|APP)_(RANK|RANKID|PROCID|PE)")


def numbering(environ: Mapping[str, str]) -> str | None:
    """The name in `RANK_VARIABLES` of the launcher that has made this process a rank; None where it is none.

    A batch script of Slurm's has SLURM_PROCID=0 and SLURM_NTASKS=N too; only inside a step is it a rank.

    Raises:
        LaunchError: some variable says that it is a rank, of a launcher that is not known or does not say of how many.
    """
    for source, names in RANK_VARIABLES.items():
        rank = read_number(environ, names.rank)
        # PRRTE starts its daemons by srun, so that their places are in the environment of its ranks.
        if rank is not None and (
            source != "slurm"
            or ("SLURM_STEP_ID" in environ and environ.get("PMIX_RANK", environ[rank[0]]) == environ[rank[0]])
        ):
            return source
    foreign = [name for name in environ if environ[name].isdigit() and _says_rank(name, environ)]
    if foreign:
        name = min(foreign)
        raise LaunchError(
            f"{name}={environ[name]} says that some launcher has started this process as a rank, and it is none that "
            f"is known here, or does not say of how many: each would be a run of its own. Set RANK, WORLD_SIZE, "
            f"LOCAL_RANK and LOCAL_WORLD_SIZE, start with `launch`, or, if this is no rank, unset {name}"
        )
    return None


def _says_rank(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable, of no launcher known here, is called as ranks are, or has a size above 1 beside it."""
    prefix, _, last = name.rpartition("_")
    size = environ.get("_".join((prefix, "SIZE")), "")
    beside = last == "RANK" and prefix not in ("LOCAL", "NODE", "GROUP") and size.isdigit() and int(size) > 1
    return beside or name in UNSIZED or RANK_LIKE.fullmatch(name) is not None


def port_of(identity: str) -> int:
    """One of `PORTS`, the same for all who know `identity`."""
    return PORTS[zlib.crc32(identity.encode()) % len(PORTS)]


def read_number(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of the variables `names` that is set, and its value. Raises `LaunchError` if that is no number."""
    for name in names:
        if name in environ:
            try:
                return name, int(environ[name])
            except ValueError:
                raise LaunchError(f"{name}={environ[name]!r} in the environment is not a whole number") from None
    return None


def check_folder() -> None:
    """Raises `LaunchError` where the working folder is gone: paths mean nothing, and libraries abort."""
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the working folder is gone ({error.strerror}): it was removed or renamed. Change to one that is there."
        ) from None


def check_loopback(address: str = "127.0.0.1") -> None:
    """Raises `LaunchError` where this host cannot reach itself: some containers have no loopback interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=LOOPBACK_TIMEOUT).close()
    except OSError as error:
        raise LaunchError(
            f"this host cannot reach itself at {address} ({error.strerror or error}), where its ranks are to meet: it "
            "has no loopback interface, or that is down.\n  As root: ip link set lo up. Or give the container one."
        ) from None


def open_files() -> int:
    """How many file descriptors this process may have, after asking for as many as it is allowed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS says "unlimited", and refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else os.sysconf("SC_OPEN_MAX")


# Reports to launch.

MAX_TEXT = 60_000  # characters of a report that are kept; a datagram has to fit into the socket's buffer


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Keep the first third and the last two thirds of `limit` characters: an error's last lines say what it was."""
    if len(text) <= limit:
        return text
    head, tail = limit // 3, limit - limit // 3
    return f"{text[:head]}\n… {len(text) - limit} characters left out …\n{text[-tail:]}"


def attached() -> bool:
    """True where launch listens to this process: it is a rank of launch, and not a process that a rank started."""
    return os.environ.get(SOCKET_VARIABLE, "").endswith(f":{os.getpid()}")


def report(kind: str, text: str, exit_code: int) -> bool:
    """Tell launch why this rank ends, or what it can do. False if nobody listens: then the caller has to print.

    Args:
        kind: "user" (a `UserError`), "layout" (one that another number of ranks may not have), "exit" (the text as it
            is), or "saves": the rank does not end; it will save its state, and then end, when somebody ends the run.
    """
    if not attached():
        return False
    fields = {"rank": int(os.environ["RANK"]), "kind": kind, "text": shorten(text)}
    fields |= {"exit_code": exit_code, "time": time.monotonic()}
    end = socket.socket(fileno=int(os.environ[SOCKET_VARIABLE].partition(":")[0]))
    try:
        end.send(json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace"))
    except OSError:
        return False
    finally:
        end.detach()  # it stays open, for the next report
    return True


def first_failure() -> str | None:
    """Why launch ends this run, in one line, for a rank that SIGTERM has come to: what failed first, and where.

    None where nothing has failed as far as launch knows: somebody ended the run (Ctrl-C, the scheduler), or launch has
    not decided yet: the rank that fails itself, and one that fails in consequence, may be asked before. None, too,
    without launch, and where there is no /proc.
    """
    path = os.environ.get(VERDICT_VARIABLE)
    try:
        return (path and Path(path).read_text("utf-8")) or None
    except (OSError, ValueError):
        return None


# The start-up.

PROC = Path("/proc")
AHEAD = 1.0  # s; what is later is by another clock, or by this one before it was set back


class ProgramStart(NamedTuple):
    """What launch told this process of the program's start.

    Attributes:
        began: when the program began, seconds since 1970; None without launch.
        shared: package → seconds of imports before the ranks were forked.
    """

    began: float | None = None
    shared: Mapping[str, float] = {}


def program_start() -> ProgramStart:
    """When the program began, as launch has noted it."""
    text = os.environ.get(PROGRAM_VARIABLE)
    if text is None:
        return ProgramStart()
    return ProgramStart(**json.loads(text))


def process_start(name: str = "self") -> float | None:
    """When a process was started, in seconds since 1970, to a hundredth; None where there is no /proc.

    It is the time of the shell's fork: earlier than anything that the process's own code could note.
    """
    try:
        ticks = int((PROC / name / "stat").read_text().rpartition(")")[2].split()[19])  # since boot
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def started(environ: Mapping[str, str], otherwise: float) -> tuple[float, str]:
    """When the start-up of this process began, and who says so: ``MMM_STARTED_AT``, ``launch`` or ``process``.

    Args:
        otherwise: the time to take where neither the environment nor the system has one.

    Raises:
        LaunchError: a variable's value is not a time. One in the future is passed over.
    """
    for name, source in ((STARTED_VARIABLE, STARTED_VARIABLE), (BEGAN_VARIABLE, "launch")):
        if environ.get(name) and (began := _time(name, environ[name])) < time.time() + AHEAD:
            return began, source
    return process_start() or otherwise, "process"


def _time(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise LaunchError(
            f"{name}={text} in the environment is not a time in the past, in seconds since 1970: set it "
            f"with `export {name}=$(date +%s.%N)`, or unset it"
        )
    return seconds
