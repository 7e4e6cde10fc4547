"""What `launch` and the processes it starts say to each other: names of variables, and the message forms.

launch ── control pipe: one byte a signal to pass on; its end means launch is gone ──▶ agent (mmm.runtime.prefork)
launch ◀── status pipe: one JSON line a rank that started or ended ───────────────────  agent
launch ◀── failure socket: one JSON datagram a failed rank, sent before it exits ─────  ranks
launch ── verdict: a file in memory, empty until launch ends a run that has failed; then why ──▶ ranks
"""

import json
import signal
from dataclasses import asdict, dataclass, field

AGENT_VARIABLE = "MMM_LAUNCH_AGENT"  # the agent's instructions, JSON; taken out of the ranks' environment
FAILURE_VARIABLE = "MMM_FAILURE_FD"  # an exec'd rank's failure socket; taken out before the target runs
VERDICT_VARIABLE = "MMM_LAUNCH_VERDICT"  # path of the file that says why launch ends the run
MARKER_VARIABLE = "MMM_LAUNCH_ID"  # the same in every process of one launch, and in no other
DEVICE_VARIABLE = "MMM_DEVICE"  # the device type chosen or detected
CPUS_VARIABLE = "MMM_CPUS"  # the CPUs a rank binds itself to: "4-7,36"; taken out before it runs
ATTEMPT_VARIABLE = "MMM_ATTEMPT"  # 0, 1, …: how often --retries has started the program again
ATTEMPTS_VARIABLE = "MMM_ATTEMPTS_OF"  # the same in all attempts of one launch, and in no other launch
LINE_VARIABLE = "MMM_LAUNCH_LINE"  # the command line as typed, for a run's record
BEGAN_VARIABLE = "MMM_LAUNCH_BEGAN"  # when launch itself was started, seconds since 1970
STARTED_VARIABLE = "MMM_STARTED_AT"  # the same of the job, where its script says so: then this one counts
CHILD = "mmm.runtime.child"  # the module that an exec'd Python rank begins with
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each ends a run, launch, and a rank in order

MAX_TEXT = 60_000  # characters of a report kept; a datagram has to fit in the socket's buffer
SOCKET_BUFFER = 1 << 20


@dataclass(frozen=True)
class Instructions:
    """What the agent is to do: start these ranks by fork or by exec, over these file descriptors."""

    control: int
    status: int
    failure: int
    ranks: list[dict[str, str]]  # what differs in each rank's environment
    fork: bool  # fork the ranks from this process, or exec each
    command: list[str]  # with fork=False: what each rank executes
    launcher: int  # launch's own pid
    shielded: bool = False  # SIGTERM comes to every process of the run: not the agent's
    ignored: list[int] = field(default_factory=list)  # signals that launch was started to ignore
    skip: list[str] = field(default_factory=list)  # modules not to preload; ["*"]: none at all

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Instructions":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Report:
    """A rank's own account of why it ends.

    kind is "traceback" (an exception nobody caught), "user" (a `UserError`: `error: <text>` is all there is to say) or
    "exit" (`sys.exit("text")`: the text as it is). `time` is `time.monotonic()` where it was caught.
    """

    rank: int
    kind: str
    text: str
    exit_code: int
    time: float

    def dumps(self) -> bytes:
        fields = asdict(self) | {"text": shorten(self.text)}
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace")

    @classmethod
    def loads(cls, data: bytes) -> "Report":
        return cls(**json.loads(data))


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


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Keep the first third and the last two thirds of `limit` characters: an error's last lines say what it was."""
    if len(text) <= limit:
        return text
    head, tail = limit // 3, limit - limit // 3
    return f"{text[:head]}\n… {len(text) - limit} characters left out …\n{text[-tail:]}"
