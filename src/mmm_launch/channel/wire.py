"""What launch and the fork server of its ranks say to each other: names of variables, and the messages.

launch ── control pipe: {"signal": number} to pass on; its end: launch is gone ──▶ fork server
launch ◀── status pipe: one JSON line a rank that started or ended ───────────────────  fork server
launch ◀── failure socket: one JSON datagram a failed rank, sent before it exits ─────  ranks
launch ── reason: a file in memory, empty until launch ends a run that has failed; then why ──▶ ranks
"""

import json
import os
import signal
import tempfile
from dataclasses import asdict, dataclass, field

FORK_SERVER_VARIABLE = "MMM_LAUNCH_FORK_SERVER"  # file descriptor of its instructions; taken out before ranks start
# What schedulers send to every process before a job's end: for the program to handle, and no other process.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
FAILURE_VARIABLE = "MMM_FAILURE_FD"  # an exec'd rank's failure socket; taken out before the target runs
FORK_SERVER = "mmm_launch.host.forkserver"  # the module by which launch, or an agent, starts a host's ranks
CHILD = "mmm_launch.host.child"  # the module that an exec'd Python rank begins with


@dataclass(frozen=True)
class Instructions:
    """What the fork server is to do: start these ranks by fork or by exec, over these file descriptors."""

    control: int
    status: int
    failure: int
    ranks: list[dict[str, str]]  # what differs in each rank's environment
    fork: bool  # fork the ranks from this process, or exec each
    command: list[str]  # what each rank executes that cannot be forked
    launch_pid: int  # launch's, or an agent's
    ignore_sigterm: bool = False  # SIGTERM comes to every process of the run: not the fork server's
    ignored: list[int] = field(default_factory=list)  # signals that launch was started to ignore
    skip: list[str] = field(default_factory=list)  # modules not to preload; ["*"]: none at all

    def write(self) -> int:
        """Into a file without a name, which a new process inherits: its descriptor.

        A variable of the environment would be too short: Linux ends one at 131,072 bytes, which 4,096 ranks exceed.
        """
        if hasattr(os, "memfd_create"):  # Linux: needs no disk that may be full
            fd = os.memfd_create("instructions", 0)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.set_inheritable(fd, True)
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(self)).encode())
        return fd

    @classmethod
    def read(cls, fd: int) -> "Instructions":
        """What `write` has written. Closes the file."""
        with open(fd, "rb") as file:
            file.seek(0)
            return cls(**json.loads(file.read()))


@dataclass(frozen=True)
class Status:
    """A rank started (`code` is None) or ended: `code` is its exit code, or minus the signal that killed it."""

    rank: int
    pid: int
    code: int | None
    time: float

    def dumps(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def loads(cls, line: bytes) -> "Status":
        return cls(**json.loads(line))
