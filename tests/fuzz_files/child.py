"""One case in a process of its own, forked from one that has imported everything: what came of it, and what it did.

The process has `SECONDS` and `MEMORY` more than its parent. A hook of Python's notices programs that are started,
classes that are unpickled, libraries that are loaded, and files outside the case's folder that are written or removed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_files.kinds import Kind
from mmm.errors import UserError
from mmm.outside import printable_lines
from mmm.runtime.failure import report_user_error
from mmm_launch.errors import UserError as LaunchUserError

# Of its own, or of waiting; by the clock, where others have the processor.
SECONDS, MOST = 10.0, 60.0
# Bytes.
MEMORY = 1 << 30
# Audit events by which Python says that something is executed.
RUNS = (
    "os.system",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "os.startfile",
    "subprocess.Popen",
    "ctypes.dlopen",
    "pty.spawn",
)
# Audit events that change a file or a folder.
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.chmod", "os.chown",
           "os.utime", "shutil.rmtree")  # fmt: skip
# O_RDWR alone is what locks need.
WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NO_MEMORY = re.compile(r"MemoryError|allocate memory|not enough memory|DefaultCPUAllocator|bad_alloc|bad allocation")
# What a terminal takes for orders.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FRAME = re.compile(r'File "[^"]*?/(src/mmm\w*/[^"]*|fuzz_files/[^"]*)", line (\d+) in (\S+)')


class Outcome(NamedTuple):
    """
    Attributes:
        kind: "read" or "refused"; or a fault, one of `FAULTS`.
        about: what was refused or went wrong. where: the last place in mmm, for a fault.
        text: all that is known of a fault.
    """

    kind: str
    about: str = ""
    where: str = ""
    text: str = ""
    seconds: float = 0.0
    # Bytes above the parent's.
    memory: int = 0

    @property
    def fault(self) -> bool:
        return self.kind in FAULTS


# What a reader must never do with a file.
FAULTS = ("traceback", "hang", "memory", "executed", "crash", "terminal")
# The case's folder, in the process of a case.
_watched: Path | None = None
_seen: list[str] = []
_unpickles: tuple[str, ...] = ()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event in RUNS:
        _seen.append(f"{event} {str(args)[:200]}")
    elif event == "pickle.find_class":
        if (name := f"{args[0]}.{args[1]}") not in _unpickles:
            _seen.append(f"unpickled {name}")
    elif event == "open":
        path, mode, flags = args
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & WRITING)
        if writes and isinstance(path, str | bytes | os.PathLike) and os.fspath(path) not in (os.devnull, b"/dev/null"):
            _check(event, path)
    elif event in CHANGES:
        for path in args[: 2 if event in ("os.rename", "os.link") else 1]:
            if isinstance(path, str | bytes | os.PathLike):
                _check(event, os.path.dirname(os.path.abspath(os.fsdecode(path))))


def _check(event: str, path: Any) -> None:
    place = os.path.realpath(os.fsdecode(path))
    if not place.startswith(f"{_watched}{os.sep}") and place != str(_watched):
        _seen.append(f"{event} of {place}, outside of the folder")


sys.addaudithook(_hook)


class Child:
    """A case under way. folder: its own, with the files in ``case``."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.began = time.monotonic()
        self.stack, self.said, self.result = (folder / name for name in ("stack", "said", "result"))
        self.before = _resident()
        self.outside = _contents(folder / "outside")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run()
            finally:
                os._exit(3)

    def poll(self) -> Outcome | None:
        """What came of it; None while it runs."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.began
        if not pid and (seconds < SECONDS or (seconds < MOST and self._is_busy())):
            return None
        if not pid:
            os.kill(self.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)
            outcome = Outcome("hang", f"more than {SECONDS:.0f} s", *self._stuck())
        elif os.WIFSIGNALED(status):
            outcome = Outcome("crash", f"ended by {signal.Signals(os.WTERMSIG(status)).name}", *self._stuck())
        else:
            try:
                outcome = Outcome(*json.loads(_text(self.result)))
            except (ValueError, TypeError):
                outcome = Outcome(
                    "crash", f"exit code {os.waitstatus_to_exitcode(status)}", "?", _text(self.said)[-2000:]
                )
        memory = max(usage.ru_maxrss * 1024 - self.before, 0)
        if memory > MEMORY and not outcome.fault:
            outcome = outcome._replace(kind="memory", about=f"{memory / 1e9:.1f} GB: {outcome.about}")
        elif not outcome.fault and (match := CONTROL.search(text := _text(self.said))):
            near = text[max(match.start() - 60, 0) : match.end() + 20]
            outcome = outcome._replace(kind="terminal", about=f"{match[0]!r} is written to the terminal: {near!r}")
        if _contents(self.folder / "outside") != self.outside:
            outcome = outcome._replace(
                kind="executed", about=f"a file outside of the folder is another: {outcome.about}"
            )
        return outcome._replace(seconds=seconds, memory=memory)

    def _is_busy(self) -> bool:
        """Whether it computes, or would, and has not had its time yet: this machine may have too much to do."""
        state, *rest = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return state in "RD" and sum(map(int, rest[10:12])) < SECONDS * os.sysconf("SC_CLK_TCK")

    def _stuck(self) -> tuple[str, str]:
        """The last place in mmm that it is known to have been in, and its stack there."""
        text = _text(self.stack).rpartition("Timeout")[2]
        return next((f"{path}:{name}" for path, _, name in FRAME.findall(text)), "?"), text

    def end(self) -> None:
        # Ctrl-C may have come after it was waited for.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _run(self) -> None:
        global _watched, _unpickles
        case = self.folder / "case"
        fd = os.open(self.said, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        result, stack = open(self.result, "w"), open(self.stack, "w")  # noqa: SIM115  # until the process ends
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(SECONDS - 1, repeat=True, file=stack)
        os.chdir(case)
        tempfile.tempdir = str(case)
        sys.dont_write_bytecode = True
        limit = _virtual() + 2 * MEMORY + sum(path.stat().st_size for path in case.rglob("*") if path.is_file())
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY, MEMORY))
        _unpickles = self.kind.unpickles
        _watched = Path(os.path.realpath(case))
        outcome = outcome_of(self.kind, case)
        _watched = None
        if _seen:
            outcome = Outcome("executed", "; ".join(dict.fromkeys(_seen)), outcome.where, outcome.about)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        json.dump(outcome[:4], result)
        result.flush()
        os._exit(0)


def outcome_of(kind: Kind, case: Path) -> Outcome:
    """Read the files."""
    try:
        kind.read(case)
    except (UserError, LaunchUserError) as error:
        about = str(error)
        if isinstance(error, UserError):
            report_user_error(error)
        else:
            print(f"launch: error: {printable_lines(error)}", file=sys.stderr)
        if NO_MEMORY.search(about):
            return Outcome("memory", about, _place(error))
        return Outcome("refused", about)
    except (Exception, SystemExit) as error:
        about = "".join(traceback.format_exception_only(error)).strip()
        fault = "memory" if NO_MEMORY.search(about) else "traceback"
        return Outcome(fault, about[:2000], _place(error), "".join(traceback.format_exception(error))[-6000:])
    return Outcome("read")


def _place(error: BaseException) -> str:
    """The innermost of mmm's functions that an exception came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/src/mmm" in frame.filename]
    if not frames:
        frames = traceback.extract_tb(error.__traceback__)[-1:]
    last = frames[-1]
    return f"{last.filename.rpartition('/src/')[2]}:{last.name}:{type(error).__name__}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
