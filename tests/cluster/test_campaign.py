"""`mmm submit --jobs` on a real Slurm: four jobs in a row, of which the second is killed; one record and one curve."""

import re
import sys

import pytest

import mmm.history
from mmm.history.record.dataset import marks_of

# The first job makes six steps and waits for the signal before its end, which on a busy machine may come earlier; the
# second makes some more, and waits to be killed; it and the others do not heed that signal, however slowly they start.
PROGRAM = """
import pathlib, signal, time
first, early = not pathlib.Path("run/checkpoints").exists(), []
signal.signal(signal.SIGUSR1, (lambda *_: early.append(1)) if first else signal.SIG_IGN)
from mmm.runtime import stop
stop.STOPPING = stop.STOPPING if first else (signal.SIGINT, signal.SIGTERM)
from mmm.trainer import lm, run_main, parse
from mmm.run.run import Run
row = Run.row
def waiting(self, at, *args, **kw):
    done = row(self, at, *args, **kw)
    wish = self.folder.checkpoints.vote.signal
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
# In the 24 s that are left the first job starts, and makes its steps.
TIME, BEFORE_END = "2m", "96s"


def test_four_jobs_and_one_curve(launcher, slurm):
    """The third makes the last step, and the fourth ends at once."""
    launcher.write("t.py", PROGRAM)
    command = f"-N 2 -t {TIME} --before-end {BEFORE_END} --jobs 4 -- python3 t.py {FLAGS}".split()
    variables = launcher.environment(MASTER_ADDR="127.0.0.1")
    submitted = slurm.run(
        sys.executable, "-m", "mmm_lab.cli.main", "submit", *command, variables=variables, cwd=launcher.folder
    )
    assert submitted.returncode == 0, submitted.stderr
    assert "#SBATCH -N 2 -t 00:02:00\n" in submitted.stdout
    jobs = re.search(r"^submitted: (.*)$", submitted.stdout, re.M)[1].split()
    assert len(jobs) == 4
    launcher.wait_for("ready")
    launcher.write("killed", "")
    # Its script as well, as where a host dies.
    slurm.run("scancel", "--full", "--signal=KILL", jobs[1])
    slurm.wait(lambda: not slurm.run("squeue", "-h").stdout.strip(), "end of the jobs")

    outputs = {job: (launcher.folder / f"slurm-{job}.out").read_text() for job in jobs}
    codes = [re.search(r"ExitCode=(\S+)", slurm.run("scontrol", "show", "job", job).stdout)[1] for job in jobs]
    assert codes[0] == "75:0", outputs
    # a signal
    assert codes[1].startswith("0:"), outputs
    assert codes[2:] == ["0:0", "0:0"], outputs
    run = mmm.history.load(launcher.folder / "run")
    assert (run.attrs["state"], run.iter.values.tolist()) == ("finished", list(range(14)))
    marks = marks_of(run)
    steps = [mark["step"] for mark in marks]
    assert 1 <= steps[0] <= 7
    assert steps[1:] == [8, 14]
    assert [mark["draw"] for mark in marks] == steps
    rows = [row for text in outputs.values() for row in re.findall(r" iter=(\d+)/14 .*?loss=([\d.]+)", text)]
    # The steps that were lost with the second job, and made again.
    assert len(rows) == 14 + 12 - 8
    for step, loss in rows:
        assert float(loss) == pytest.approx(run.loss.values[int(step)], abs=1e-4)
