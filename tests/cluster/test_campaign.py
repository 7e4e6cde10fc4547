"""`mmm submit --until-done` on a real Slurm: three jobs, one of which is killed, one record and one curve."""

import json
import re
import sys

import pytest

import mmm.history
from mmm.history.record.dataset import marks_of

# The first job makes six steps and waits for the signal before its end, which on a busy machine may come earlier; the
# second makes some more, and waits to be killed; it and the third do not heed that signal, however slowly they start.
PROGRAM = """
import pathlib, signal, time
first, early = not pathlib.Path("run/checkpoints").exists(), []
signal.signal(signal.SIGUSR1, (lambda *_: early.append(1)) if first else signal.SIG_IGN)
from mmm.runtime import stop
stop.STOPPING = stop.STOPPING if first else (signal.SIGINT, signal.SIGTERM)
from mmm.trainer import lm, run_main, parse
from mmm.run.hooks.checkpoint import Checkpoint
from mmm.run.run import Run
row = Run.row
def waiting(self, at, *args, **kw):
    done = row(self, at, *args, **kw)
    wish = next(hook for hook in self.hooks if isinstance(hook, Checkpoint)).vote.signal
    wish.came = wish.came or (signal.SIGUSR1 if early else None)
    while first and at["iter"] == 5 and wish.came is None:
        time.sleep(0.05)
    if at["iter"] == 11 and not pathlib.Path("killed").exists():
        pathlib.Path("ready").touch()
        time.sleep(300)
    return done
Run.row = waiting
run_main(lambda: lm.train(parse(lm.Config, "")))
"""
FLAGS = "--preset debug --dataset random --dtype fp64 --no-plots --seq_length 16 --global_batch_size 4 --eval_every 0"
FLAGS += " --max_iters 14 --checkpoint_every 4 --checkpoint_mode blocking --flush_every 1 --outdir run"
TIME, BEFORE_END = "2m", "96s"  # in the 24 s that are left the first job starts, and makes its steps


def test_three_jobs_and_one_curve(launcher, slurm):
    launcher.write("t.py", PROGRAM)
    command = f"-N 2 -t {TIME} --before-end {BEFORE_END} --until-done -- python3 t.py {FLAGS}".split()
    variables = launcher.environment(MASTER_ADDR="127.0.0.1")
    submitted = slurm.run(
        sys.executable, "-m", "mmm_lab.cli.main", "submit", *command, variables=variables, cwd=launcher.folder
    )
    assert submitted.returncode == 0, submitted.stderr
    assert "#SBATCH -N 2 -t 00:02:00\n" in submitted.stdout
    jobs = launcher.folder / "run" / "jobs"
    campaign = jobs / "campaign.json"
    launcher.wait_for("ready")
    second = json.loads(campaign.read_text())["jobs"][1]["id"]
    launcher.write("killed", "")
    slurm.run("scancel", "--full", "--signal=KILL", second)  # its script as well: it cannot say how it ended
    slurm.wait(lambda: json.loads(campaign.read_text())["over"], "end of the campaign")
    slurm.idle()

    told = json.loads(campaign.read_text())
    said = {path.stem: path.read_text() for path in jobs.glob("*.out")}
    assert told["over"] == "the run is finished, after 3 jobs", said
    assert [job["exit_code"] for job in told["jobs"]] == [75, None, 0], said
    assert sorted(said) == sorted(job["id"] for job in told["jobs"]), "a fourth job has run"
    steps = [job["at"] for job in told["jobs"]]
    assert (steps[0], steps[2]) == (0, 8)
    assert 1 <= steps[1] <= 7
    run = mmm.history.load(launcher.folder / "run")
    assert (run.attrs["state"], run.iter.values.tolist()) == ("finished", list(range(14)))
    assert [(mark["draw"], mark["step"]) for mark in marks_of(run)] == [(step, step) for step in steps[1:]]
    rows = [row for text in said.values() for row in re.findall(r" iter=(\d+)/14 .*?loss=([\d.]+)", text)]
    assert len(rows) == 14 + 12 - 8  # the steps that were lost with the second job, and made again
    for step, loss in rows:
        assert float(loss) == pytest.approx(run.loss.values[int(step)], abs=1e-4)
