"""A training whose ranks are killed at random: does it go on with those that are left, and is its curve the same?

    python benchmarks/elastic.py [--kills 100] [--minutes M] [--ranks 3 8] [--seed 0] [--json FILE]

A language model is trained once undisturbed, and once by `launch --elastic 3:8` with `kill -9` of ranks at random
moments, also while they start and while a checkpoint is written. One after the other is killed until fewer than 3 are
left and launch ends; then it is started again, with 8. The global batch divides over 8, 6, 5, 4 and 3 ranks; 7 are
refused, and 6 go on.

Printed for each kill: how many ranks went on, and the pause from the kill to the end of the next step. In the end the
losses have to be those of the undisturbed run to 1e-9, every step has to be in the record once, and nothing may be left
running. Exit code 1 if anything does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from disturbed import MARK, difference, end, flags, left_over, processes, write

from mmm.history import load

# Steps between two checkpoints, and of the whole run for each kill.
EVERY = 10
STEPS_A_KILL = 40
# Divides over every number of ranks from 3 to 8 but 7.
BATCH = 120
# Seconds from one kill to the next, at most.
LONGEST = 3.0
# Of the undisturbed run's seconds, in which all kills come: there has to be a run to kill.
SHARE_OF_TIME = 0.5
# Of the kills, which do not wait until the run has gone on after the one before.
SHARE_SOON = 0.2
SERVER = b"mmm_launch.host.forkserver"
# With AdamW two undisturbed runs, on 2 and on 3 ranks, part by 1e-3 within 1,000 steps: near the floor of this loss it
# amplifies rounding. SGD does not.
TRAINER = (
    "-m mmm.trainer.lm --preset debug --dataset random --optimizer sgd --lr 0.1 --seq_length 4 "
    f"--global_batch_size {BATCH} --device cpu --dtype fp64 --eval_every 0 --no-plots --flush_every 1 "
    f"--checkpoint_every {EVERY}"
)


def start(launch_flags: list[str], steps: int, outdir: Path) -> subprocess.Popen:
    """Start the training, or go on with it."""
    command = [sys.executable, "-m", "mmm_launch", *launch_flags, "--device", "cpu", "python3", *TRAINER.split()]
    command += ["--resume", "auto", "--max_iters", str(steps), "--outdir", str(outdir)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: outdir.name},
    )


def ranks_of(outdir: Path) -> list[int]:
    """The pids of the ranks that live: the children of launch's fork server, which have its command line."""
    living = processes(outdir)
    servers = {pid for pid, process in living.items() if SERVER in process.command}
    return [pid for pid in servers if living[pid].parent in servers]


class Follower:
    """Reads what launch and rank 0 print, as it comes.

    Attributes:
        ranks: number of ranks that the run goes on with.
        sizes: these numbers, one after each kill that launch noticed.
        pauses: seconds from each kill to the next step's end.
        kills: time and number of ranks of each kill after which no step has ended yet.
        trains: launch has gone on since the last kill.
        step: the last one.
        lost: number of steps made once more after each start.
        messages: lines of launch and errors.
    """

    def __init__(self, most_ranks: int) -> None:
        self.most_ranks = most_ranks
        self.ranks = most_ranks
        self.sizes = [most_ranks]
        self.pauses: list[float] = []
        self.kills: list[tuple[float, int]] = []
        self.trains = False
        self.step = 0
        self.lost: list[int] = []
        self.messages: list[str] = []
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def follow(self, run: subprocess.Popen) -> None:
        """Read what another launch prints, which starts with all ranks."""
        self.ranks = self.most_ranks
        self.kills = []
        self.trains = False
        self.threads = []
        for pipe in (run.stdout, run.stderr):
            thread = threading.Thread(target=self.read, args=(pipe,))
            thread.start()
            self.threads.append(thread)

    def read(self, pipe: Any) -> None:
        for line in pipe:
            with self.lock:
                self.take(line)

    def take(self, line: str) -> None:
        if line.startswith(("launch: ", "error: ")):
            self.messages.append(line)
        continued = re.match(r"launch: .*continuing with world size (\d+)", line)
        resumed = re.search(r"resumed from .* at step (\d+)", line)
        ended_step = re.search(r" iter=(\d+)\b", line)
        if continued:
            self.ranks = int(continued[1])
            self.sizes.append(self.ranks)
            self.trains = True
        elif resumed:
            lost = self.step + 1 - int(resumed[1])
            self.lost.append(lost)
            self.step -= lost
        elif ended_step:
            self.step = int(ended_step[1])
            if self.trains:
                self.end_pauses()

    def end_pauses(self) -> None:
        """A step has ended after the kills."""
        for killed, ranks in self.kills:
            pause = time.monotonic() - killed
            self.pauses.append(pause)
            print(f"{len(self.pauses):4d} {ranks} → {self.ranks} ranks, pause {pause:5.2f} s", flush=True)
        self.kills = []
        self.trains = False

    def add_kill(self) -> None:
        self.kills.append((time.monotonic(), self.ranks))
        self.trains = False

    def results(self) -> dict[str, Any]:
        median_pause = None
        if self.pauses:
            median_pause = median(self.pauses)
        return {"sizes": self.sizes, "pauses": self.pauses, "median_pause": median_pause, "lost": self.lost}


def kill_one(outdir: Path, follower: Follower, chance: random.Random) -> bool:
    """Kill a rank. Returns whether there was one."""
    with follower.lock:
        ranks = ranks_of(outdir)
        if not ranks:
            return False
        try:
            os.kill(chance.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            return False
        follower.add_kill()
        return True


def train_with_kills(
    args: argparse.Namespace, outdir: Path, longest: float, result: dict[str, Any]
) -> tuple[Follower, int]:
    """Start, kill ranks until too few are left, and start again. Returns what was read, and launch's exit code.

    Args:
        longest: seconds from one kill to the next, at most.
    """
    chance = random.Random(args.seed)
    least, most = args.ranks
    until = time.monotonic() + 60 * args.minutes
    follower = Follower(most)
    soon = False
    while True:
        run = start(["--elastic", f"{least}:{most}"], args.steps, outdir)
        follower.follow(run)
        while not (outdir / "checkpoints").exists() and run.poll() is None:
            time.sleep(0.05)
        while run.poll() is None and result["kills"] < args.kills and time.monotonic() < until:
            time.sleep(chance.uniform(min(0.1, longest), longest))
            while follower.kills and not soon and run.poll() is None:
                # The run has not gone on after the kill before.
                time.sleep(0.02)
            if not kill_one(outdir, follower, chance):
                continue
            result["kills"] += 1
            soon = chance.random() < SHARE_SOON
            write(args.json, result | follower.results())
        code = run.wait()
        for thread in follower.threads:
            thread.join()
        too_few_ranks = "is needed: no other attempt" in "".join(follower.messages[-1:])
        if code == 0 or not too_few_ranks:
            result["late"] = time.monotonic() >= until
            return follower, code


def seconds_of_steps(outdir: Path) -> float:
    """Seconds of all steps of a run, each of its slowest rank."""
    dt = load(outdir)["dt"]
    if "rank" in dt.dims:
        dt = dt.max("rank")
    return float(dt.sum())


def main() -> int:
    parser = flags(__doc__, 100)
    parser.add_argument("--ranks", type=int, nargs=2, default=[3, 8], metavar=("MIN", "MAX"))
    parser.add_argument("--steps", type=int, help=f"default: {STEPS_A_KILL} a kill")
    args = parser.parse_args()
    args.steps = args.steps or STEPS_A_KILL * args.kills
    result: dict[str, Any] = {"wrong": [], "steps": args.steps, "kills": 0}
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "undisturbed"
        killed = Path(folder) / "killed"
        run = start(["-n", str(args.ranks[0])], args.steps, undisturbed)
        errors = run.communicate()[1]
        if run.returncode:
            print(errors)
            return 1
        seconds = seconds_of_steps(undisturbed)
        longest = min(LONGEST, SHARE_OF_TIME * seconds / args.kills)
        print(f"{args.steps} steps in {seconds:.1f} s; at most {longest:.2f} s between kills", flush=True)
        follower, code = train_with_kills(args, killed, longest, result)
        if code:
            result["wrong"].append(f"launch ended with exit code {code}: {''.join(follower.messages[-3:])}")
        if result["kills"] < args.kills and not result["late"]:
            result["wrong"].append(f"the run was over after {result['kills']} kills: give more --steps")
        result["wrong"] += left_over(killed)
        largest, problems = difference(killed, undisturbed, 1e-9)
        result["wrong"] += problems
    result |= follower.results()
    result["largest_difference"] = largest
    print(f"{result['kills']} kills of {args.steps} steps; ranks", *result["sizes"])
    pauses = follower.pauses or [float("nan")]
    print(f"median pause {median(pauses):.2f} s, longest {max(pauses):.2f} s; largest difference {largest:.1e}")
    return end(result, args.json)


if __name__ == "__main__":
    sys.exit(main())
