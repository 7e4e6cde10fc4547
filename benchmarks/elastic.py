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
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from disturbed import MARK, difference, end, flags, left_over, processes, write

from mmm.history import load

EVERY = 10  # steps between two checkpoints
STEPS_A_KILL = 40  # of the whole run
BATCH = 120  # divides over every number of ranks from 3 to 8 but 7
LONGEST = 3.0  # s from one kill to the next, at most
SHARE = 0.5  # of the undisturbed run's time, in which all kills come: there has to be a run to kill
SOON = 0.2  # of the kills do not wait until the run has gone on after the one before
SERVER = b"mmm_launch.host.forkserver"
# With AdamW two undisturbed runs, on 2 and on 3 ranks, part by 1e-3 within 1,000 steps: near the floor of this loss it
# amplifies rounding. SGD does not.
TRAINER = (
    "-m mmm.trainer.lm --preset debug --dataset random --optimizer sgd --lr 0.1 --seq_length 4 "
    f"--global_batch_size {BATCH} --device cpu --dtype fp64 --eval_every 0 --no-plots --flush_every 1 "
    f"--checkpoint_every {EVERY}"
)


def start(words: list[str], steps: int, outdir: Path) -> subprocess.Popen:
    program = ["python3", *TRAINER.split()]
    command = [sys.executable, "-m", "mmm_launch", *words, "--device", "cpu", *program, "--resume", "auto"]
    return subprocess.Popen(
        [*command, "--max_iters", str(steps), "--outdir", str(outdir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: outdir.name},
    )


def ranks_of(outdir: Path) -> list[int]:
    """The pids of the ranks that live."""
    there = processes(outdir)
    return [pid for pid, (parent, line) in there.items() if SERVER in line and SERVER in there.get(parent, (0, b""))[1]]


class Follower:
    """What launch and rank 0 say, as it comes.

    Attributes:
        ranks: that the run goes on with. pauses: seconds from each kill to the next step.
    """

    def __init__(self, most: int) -> None:
        self.ranks, self.most = most, most
        self.pauses: list[float] = []
        self.said: list[str] = []
        self.killed: list[tuple[float, int]] = []  # when, of how many ranks; those after which no step has ended
        self.step = 0  # the last
        self.lost: list[int] = []  # steps made once more after each kill
        self.trains = False  # launch has gone on since the last kill
        self.lock = threading.Lock()

    def begin(self, run: subprocess.Popen) -> None:
        """Another launch, of all ranks."""
        self.ranks, self.killed, self.trains = self.most, [], False
        self.threads = [threading.Thread(target=self.follow, args=(pipe,)) for pipe in (run.stdout, run.stderr)]
        for thread in self.threads:
            thread.start()

    def follow(self, pipe) -> None:
        for line in pipe:
            with self.lock:
                if match := re.match(r"launch: .*continuing with world size (\d+)", line):
                    self.ranks, self.trains = int(match[1]), True
                elif "resumed from " in line:
                    self.lost.append(self.step + 1 - int(line.partition(" at step ")[2].split(",")[0]))
                    self.step -= self.lost[-1]
                elif match := re.search(r" iter=(\d+)\b", line):
                    self.step = int(match[1])
                if " iter=" in line and self.trains:
                    for at, ranks in self.killed:
                        self.pauses.append(time.monotonic() - at)
                        count = len(self.pauses)
                        print(f"{count:4d} {ranks} → {self.ranks} ranks, pause {self.pauses[-1]:5.2f} s", flush=True)
                    self.killed, self.trains = [], False
                if line.startswith(("launch: ", "error: ")):
                    self.said.append(line)

    def found(self, most: int) -> dict:
        sizes = [int(match[1]) for line in self.said if (match := re.search(r"continuing with world size (\d+)", line))]
        more = {"median_pause": median(self.pauses) if self.pauses else None, "lost": self.lost}
        return {"sizes": [most, *sizes], "pauses": self.pauses, **more}


def disturb(
    outdir: Path, given: argparse.Namespace, longest: float, chance: random.Random, result: dict
) -> tuple[Follower, int, int]:
    """Train with kills. What was said, how many were killed, and launch's exit code."""
    least, most = given.ranks
    until = time.monotonic() + 60 * given.minutes
    says, done, soon = Follower(most), 0, False
    while True:
        run = start(["--elastic", f"{least}:{most}"], given.steps, outdir)
        says.begin(run)
        while not (outdir / "checkpoints").exists() and run.poll() is None:
            time.sleep(0.05)
        while run.poll() is None and done < given.kills and time.monotonic() < until:
            time.sleep(chance.uniform(min(0.1, longest), longest))
            while says.killed and not soon and run.poll() is None:
                time.sleep(0.02)
            with says.lock:
                pids = ranks_of(outdir)
                if not pids:
                    continue
                try:
                    os.kill(chance.choice(pids), 9)
                except ProcessLookupError:
                    continue
                says.killed.append((time.monotonic(), says.ranks))
                says.trains = False
            done, soon = done + 1, chance.random() < SOON
            write(given.json, result | says.found(most) | {"kills": done})
        code = run.wait()
        for thread in says.threads:
            thread.join()
        too_few = "asks for at least" in "".join(says.said[-1:])
        if code == 0 or not too_few:
            break
    result["late"] = time.monotonic() >= until
    return says, done, code


def main() -> int:
    parser = flags(__doc__, 100)
    parser.add_argument("--ranks", type=int, nargs=2, default=[3, 8], metavar=("MIN", "MAX"))
    parser.add_argument("--steps", type=int, help=f"default: {STEPS_A_KILL} a kill")
    given = parser.parse_args()
    given.steps = given.steps or STEPS_A_KILL * given.kills
    result: dict = {"wrong": [], "steps": given.steps}
    wrong = result["wrong"]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        run = start(["-n", str(given.ranks[0])], given.steps, whole)
        said = run.communicate()[1]
        if run.returncode:
            print(said)
            return 1
        dt = load(whole)["dt"]
        seconds = float((dt.max("rank") if "rank" in dt.dims else dt).sum())
        longest = min(LONGEST, SHARE * seconds / given.kills)
        print(f"{given.steps} steps in {seconds:.1f} s; at most {longest:.2f} s between kills", flush=True)
        says, done, code = disturb(killed, given, longest, random.Random(given.seed), result)
        if code:
            wrong.append(f"launch ended with exit code {code}: {''.join(says.said[-3:])}")
        if done < given.kills and not result["late"]:
            wrong.append(f"the run was over after {done} kills: give more --steps")
        wrong += left_over(killed)
        far, problems = difference(killed, whole, 1e-9)
        wrong += problems
    pause = median(says.pauses) if says.pauses else float("nan")
    result |= says.found(given.ranks[1]) | {"kills": done, "largest_difference": far}
    print(f"{done} kills of {given.steps} steps; ranks {' '.join(map(str, result['sizes']))}")
    print(f"median pause {pause:.2f} s, longest {max(says.pauses, default=pause):.2f} s; largest difference {far:.1e}")
    return end(result, given.json)


if __name__ == "__main__":
    sys.exit(main())
