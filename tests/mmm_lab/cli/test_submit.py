"""``mmm submit``: the script that is shown, what is refused before anything is submitted, and jobs in a row."""

import os
import shlex
import subprocess
import sys

import pytest

from mmm_lab.cli.main import main as mmm
from mmm_lab.cli.sizes import parse_time
from support.queue import StandIn

SITE = "--site perlmutter -N 4 -t 6:00 --project m1"
LM = "-- python3 -m mmm.trainer.lm --preset debug --checkpoint_every 100"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NERSC_HOST", "SLURM_CLUSTER_NAME", "LMOD_SYSTEM_NAME", "MMM_MACHINES"):
        monkeypatch.delenv(name, raising=False)


def test_the_script_of_a_job(capsys, tmp_path):
    assert mmm(["submit", *f"{SITE} --queue debug --dry-run {LM}".split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "#!/bin/bash\n#SBATCH -N 4 -C gpu -q debug -t 06:00:00 -A m1 --gpus-per-node=4\n# NCCL uses TCP sockets"
    )
    assert f"\nmodule load pytorch\ncd {tmp_path}\n" in out
    assert "\ntimeout --foreground --preserve-status --signal USR1 $((21300 - SECONDS)) launch python3 -m mmm" in out
    assert "--resume" not in out
    assert "sbatch --parsable --job-name=lm" in out
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_launch_is_in_a_container_takes_no_python_of_the_host(capsys):
    """The container's Python would see packages of another one. Outside of it, launch is the host's."""
    image = "apptainer exec --nv 'my image.sif'"
    trainer = LM.removeprefix("-- ")
    for inside, command in ((True, f"{image} launch {trainer}"), (False, f"{image} {trainer}")):
        assert mmm(["submit", *SITE.split(), "--dry-run", "--", *shlex.split(command)]) == 0
        out = capsys.readouterr().out
        assert (f". {sys.prefix}/bin/activate\n" in out) is not inside
        first = "" if inside else "launch "
        assert f"$((21300 - SECONDS)) {first}{command}\n" in out


def test_a_queue_that_takes_the_job(capsys):
    """The usual one where it takes it, else another, which is said; a queue that is known to be wrong is refused."""
    frontier = "--site frontier -N 4 --project p --dry-run"
    assert mmm(["submit", *f"{frontier} -t 2h {LM}".split()]) == 0
    usual = capsys.readouterr()
    assert "-p batch" in usual.out
    assert usual.err == ""
    assert mmm(["submit", *f"{frontier} -t 6h {LM}".split()]) == 0
    other = capsys.readouterr()
    assert "-p extended" in other.out
    assert "-p batch" not in other.out
    assert other.err.startswith("mmm submit: --queue extended: queue batch takes 1 to 91 hosts for 2 h")
    for wrong, message in (("-t 6h --queue batch", "--queue extended"), ("-t 300h", "no queue takes such a job")):
        assert mmm(["submit", *f"{frontier} {wrong} {LM}".split()]) == 2
        refused = capsys.readouterr()
        assert refused.out == ""
        assert message in refused.err


def test_a_job_of_flux(capsys, tmp_path, monkeypatch):
    queue = StandIn(tmp_path / "flux", "flux", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "flux"))
    argv = f"submit -N 2 -t 1:30 --project m1 --queue pdebug {LM}".split()
    assert mmm(argv) == 0
    assert "submitted: 1\n" in capsys.readouterr().out
    ((*called, script, _),) = queue.calls()
    assert called == ["flux", ["batch", "--job-name=lm"]]
    head, *rest = script.splitlines()
    assert head == "#!/bin/bash"
    assert rest[:3] == ["# flux: -N 2 --exclusive -t 5400s", "# flux: -q pdebug", "# flux: --setattr=bank=m1"]
    assert not any("flux:" in line for line in rest[3:])
    assert "launch python3 -m mmm.trainer.lm" in script


@pytest.mark.parametrize(
    ("scheduler", "ids", "after", "cancel"),
    [
        ("slurm", ["1", "2", "3"], ["--dependency=afterany:{}"], "scancel"),
        ("pbs", ["1.pbs", "2.pbs", "3.pbs"], ["-W", "depend=afterany:{}"], "qdel"),
        ("flux", ["1", "2", "3"], ["--dependency=afterany:{}"], "flux cancel"),
    ],
)
def test_jobs_in_a_row(capsys, tmp_path, monkeypatch, scheduler, ids, after, cancel):
    """Each job waits for the end of the one before, however that ends, and resumes the same run."""
    queue = StandIn(tmp_path / "bin", scheduler, monkeypatch)
    # Where Slurm is installed, `mmm submit` would take that.
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.path.dirname(sys.executable)}")
    assert mmm(f"submit -N 2 -t 30m --jobs 3 {LM} --outdir run".split()) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-3:] == [
        f"submitted: {' '.join(ids)}",
        f"to follow: watch -n 5 mmm history {tmp_path}/run",
        f"to stop:   {cancel} {' '.join(ids)}",
    ]
    first, *others = queue.calls()
    assert "afterany" not in " ".join(first[1])
    for (_, argv, script, _), before in zip(others, ids, strict=False):
        assert argv[-len(after) :] == [word.format(before) for word in after]
        assert script == first[2]
    assert len(others) == 2
    launch = first[2].splitlines()[-1]
    # 30 minutes less 3, in which the run saves.
    assert launch.startswith("timeout --foreground --preserve-status --signal USR1 $((1620 - SECONDS)) launch python3 ")
    assert launch.endswith(" --outdir run --resume auto")


def test_a_dry_run_of_jobs_in_a_row(capsys, tmp_path):
    """A single job of a row resumes too: the line may be given again."""
    argv = f"--site polaris -N 2 -t 30m --project p --setup true --jobs 1 --dry-run {LM}".split()
    assert mmm(["submit", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash -l"
    assert {"#PBS -l walltime=00:30:00", "#PBS -q debug", "true"} <= set(lines)
    assert not any("module" in line and not line.startswith("#") for line in lines)
    (launch,) = [line for line in lines if line.startswith("timeout")]
    assert f" --outdir {tmp_path}/outputs/lm/" in launch
    assert launch.endswith(" --resume auto")
    assert lines[-1].endswith("qsub -N lm -W depend=afterany:ID")
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_which_a_queue_takes_only_some(capsys, tmp_path, monkeypatch):
    """Those that it has taken are named: they wait in the queue, and the user may not want them alone."""
    StandIn(tmp_path / "bin", "slurm", monkeypatch).refuse(after=2)
    assert mmm(f"submit -t 1h --jobs 4 {LM}".split()) == 2
    error = capsys.readouterr().err
    assert "2 of 4 jobs" in error
    assert "scancel 1 2" in error
    assert "invalid account" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (SITE, "what is to run comes last, after two dashes"),
        (f"{SITE} -- launch", "what is to run comes last"),
        (f"--site perlmuter -N 1 -t 1h {LM}", "machine perlmuter"),
        (f"--site perlmutter -N 1 {LM}", "required: -t/--time"),
        (f"--site perlmutter -t 30 {LM}", "6h, 90m, 1d12h"),
        (f"--site perlmutter -t 6:75 {LM}", "6:75"),
        (f"--site perlmutter -t 30s {LM}", "schedulers count in minutes"),
        (f"--site perlmutter -t 1h {LM}", "--project"),
        (f"--site perlmutter -t 1h -N 2000 {LM}", "-N 2,000: Perlmutter has 1,536"),
        (f"--site perlmutter -t 1h -N 0 {LM}", "--nhosts: 0: "),
        (f"{SITE} -N two {LM}", "invalid count value: 'two'"),
        (f"{SITE} --jobs 0 {LM}", "--jobs 0"),
        (f"{SITE} --before-end 7h {LM}", "--before-end 07:00:00"),
        (f"{SITE} --jobs 2 -- python3 -m mmm.trainer.lm", "has no --checkpoint_every"),
        (f"--site laptop -t 1h {LM}", "--site"),
        (f"--site dgx-h100 -t 1h --queue q {LM}", "has no {queue}"),
        (f"{SITE} {LM} --text FOLDER", "FOLDER"),
        (f"--site perlmutter -t 1h --project PROJECT {LM}", "PROJECT"),
        (f"{SITE} -- launch --nproc 4 --signals X {LM[3:]}", "--signals"),
    ],
)
def test_what_is_refused(argv, message, capsys, tmp_path):
    assert mmm(["submit", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mmm: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--project", "m1\n#SBATCH --exclusive"], "--project 'm1\\n#SBATCH --exclusive'"),
        (["--queue", "a b"], "--queue"),
        (["--directive", "--x\nrm -rf y"], "each is one line"),
    ],
)
def test_nobody_adds_a_line_to_a_script(more, message, capsys, tmp_path):
    site = SITE.split()
    # An option is given once.
    if more[0] == "--project":
        site = site[:-2]
    assert mmm(["submit", *site, "--dry-run", *more, *LM.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) or "\n#SBATCH" in more[-1]
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_words_of_the_shell_stay_words(capsys, tmp_path):
    """What a command has is what its program gets, in a folder of any name."""
    folder = tmp_path / "a $(touch pwned) 'b'\n#SBATCH -A c"
    folder.mkdir()
    os.chdir(folder)
    odd = ["--note", "$(touch pwned) `touch pwned` \"'; touch pwned; #\n!*~{a,b}"]
    assert mmm(["submit", *SITE.split(), "--dry-run", "--stage", "$(touch pwned)", *LM.split(), *odd]) == 0
    lines = capsys.readouterr().out.partition("\nnot submitted")[0].split("module load pytorch\n")[1]
    (tmp_path / "launch").write_text('#!/bin/bash\npwd > "$0.pwd"; printf "%s\\0" "$@" > "$0.argv"\n')
    (tmp_path / "launch").chmod(0o755)
    shown = lines.replace(f". {shlex.quote(sys.prefix)}/bin/activate", f"PATH={shlex.quote(str(tmp_path))}:$PATH")
    subprocess.run(["bash", "-c", shown], check=True)
    passed_on = ["--stage", "$(touch pwned)", *LM.split()[1:], *odd]
    # A stand-in for launch has written what it got.
    assert (tmp_path / "launch.argv").read_text().split("\0")[:-1] == passed_on
    assert (tmp_path / "launch.pwd").read_text() == f"{folder}\n"
    assert list(folder.iterdir()) == []


def test_without_a_scheduler_and_with_one_that_refuses(capsys, tmp_path, monkeypatch):
    argv = ["submit", *f"-t 1h --jobs 2 {LM} --outdir a/run".split()]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        assert mmm(argv) == 2
    assert "PATH" in capsys.readouterr().err
    queue = StandIn(tmp_path / "bin", "slurm", monkeypatch)
    queue.refuse()
    assert mmm(argv) == 2
    assert capsys.readouterr().err == "mmm: error: sbatch: sbatch: error: invalid account\n"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21600),
        ("90m", 5400),
        ("1d12h", 129600),
        ("6:00", 21600),
        ("0:30", 1800),
        ("6:00:30", 21630),
        ("2-00:00:00", 172800),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == seconds
