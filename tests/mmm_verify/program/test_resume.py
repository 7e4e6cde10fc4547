"""A script that is stopped and started anew: what its checkpoint leaves out is named, and a right one is the same."""

from pathlib import Path

import pytest

from mmm_verify.command import main
from mmm_verify.program import resume
from support.clock import PATIENCE, long

SCRIPTS = Path(__file__).parent / "scripts"
EVERYTHING = "dropout,scaler,average,shadow"


@pytest.fixture
def resumed(monkeypatch):
    """Verifies that `resumes.py`, which finds its checkpoint itself, goes on as without a stop."""
    monkeypatch.chdir(SCRIPTS)

    def verify(*args, ranks=1, steps=3, again=()):
        line = ["resumes.py", *args]
        verdict = resume.verify_resume(line, [*line, *again], ranks, steps=steps, timeout=PATIENCE)
        # All that it has written is in copies of the folder.
        assert not list(SCRIPTS.glob("*.pt"))
        return verdict

    return verify


@pytest.mark.parametrize(
    ("parts", "ranks", "args"),
    [
        (EVERYTHING, 2, []),
        # Each rank has a checkpoint of its own shards.
        long("fsdp", 2, []),
        long("sgd", 1, []),
        # The generator is not restored, but nothing uses what is drawn from it.
        long("idle", 1, ["random"]),
        # What was loaded is off by one rounding.
        long("", 2, ["rounding"]),
    ],
)
def test_right(resumed, parts, ranks, args):
    verdict = resumed(*args, "--with", parts, ranks=ranks)
    assert verdict.same, verdict
    is_exact = "rounding" not in args
    assert ("bit for bit" in verdict.compared["weights"]) == is_exact
    assert bool(verdict.notes) == ("random" in args)


@pytest.mark.parametrize(
    ("mistakes", "parts", "first", "says"),
    [
        ("optimizer", "", "moments of step 4", "the optimizer's moments are lost"),
        long("optimizer", "sgd", "moments of step 4", "momentum_buffer of 0.weight on rank 0: is that of step 1"),
        long("schedule", "", "rates of step 5", "the schedule was not loaded, or counts other steps"),
        long("optimizer schedule", "", "moments of step 4", "the schedule starts from its beginning"),
        long("sampler", "", "batch of step 4", "the sampler starts from its beginning"),
        long("again", "", "batch of step 4", "is that of step 3, not of step 4: the count of steps is one too low"),
        long("beyond", "", "batch of step 4", "is that of step 5, not of step 4: the count of steps is one too high"),
        long("scaler", "scaler", "scaler of step 4", "the GradScaler starts from its beginning"),
        long("buffers", "", "buffers of step 4", "1.running_mean on rank 0: is that of step 1"),
        long("half", "", "weights of step 4", "0.weight on rank 0: is that of step 4, rounded to bfloat16"),
        long("random", "dropout", "random numbers of step 4", "torch's generator on rank 0: is that of step 1"),
        ("average", "average", "averages of the last step", "the average (EMA) was not loaded"),
        long("shadow", "shadow", "averages of the last step", "the average (EMA) was not loaded"),
    ],
)
def test_wrong(resumed, mistakes, parts, first, says):
    verdict = resumed(*mistakes.split(), "--with", parts)
    assert verdict.exit_code == 1, verdict
    assert verdict.first.startswith(first)
    assert says in str(verdict)


@pytest.mark.long
def test_moments_of_shards_on_two_ranks_are_lost(resumed):
    verdict = resumed("optimizer", "--with", "fsdp", ranks=2)
    assert verdict.first.startswith("moments of step 4")


@pytest.mark.long
def test_the_last_checkpoint_may_be_older_than_the_stop(resumed):
    verdict = resumed("--every", "2")
    assert verdict.same, verdict
    assert "2 steps and 3 after a new start" in verdict.layout
    assert "the weights of the new start are those after step 2" in verdict.notes[0]


@pytest.mark.parametrize(
    ("args", "again", "says"),
    [
        (["--every", "9"], [], "no checkpoint was found, or none was written in 3 steps"),
        long([], ["--load", "none.pt"], "what 3 steps have saved (--stop-after), on one rank: FileNotFoundError"),
        long([], ["--steps", "4"], "(--stop-after), on one rank: it ended after 1 optimizer step, and 3 are"),
        long(["unseeded"], [], "not deterministic: two starts from the beginning differ in step 1"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(resumed, args, again, says):
    verdict = resumed(*args, again=again)
    assert verdict.exit_code == 2
    assert says in verdict.reason
    assert "\n" not in verdict.reason


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--resume", "last.pt"], "a --resume of the script itself comes after --"),
        (["--resume", "torchrun train.py"], "--ranks starts its ranks"),
        (["--resume", ""], "write the line of the new start"),
        (["--resume", "none.py"], "--resume none.py: there is no such file"),
        (["--resume", "resumes.py", "--ranks", "1,2"], "--ranks 1,2: write one number with --resume"),
        (["--resume", "resumes.py", "--stop-after", "1"], "--stop-after 1, --ranks 1: at least 2 steps"),
        (["--resume", "resumes.py", "--one-rank-args", "x"], "--resume goes without --one-rank-args"),
    ],
)
def test_flags_that_do_not_go_together(flags, says, monkeypatch, capsys):
    monkeypatch.chdir(SCRIPTS)
    assert main(["--program", "resumes.py", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_large_file_is_linked(tmp_path, monkeypatch):
    """A data set is not copied; a small file, to which a script may write, is."""
    monkeypatch.setattr(resume, "LARGEST_COPY", 4)
    for name, text in (("log", "1"), ("data", "12345")):
        (tmp_path / name).write_text(text)
        resume.copy_file(tmp_path / name, tmp_path / f"{name}-copy")
        assert (tmp_path / f"{name}-copy").read_text() == text
        assert (tmp_path / f"{name}-copy").is_symlink() == (name == "data")
