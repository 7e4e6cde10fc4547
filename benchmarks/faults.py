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
ENDED = 90.0  # s that a run may take, with its fault
TIMEOUT = 10  # s, after which ranks that hang are ended
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
        """Of those that nothing else has come from, once there are two: what stands between may be stopped for long."""
        found = processes(self.outdir)
        leaves = set(found) - {parent for parent, _ in found.values()}
        return [*leaves] if len(leaves) > 1 else []

    def within(self, words: str) -> None:
        """Start the run by another program."""
        self.command = [*shlex.split(words), *self.command]


During = Callable[[], None] | None


def signalled(number: int, whom: str) -> Callable[[Disturbed], During]:
    def prepare(run: Disturbed) -> During:
        def during() -> None:
            assert run.process is not None
            others = run.pids() if number != signal.SIGSTOP else run.ranks()
            pids = {"launch": [run.process.pid], "all": [*others, run.process.pid]}.get(whom)
            for pid in pids or (others and [run.chance.choice(others)]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

        return during

    return prepare


def mounted(run: Disturbed, options: str) -> None:
    run.outdir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", run.outdir], check=True)
    run.keeps_its_disk = False


def small_disk(run: Disturbed) -> During:
    mounted(run, f"size={run.chance.choice([16, 64, 256, 1024])}k")
    return None


def filled_disk(run: Disturbed) -> During:
    mounted(run, "size=8m")

    def during() -> None:
        with contextlib.suppress(OSError), (run.outdir / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    return during


def read_only_disk(run: Disturbed) -> During:
    mounted(run, "size=64m")
    return lambda: subprocess.run(["mount", "-o", "remount,ro", run.outdir], capture_output=True) and None


def removed_folder(run: Disturbed) -> During:
    run.keeps_its_disk = False
    return lambda: subprocess.run(["rm", "-rf", run.outdir], capture_output=True) and None


def full_output(run: Disturbed) -> During:
    run.stdout = os.open("/dev/full", os.O_WRONLY)
    return None


def unread_output(run: Disturbed) -> During:
    read, run.stdout = os.pipe()
    os.close(read)
    return None


def small_memory_disk(run: Disturbed) -> During:
    run.within(
        f"unshare -m sh -c 'mount -t tmpfs -o size={run.chance.choice([64, 1024])}k tmpfs /dev/shm; exec \"$@\"' -"
    )
    return None


def no_loopback(run: Disturbed) -> During:
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
    """Somebody connects to every port that the run listens on, and says something, or nothing."""

    def during() -> None:
        held = []
        for port in listening({*run.pids(), run.process.pid if run.process else 0}):
            for said in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 5000):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))
                    held[-1].sendall(said)
        time.sleep(run.chance.random())
        for each in held:
            each.close()

    return during


def listening(pids: set[int]) -> set[int]:
    """The TCP ports of 127.0.0.1, or of all addresses, that these processes listen on."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A" and words[9] in inodes}


def other_clock(run: Disturbed) -> During:
    """Of the time since the system was started; the other clock is the whole machine's."""
    seconds = run.chance.choice([-3600, 86_400, 10**8])
    run.within(f"unshare --time --fork --kill-child --monotonic {max(seconds, 0)} --boottime {max(seconds, 0)}")
    run.environ["MMM_LAUNCH_BEGAN"] = repr(time.time() + seconds)
    return None


def future_files(run: Disturbed) -> During:
    def during() -> None:
        later = time.time() + 10**7
        for path in run.outdir.rglob("*"):
            with contextlib.suppress(OSError):
                os.utime(path, (later, later))

    return during


def limited(option: str, *values: int) -> Callable[[Disturbed], During]:
    def prepare(run: Disturbed) -> During:
        run.within(f"sh -c 'ulimit {option} {run.chance.choice(values)}; exec \"$@\"' -")
        return None

    return prepare


FAULTS: dict[str, Callable[[Disturbed], During]] = {
    "a process is killed": signalled(signal.SIGKILL, "one"),
    "a process has a fault": signalled(signal.SIGSEGV, "one"),
    "a process aborts": signalled(signal.SIGABRT, "one"),
    "a process is stopped": signalled(signal.SIGSTOP, "one"),
    "launch is killed": signalled(signal.SIGKILL, "launch"),
    "launch is told to end": signalled(signal.SIGTERM, "launch"),
    "launch is interrupted": signalled(signal.SIGINT, "launch"),
    "the terminal is closed": signalled(signal.SIGHUP, "launch"),
    "all are killed": signalled(signal.SIGKILL, "all"),
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


def one(name: str, folder: Path, chance: random.Random) -> tuple[int | None, list[str]]:
    """The run's exit code with this fault, and what does not hold."""
    outdir = folder / f"run{chance.randrange(10**9)}"
    launch = [sys.executable, "-m", "mmm_launch", "-n", "2", "--device", "cpu", *chance.choice([[], ["--no-prefork"]])]
    command = [*launch, "python3", *shlex.split(TRAINER), "--outdir", str(outdir)]
    run = Disturbed(outdir, chance, command, os.environ | {MARK: outdir.name})
    during = FAULTS[name](run)
    try:
        with tempfile.TemporaryFile("w+") as said:
            run.process = subprocess.Popen(run.command, stdout=run.stdout, stderr=said, env=run.environ)
            until = time.monotonic() + chance.choice([0.3, 1.0, 2.0, 3.0, 4.0]) * (1 + chance.random())
            while during and time.monotonic() < until and run.process.poll() is None:
                time.sleep(0.02)
            if during and run.process.poll() is None:
                during()
            code = ended(run)
            said.seek(0)
            wrong = [] if code is not None else [f"it has not ended in {ENDED:g} s"]
            return code, [*wrong, *left_over(outdir), *what_is_said(said.read(), name, code), *what_is_kept(run)]
    finally:
        subprocess.run(["umount", outdir], capture_output=True)
        if run.stdout >= 0:
            os.close(run.stdout)


def ended(run: Disturbed) -> int | None:
    assert run.process is not None
    try:
        return run.process.wait(ENDED)
    except subprocess.TimeoutExpired:
        for pid in [*run.pids(), run.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
        return None


def what_is_said(text: str, name: str, code: int | None) -> Iterator[str]:
    if text.count("Traceback (most recent call last)") > 1:
        yield f"{text.count('Traceback (most recent call last)')} tracebacks: {text[-600:]!r}"
    silent = "launch is killed", "all are killed"
    if code and not text.strip() and name not in silent:
        yield f"exit code {code}, and not a word"


def what_is_kept(run: Disturbed) -> Iterator[str]:
    log = run.outdir / "log.txt"
    if not run.keeps_its_disk or not log.exists() or " iter=" not in (rows := log.read_text(errors="replace")):
        return
    try:
        found = len(load(run.outdir)["iter"])
    except UserError as error:
        yield f"{rows.count(' iter=')} rows are in the log, and no record can be read: {error}"
    else:
        if found + 1 < rows.count(" iter="):  # a row is said before it is written
            yield f"{rows.count(' iter=')} rows are in the log, and {found} in the record"


def main() -> int:
    parser = flags(__doc__, 100)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--only", choices=FAULTS)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    result: dict = {"faults": 0, "wrong": [], "seed": args.seed}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.faults):
            name = args.only or list(FAULTS)[number % len(FAULTS)]
            began = time.monotonic()
            code, wrong = one(name, Path(folder), chance)
            print(f"{number:4}  {name:26} exit code {code}, {time.monotonic() - began:.1f} s", *wrong, flush=True)
            result["faults"] += 1
            result["wrong"] += [f"{number} {name}: {each}" for each in wrong]
            write(args.json, result)
    return end(result, args.json)


if __name__ == "__main__":
    sys.exit(main())
