"""The instructions that a fork server gets when it is started. Later messages to and from it are in `link`."""

import json
import os
import signal
import tempfile
from dataclasses import asdict, dataclass, field

# File descriptor of the fork server's instructions. It is taken out before ranks start.
FORK_SERVER_VARIABLE = "MMM_LAUNCH_FORK_SERVER"
# Schedulers send these to every process some time before a job ends. Only the program handles them.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
# File descriptor of the failure socket, for a rank that was started by exec. Taken out before the target runs.
FAILURE_VARIABLE = "MMM_FAILURE_FD"
# The module by which launch, or an agent, starts the fork server.
FORK_SERVER = "mmm_launch.host.forkserver"
# The module that an exec'd Python rank begins with.
CHILD = "mmm_launch.host.child"


@dataclass(frozen=True)
class Instructions:
    """What the fork server has to do.

    Attributes:
        control: file descriptor of its end of the connection to the process that has started it.
        parent: pid of the process that has started it.
        ranks: for each rank, the variables in which it differs from the fork server.
        command: command line of a rank that cannot be forked.
        ignored: signals that launch was started to ignore.
        skip: modules not to preload; ["*"]: none is preloaded.
    """

    control: int
    parent: int
    ranks: list[dict[str, str]]
    command: list[str]
    ignored: list[int]
    skip: list[str] = field(default_factory=list)

    def write(self) -> int:
        """Write the instructions to a file without a name, and return its descriptor, which a new process inherits.

        An environment variable is too short for them: Linux allows 131,072 bytes, which 4,096 ranks exceed.
        """
        # Linux: a file in memory needs no disk, which may be full.
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("instructions", 0)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.set_inheritable(descriptor, True)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(self)).encode())
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> "Instructions":
        """Read what `write` has written, and close the file."""
        with open(descriptor, "rb") as file:
            file.seek(0)
            return cls(**json.loads(file.read()))
