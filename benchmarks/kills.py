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

from disturbed import MARK, difference, end, flags, left_over, processes, write

from mmm.checkpoint.manifest import broken_file, read_manifest, steps_of
from mmm.errors import RecordError
from mmm.history import load

EVERY = 4  # steps between two checkpoints
STEPS_A_KILL = 8  # of the whole run: so many kills find it still running
EARLY = 0.3  # of the kills come by the clock, while ranks start; the others once a step is reached
TRAINER = (
    "-m mmm.trainer.lm --preset debug --dataset random --seq_length 16 --global_batch_size 8 --device cpu --dtype fp64 "
    f"--eval_every 0 --no-plots --flush_every 1 --checkpoint_every {EVERY} --resume auto"
)


def start(ranks: int, steps: int, outdir: Path, layout: str, mode: str) -> subprocess.Popen:
    trainer = f"{TRAINER} --checkpoint_mode {mode} {layout}"
    words = ["-n", str(ranks), "--device", "cpu", "python3", *shlex.split(trainer)]
    command = [sys.executable, "-m", "mmm_launch", *words, "--max_iters", str(steps), "--outdir", str(outdir)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: outdir.name},
    )


def kill(process: subprocess.Popen, what: str, outdir: Path, chance: random.Random) -> None:
    pids = {"launch": [process.pid], "all": list(processes(outdir))}.get(what)
    if pids is None:  # a rank, or one of launch's own processes that stand between
        others = [pid for pid in processes(outdir) if pid != process.pid]
        pids = [chance.choice(others)] if others else [process.pid]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def logged(outdir: Path) -> int:
    """The last step that the run has logged; 0 before."""
    log = outdir / "log.txt"
    steps = re.findall(r" iter=(\d+)\b", log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def problems(outdir: Path, newest: int) -> tuple[int, list[str]]:
    """The newest checkpoint's step, and what is wrong with what a kill has left."""
    found, wrong = steps_of(outdir / "checkpoints"), []
    for path in found:
        manifest = read_manifest(path)
        if (broken := broken_file(path, manifest.files)) is not None:
            wrong.append(broken)
    step = int(found[0].name.removeprefix("step-")) if found else 0
    if step < newest:
        wrong.append(f"the newest checkpoint is of step {step}, and there was one of step {newest}")
    return step, wrong


def main() -> int:
    parser = flags(__doc__, 200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=[""], help="flags of the trainer, in turn")
    parser.add_argument("--mode", choices=("async", "blocking"), default="async", help="--checkpoint_mode")
    given = parser.parse_args()
    most = EVERY if given.mode == "blocking" else 2 * EVERY
    chance, steps, wrong, lost = random.Random(given.seed), STEPS_A_KILL * given.kills, list[str](), list[int]()
    result = {"kills": 0, "steps": steps, "most_steps_lost": 0, "every": EVERY, "mode": given.mode, "wrong": wrong}
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        began = time.monotonic()
        run = start(given.ranks, steps, whole, given.layouts[0], given.mode)
        _, err = run.communicate()
        if run.returncode:
            print(err)
            return 1
        print(f"{given.ranks} ranks, {steps} steps in {time.monotonic() - began:.1f} s; seed {given.seed}", flush=True)
        newest, done, until = 0, 0, time.monotonic() + 60 * given.minutes
        while done < given.kills and time.monotonic() < until:
            run = start(given.ranks, steps, killed, given.layouts[done % len(given.layouts)], given.mode)
            what = chance.choice(("rank", "rank", "all", "launch"))
            after = chance.uniform(0.3, 3.0) if chance.random() < EARLY else math.inf
            goal = min(logged(killed) + chance.randint(1, 2 * STEPS_A_KILL), steps - EVERY)
            began = time.monotonic()
            while run.poll() is None and time.monotonic() < began + after and logged(killed) < goal:
                time.sleep(0.005)
            after = time.monotonic() - began
            if run.poll() is None:
                kill(run, what, killed, chance)
                err = run.communicate()[1]
            else:
                err = run.communicate()[1]
                if run.returncode:
                    wrong.append(f"it ended by itself: {err}")
                break
            wrong += left_over(killed)
            done += 1
            newest, bad = problems(killed, newest)
            wrong += bad
            try:
                reached = int(load(killed)["iter"].values[-1]) + 1
            except (RecordError, IndexError):
                reached = 0
            lost.append(reached - newest)
            if lost[-1] > most:
                bad.append(f"{lost[-1]} steps are lost, and {most} may be")
                wrong.append(bad[-1])
            print(
                f"{done:4d} {what:6} after {after:4.1f} s: step {reached}, checkpoint {newest} {' '.join(bad)}",
                flush=True,
            )
            result |= {"kills": done, "most_steps_lost": max(lost)}
            write(given.json, result)
        run = start(given.ranks, steps, killed, given.layouts[done % len(given.layouts)], given.mode)
        _, err = run.communicate()
        if run.returncode and "no step is left" not in err:
            wrong.append(f"the last start failed: {err}")
        far, problems_of_curve = difference(killed, whole, 1e-9 if len(given.layouts) > 1 else 0)
        print(f"largest relative difference of a loss: {far:.1e}")
        wrong += problems_of_curve
    print(f"{done} kills; at most {max(lost, default=0)} steps were lost, {given.mode}, a checkpoint every {EVERY}")
    return end(result, given.json)


if __name__ == "__main__":
    sys.exit(main())
