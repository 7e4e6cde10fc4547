"""A training that is killed again and again, and goes on: is what it leaves always whole, and its curve the same?

    python benchmarks/kills.py [--kills 200] [--minutes M] [--seed 0] [--mode async|blocking]
                               [--layouts "" "--tpsize 2" "--pp 2"] [--json FILE]

A language model is trained once in one go, and once more with `kill -9` at random moments: of a rank, of all, of
launch, also while ranks start and while a checkpoint is written. Each start goes on with ``--resume auto``, on the next
of the layouts. After each kill nothing may be left running; every checkpoint that has its name has to be whole; and the
newest may not be older than before. A kill may lose one interval between two checkpoints, and with ``--mode async``
two, since one that is being written does not count. The losses have to be those of the run in one go in the end: bit
for bit where there is one layout, to 1e-9 where there are several; every step is in the record once.

Printed for each kill: when, what, the step reached, the newest checkpoint. Exit code 1 if anything does not hold.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from disturbed import MARK, difference, end, flags, left_over, processes, write

from mmm.checkpoint.manifest import broken_file, read_manifest, steps_of
from mmm.errors import RecordError
from mmm.history import load

# Steps between two checkpoints.
EVERY = 4
# Steps of the whole run for each kill, so that all kills find it still running.
STEPS_A_KILL = 8
# Of the kills, which come while ranks start. The others come once a step is reached.
SHARE_BY_CLOCK = 0.3
TRAINER = (
    "-m mmm.trainer.lm --preset debug --dataset random --seq_length 16 --global_batch_size 8 --device cpu --dtype fp64 "
    f"--eval_every 0 --no-plots --flush_every 1 --checkpoint_every {EVERY} --resume auto"
)


def start(args: argparse.Namespace, outdir: Path, layout: str) -> subprocess.Popen:
    """Start the training on a layout, or go on with it."""
    launch = [sys.executable, "-m", "mmm_launch", "-n", str(args.ranks), "--device", "cpu", "python3"]
    trainer = shlex.split(f"{TRAINER} --checkpoint_mode {args.mode} {layout}")
    end_of_run = ["--max_iters", str(STEPS_A_KILL * args.kills), "--outdir", str(outdir)]
    return subprocess.Popen(
        launch + trainer + end_of_run,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: outdir.name},
    )


def victims(target: str, run: subprocess.Popen, outdir: Path, chance: random.Random) -> list[int]:
    """The pids to kill.

    Args:
        target: "launch", "all", or "rank": any process below launch, so also one that stands between it and its ranks.
    """
    if target == "launch":
        return [run.pid]
    living = list(processes(outdir))
    if target == "all":
        return living
    below = [pid for pid in living if pid != run.pid]
    if not below:
        return [run.pid]
    return [chance.choice(below)]


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has ended by itself.
            continue


def logged_step(outdir: Path) -> int:
    """The last step in the log. 0 if there is none."""
    log = outdir / "log.txt"
    if not log.exists():
        return 0
    steps = re.findall(r" iter=(\d+)\b", log.read_text())
    if not steps:
        return 0
    return int(steps[-1])


def recorded_step(outdir: Path) -> int:
    """The last step in the record. 0 if there is none."""
    try:
        return int(load(outdir)["iter"].values[-1]) + 1
    except (RecordError, IndexError):
        return 0


def wait_for_moment(run: subprocess.Popen, outdir: Path, last_step: int, chance: random.Random) -> None:
    """Return at a random moment, or when the run has ended."""
    seconds = math.inf
    if chance.random() < SHARE_BY_CLOCK:
        seconds = chance.uniform(0.3, 3.0)
    step = min(logged_step(outdir) + chance.randint(1, 2 * STEPS_A_KILL), last_step)
    deadline = time.monotonic() + seconds
    while run.poll() is None and time.monotonic() < deadline and logged_step(outdir) < step:
        time.sleep(0.005)


def check_checkpoints(outdir: Path, newest_before: int) -> tuple[int, list[str]]:
    """The step of the newest checkpoint, and what is wrong with those that a kill has left: a sentence each."""
    problems = []
    # The newest first.
    checkpoints = steps_of(outdir / "checkpoints")
    for path in checkpoints:
        broken = broken_file(path, read_manifest(path).files)
        if broken is not None:
            problems.append(broken)
    newest = 0
    if checkpoints:
        newest = int(checkpoints[0].name.removeprefix("step-"))
    if newest < newest_before:
        problems.append(f"the newest checkpoint is of step {newest}, and there was one of step {newest_before}")
    return newest, problems


def train_with_kills(args: argparse.Namespace, outdir: Path, result: dict[str, Any]) -> None:
    """Start, kill and start again. Writes into the result after each kill."""
    chance = random.Random(args.seed)
    most_lost = EVERY if args.mode == "blocking" else 2 * EVERY
    until = time.monotonic() + 60 * args.minutes
    newest = 0
    while result["kills"] < args.kills and time.monotonic() < until:
        began = time.monotonic()
        run = start(args, outdir, args.layouts[result["kills"] % len(args.layouts)])
        target = chance.choice(("rank", "rank", "all", "launch"))
        wait_for_moment(run, outdir, result["steps"] - EVERY, chance)
        seconds = time.monotonic() - began
        if run.poll() is not None:
            errors = run.communicate()[1]
            if run.returncode:
                result["wrong"].append(f"it ended by itself: {errors}")
            return
        kill(victims(target, run, outdir, chance))
        run.communicate()
        problems = left_over(outdir)
        newest, of_checkpoints = check_checkpoints(outdir, newest)
        problems += of_checkpoints
        reached = recorded_step(outdir)
        lost = reached - newest
        if lost > most_lost:
            problems.append(f"{lost} steps are lost, and {most_lost} may be")
        result["wrong"] += problems
        result["kills"] += 1
        result["most_steps_lost"] = max(result["most_steps_lost"], lost)
        line = f"{result['kills']:4d} {target:6} after {seconds:4.1f} s: step {reached}, checkpoint {newest}"
        print(line, *problems, flush=True)
        write(args.json, result)


def main() -> int:
    parser = flags(__doc__, 200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=[""], help="flags of the trainer, in turn")
    parser.add_argument("--mode", choices=("async", "blocking"), default="async", help="--checkpoint_mode")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "kills": 0,
        "steps": STEPS_A_KILL * args.kills,
        "most_steps_lost": 0,
        "every": EVERY,
        "mode": args.mode,
        "wrong": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "undisturbed"
        killed = Path(folder) / "killed"
        began = time.monotonic()
        run = start(args, undisturbed, args.layouts[0])
        errors = run.communicate()[1]
        if run.returncode:
            print(errors)
            return 1
        seconds = time.monotonic() - began
        print(f"{args.ranks} ranks, {result['steps']} steps in {seconds:.1f} s; seed {args.seed}", flush=True)
        train_with_kills(args, killed, result)
        run = start(args, killed, args.layouts[result["kills"] % len(args.layouts)])
        errors = run.communicate()[1]
        if run.returncode and "no step is left" not in errors:
            result["wrong"].append(f"the last start failed: {errors}")
        # One layout has the same bits each time.
        bound = 1e-9 if len(args.layouts) > 1 else 0.0
        largest, problems = difference(killed, undisturbed, bound)
        print(f"largest relative difference of a loss: {largest:.1e}")
        result["wrong"] += problems
    lost = result["most_steps_lost"]
    print(f"{result['kills']} kills; at most {lost} steps were lost, {args.mode}, a checkpoint every {EVERY}")
    return end(result, args.json)


if __name__ == "__main__":
    sys.exit(main())
