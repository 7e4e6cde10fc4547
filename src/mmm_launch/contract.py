"""What `launch` and its ranks agree on, as launch has it. Standard library only.

Names of environment variables; the variables by which launcher backends number their processes; how many files a
process may open; a rank's report on the failure socket; when a start-up began, and what was imported before.
A program that knows launch, such as one of mmm's, has the same names in a module of its own: neither imports the other.
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

from mmm_launch.errors import LaunchError

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
# A second SIGINT within this many seconds is the same Ctrl-C: the terminal signals the whole
# process group, and mpiexec or srun passes it on once more.
REPEAT = 0.3

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


# Of `LaunchSpec.launcher` → the variable in which it tells a process its number.
NUMBERED_BY = {
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "pals": "PALS_RANKID",
    "hydra": "PMI_RANK",
    "srun": "SLURM_PROCID",
}
# The number of a launcher's rank → how many there are. What was started last comes first.
SIZES = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PALS_RANKID": "PMI_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
    "MVP_COMM_WORLD_RANK": "MVP_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
}
# What launchers that are not known here call a rank.
OTHERS = re.compile(
    r"(PMIX|MPIRUN|HOROVOD)_RANK|ALPS_APP_PE|PMI_ID|MPI_RANKID|MP_CHILD"
    r"|\w+_(COMM_WORLD|WORLD|GLOBAL|NAMESPACE|JOB|TASK|APP)_(RANK|RANKID|PROCID|PE)"
)


def place_of_rank(environ: Mapping[str, str]) -> str | None:
    """The variable by which some launcher has made this process one of its ranks; None where it is none, or alone.

    A batch script of Slurm's has SLURM_PROCID=0 too; only inside a step is it a rank.
    """
    for name in ("RANK", "WORLD_SIZE"):
        if name in environ:
            return name
    for name, size in SIZES.items():
        if name not in environ:
            continue
        if name == "SLURM_PROCID" and "SLURM_STEP_ID" not in environ:
            continue
        # PRRTE starts its daemons by srun, so that their places are in the environment of its ranks.
        if name == "SLURM_PROCID" and environ.get("PMIX_RANK", environ[name]) != environ[name]:
            continue
        return None if environ.get(size) == "1" else name
    return next((name for name in sorted(environ) if OTHERS.fullmatch(name) and environ[name].isdigit()), None)


def check_folder() -> None:
    """Raises `LaunchError` where the working folder is gone: paths mean nothing, and libraries abort."""
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the working folder is gone ({error.strerror}): it was removed or renamed. Change to one that is there."
        ) from None


def open_files() -> int:
    """How many file descriptors this process may have, after asking for as many as it is allowed; −1: any number."""
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
    """A rank's own account of why it ends.

    kind is "traceback" (an exception nobody caught), "user" (a `UserError`: `error: <text>` is all there is to say),
    "layout" (such a one that another number of ranks may not have) or "exit" (`sys.exit("text")`: the text as it is).
    "saves" is no end: the rank will save its state, and then end, when somebody ends the run.
    `time` is `time.monotonic()` where it was caught.
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
    """Keep the first third and the last two thirds of `limit` characters: an error's last lines say what it was."""
    if len(text) <= limit:
        return text
    head, tail = limit // 3, limit - limit // 3
    return f"{text[:head]}\n… {len(text) - limit} characters left out …\n{text[-tail:]}"


def attach(fd: int) -> None:
    """Send this process's reports to the socket `fd`. Called in a rank of launch, before its program runs.

    The program finds the socket in the environment. What a rank starts has another process number, and sends nothing.
    """
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)
    end.settimeout(SEND_TIMEOUT)
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    end.detach()
    os.environ[SOCKET_VARIABLE] = f"{fd}:{os.getpid()}"


def attached() -> bool:
    """True where launch listens to this process: it is a rank of launch, and no process that a rank started."""
    return os.environ.get(SOCKET_VARIABLE, "").endswith(f":{os.getpid()}")


def report(kind: str, text: str, exit_code: int, caught: float) -> bool:
    """Send launch a `Report`. False if nobody listens: then the caller has to print."""
    if not attached():
        return False
    message = Report(int(os.environ["RANK"]), kind, text, exit_code, caught)
    end = socket.socket(fileno=int(os.environ[SOCKET_VARIABLE].partition(":")[0]))
    try:
        end.send(message.dumps())
    except OSError:
        return False
    finally:
        end.detach()
    return True


# The start-up.

# Package → seconds that its imports took before the ranks were forked.
shared_imports: dict[str, float] = {}


def note_start() -> None:
    """The program begins: tells it when, and what was imported for all ranks."""
    os.environ[PROGRAM_VARIABLE] = json.dumps({"began": time.time(), "shared": shared_imports})


def process_start() -> float | None:
    """When this process was started, in seconds since 1970, to a hundredth; None where there is no /proc.

    It is the time of the shell's fork: earlier than anything that the process's own code could note.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
