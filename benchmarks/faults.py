"""Faults of processes, disks, networks, clocks and limits, one after another, each in a run of its own.

    python benchmarks/faults.py [--faults 100] [--seed 0] [--only NAME] [--json FILE]        as root, on Linux

Each run is a small training on two ranks, with checkpoints, disturbed in one way at a random moment. Afterwards no
process may be left, and no folder in memory; the run has to have ended by itself; what it had logged by then has to be
readable as a record, unless the fault took the disk away; and what it says on stderr has to be at most one traceback,
with at least one line that says what happened wherever it failed. Exit code 1 if anything does not hold.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from disturbed import MARK, end, flags, left_over, processes, write

from mmm.errors import UserError
from mmm.history import load

STEPS = 60
# Seconds of a run with its fault.
LONGEST_RUN = 300.0
# Seconds after which ranks that hang are ended.
TIMEOUT = 10
TRAINER = (
    "-m mmm.trainer.lm --preset debug --dataset random --seq_length 16 --global_batch_size 8 --device cpu --dtype fp64 "
    f"--eval_every 0 --no-plots --flush_every 1 --checkpoint_every 10 --max_iters {STEPS} --timeout {TIMEOUT}"
)


@dataclass
class Disturbed:
    """A run: `command` and `environ` may be changed before it starts, `during` is called once it runs."""

    outdir: Path
    chance: random.Random
    command: list[str]
    environ: dict[str, str]
    stdout: int = subprocess.DEVNULL
    process: subprocess.Popen | None = None
    keeps_its_disk: bool = True

    def pids(self) -> list[int]:
        """Of all processes but launch itself: ranks and what stands between."""
        assert self.process is not None
        return [pid for pid in processes(self.outdir) if pid != self.process.pid]

    def ranks(self) -> list[int]:
        """Processes without children, once there are two of them. What stands between launch and ranks may be stopped
        for long."""
        living = processes(self.outdir)
        parents = {process.parent for process in living.values()}
        leaves = [pid for pid in living if pid not in parents]
        if len(leaves) < 2:
            return []
        return leaves

    def within(self, outer: str) -> None:
        """Start the run by another program, whose command line this is."""
        self.command = [*shlex.split(outer), *self.command]


# What happens to a run once it runs. None: its fault was there from the start.
During = Callable[[], None] | None
# A fault: it prepares a run that has not started yet.
Fault = Callable[[Disturbed], During]


def sent(signum: int, target: str) -> Fault:
    """A signal to "launch", to "one" other process, or to "all"."""

    def prepare(run: Disturbed) -> During:
        def during() -> None:
            for pid in targets(run, signum, target):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

        return during

    return prepare


def targets(run: Disturbed, signum: int, target: str) -> list[int]:
    """The pids that a signal goes to."""
    assert run.process is not None
    if target == "launch":
        return [run.process.pid]
    # What stands between launch and ranks may stay stopped, and nothing is wrong.
    others = run.ranks() if signum == signal.SIGSTOP else run.pids()
    if target == "all":
        return [*others, run.process.pid]
    if not others:
        return []
    return [run.chance.choice(others)]


def mount(run: Disturbed, options: str) -> None:
    """Give the run's folder a file system of its own, in memory."""
    run.outdir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", run.outdir], check=True)
    run.keeps_its_disk = False


def small_disk(run: Disturbed) -> During:
    mount(run, f"size={run.chance.choice([16, 64, 256, 1024])}k")
    return None


def filled_disk(run: Disturbed) -> During:
    mount(run, "size=8m")

    def during() -> None:
        with contextlib.suppress(OSError), (run.outdir / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    return during


def read_only_disk(run: Disturbed) -> During:
    mount(run, "size=64m")

    def during() -> None:
        subprocess.run(["mount", "-o", "remount,ro", run.outdir], capture_output=True)

    return during


def removed_folder(run: Disturbed) -> During:
    run.keeps_its_disk = False

    def during() -> None:
        subprocess.run(["rm", "-rf", run.outdir], capture_output=True)

    return during


def full_output(run: Disturbed) -> During:
    run.stdout = os.open("/dev/full", os.O_WRONLY)
    return None


def unread_output(run: Disturbed) -> During:
    # Writing to it is then a broken pipe.
    read, run.stdout = os.pipe()
    os.close(read)
    return None


def small_memory_disk(run: Disturbed) -> During:
    size = run.chance.choice([64, 1024])
    run.within(f"unshare -m sh -c 'mount -t tmpfs -o size={size}k tmpfs /dev/shm; exec \"$@\"' -")
    return None


def no_loopback(run: Disturbed) -> During:
    # Of a new network even the loopback is down.
    run.within("unshare -n")
    return None


def lost_loopback(run: Disturbed) -> During:
    run.within("unshare -n sh -c 'ip link set lo up; exec \"$@\"' -")

    def during() -> None:
        assert run.process is not None
        inside = ["nsenter", "-t", str(run.process.pid), "-n", "ip", "link", "set", "lo", "down"]
        subprocess.run(inside, capture_output=True)

    return during


def strangers(run: Disturbed) -> During:
    """Somebody connects to every port that the run listens on, and sends something, or nothing."""

    def during() -> None:
        assert run.process is not None
        connections = []
        for port in listening({*run.pids(), run.process.pid}):
            for message in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 5000):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                    connections.append(connection)
                    connection.sendall(message)
        time.sleep(run.chance.random())
        for connection in connections:
            connection.close()

    return during


def listening(pids: set[int]) -> set[int]:
    """The TCP ports of 127.0.0.1, or of all addresses, that these processes listen on."""
    # Links of open files, as socket:[INODE].
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(file))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        # Columns: number, local address, remote address, state, …, inode at the tenth place.
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            # As the kernel numbers the states of a connection.
            is_listening = columns[3] == "0A"
            if is_listening and f"socket:[{columns[9]}]" in sockets:
                port = columns[1].rpartition(":")[2]
                ports.add(int(port, 16))
    return ports


def other_clock(run: Disturbed) -> During:
    """A clock that is hours off. Only the time since the system's start can be changed for one process."""
    seconds = run.chance.choice([-3600, 86_400, 10**8])
    run.within(f"unshare --time --fork --kill-child --monotonic {max(seconds, 0)} --boottime {max(seconds, 0)}")
    run.environ["MMM_LAUNCH_BEGAN"] = repr(time.time() + seconds)
    return None


def future_files(run: Disturbed) -> During:
    def during() -> None:
        # Four months.
        later = time.time() + 10**7
        for path in run.outdir.rglob("*"):
            with contextlib.suppress(OSError):
                os.utime(path, (later, later))

    return during


def limited(option: str, *values: int) -> Fault:
    """A limit of the shell, of one of these values."""

    def prepare(run: Disturbed) -> During:
        run.within(f"sh -c 'ulimit {option} {run.chance.choice(values)}; exec \"$@\"' -")
        return None

    return prepare


FAULTS: dict[str, Fault] = {
    "a process is killed": sent(signal.SIGKILL, "one"),
    "a process has a fault": sent(signal.SIGSEGV, "one"),
    "a process aborts": sent(signal.SIGABRT, "one"),
    "a process is stopped": sent(signal.SIGSTOP, "one"),
    "launch is killed": sent(signal.SIGKILL, "launch"),
    "launch is told to end": sent(signal.SIGTERM, "launch"),
    "launch is interrupted": sent(signal.SIGINT, "launch"),
    "the terminal is closed": sent(signal.SIGHUP, "launch"),
    "all are killed": sent(signal.SIGKILL, "all"),
    "a small disk": small_disk,
    "a disk fills": filled_disk,
    "a disk becomes read-only": read_only_disk,
    "the folder is removed": removed_folder,
    "output to a full disk": full_output,
    "output that nobody reads": unread_output,
    "little shared memory": small_memory_disk,
    "no loopback": no_loopback,
    "loopback is lost": lost_loopback,
    "strangers at every port": strangers,
    "another clock": other_clock,
    "files of the future": future_files,
    "few open files": limited("-n", 16, 30, 70),
    "small files only": limited("-f", 2, 20, 200),
}


# Launch cannot say a word then.
SILENT = ("launch is killed", "all are killed")


def run_with(name: str, folder: Path, chance: random.Random) -> tuple[int | None, list[str]]:
    """Run with a fault. Returns the exit code, and what does not hold: a sentence each."""
    outdir = folder / f"run{chance.randrange(10**9)}"
    command = [sys.executable, "-m", "mmm_launch", "-n", "2", "--device", "cpu"]
    command += chance.choice([[], ["--no-prefork"]])
    command += ["python3", *shlex.split(TRAINER), "--outdir", str(outdir)]
    run = Disturbed(outdir, chance, command, os.environ | {MARK: outdir.name})
    during = FAULTS[name](run)
    problems = []
    try:
        with tempfile.TemporaryFile("w+") as errors:
            run.process = subprocess.Popen(run.command, stdout=run.stdout, stderr=errors, env=run.environ)
            if during:
                wait_a_moment(run)
                if run.process.poll() is None:
                    during()
            code = wait(run)
            if code is None:
                problems.append(f"it has not ended in {LONGEST_RUN:g} s")
            errors.seek(0)
            problems += left_over(outdir)
            problems += check_messages(errors.read(), name, code)
            problems += check_record(run)
            return code, problems
    finally:
        # It fails where the folder has no file system of its own.
        subprocess.run(["umount", outdir], capture_output=True)
        if run.stdout >= 0:
            os.close(run.stdout)


def wait_a_moment(run: Disturbed) -> None:
    """Return after a random time, or when the run has ended."""
    assert run.process is not None
    seconds = run.chance.choice([0.3, 1.0, 2.0, 3.0, 4.0]) * (1 + run.chance.random())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.02)


def wait(run: Disturbed) -> int | None:
    """The exit code. None: the run had to be killed, because it did not end."""
    assert run.process is not None
    try:
        return run.process.wait(LONGEST_RUN)
    except subprocess.TimeoutExpired:
        for pid in [*run.pids(), run.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
        return None


def check_messages(errors: str, name: str, code: int | None) -> Iterator[str]:
    """At most one traceback, and at least a line where the run has failed."""
    tracebacks = errors.count("Traceback (most recent call last)")
    if tracebacks > 1:
        yield f"{tracebacks} tracebacks: {errors[-600:]!r}"
    if code and not errors.strip() and name not in SILENT:
        yield f"exit code {code}, and not a word"


def check_record(run: Disturbed) -> Iterator[str]:
    """The record has the rows that were logged."""
    log = run.outdir / "log.txt"
    if not run.keeps_its_disk or not log.exists():
        return
    logged = log.read_text(errors="replace").count(" iter=")
    if logged == 0:
        return
    try:
        recorded = len(load(run.outdir)["iter"])
    except UserError as error:
        yield f"{logged} rows are in the log, and no record can be read: {error}"
        return
    # A row is logged before it is written.
    if recorded < logged - 1:
        yield f"{logged} rows are in the log, and {recorded} in the record"


def main() -> int:
    parser = flags(__doc__, 100)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--only", choices=FAULTS)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    names = [args.only] if args.only else list(FAULTS)
    result: dict = {"faults": 0, "wrong": [], "seed": args.seed}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(args.faults):
            name = names[index % len(names)]
            began = time.monotonic()
            code, problems = run_with(name, Path(folder), chance)
            seconds = time.monotonic() - began
            print(f"{index:4}  {name:26} exit code {code}, {seconds:.1f} s", *problems, flush=True)
            result["faults"] += 1
            result["wrong"] += [f"{index} {name}: {problem}" for problem in problems]
            write(args.json, result)
    return end(result, args.json)


if __name__ == "__main__":
    sys.exit(main())
