"""Scripts that cannot be compared: each is answered in one line, with exit code 2, and leaves no process."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmm_verify import verify_program
from mmm_verify.command import main
from support.clock import PATIENCE, long, stretched
from support.processes import runs
from support.signals import as_from_a_terminal

# A right program, of which each test changes something. `leave` says in a file of its own that this process runs.
BEGIN = """
import os, sys, time
import torch
import torch.distributed as dist
from pathlib import Path
from torch import nn

def leave():
    Path(f"pid-{os.getpid()}").write_text(str(os.getpid()))

leave()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randn(8, 2)

def step():
    rows = torch.arange(8).chunk(world_size)[rank]
    loss = (model(x[rows]) - y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
"""
# Ranks of its own: the environment of each is made here.
OWN_RANKS = """
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank):
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{rank}")

if __name__ == "__main__":
    START
"""


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Verifies a script, and returns the verdict, which has to be that nothing can be compared."""
    monkeypatch.chdir(tmp_path)

    def refuse(code, *args, timeout=None, begin=BEGIN):
        Path("train.py").write_text(f"{begin}\n{code}\n")
        verdict = verify_program(["train.py", *args], (1, 2), timeout=timeout or stretched(30))
        assert verdict.exit_code == 2, verdict
        assert "\n" not in verdict.reason
        for path in tmp_path.glob("pid-*"):
            assert not runs(int(path.read_text()))
        return verdict

    return refuse


@pytest.mark.parametrize(
    ("code", "says", "shows"),
    [
        ("print('nothing to do')", "on one rank: it ended without an optimizer step", "nothing to do"),
        ("step(); print('early')", "on one rank: it ended after 1 optimizer step, and 2 are compared", "early"),
        ("sys.exit(0)", "on one rank: it exited with code 0 without an optimizer step", ""),
        ("sys.exit('no config')", "on one rank: it exited with code 1 without an optimizer step", "no config"),
        ("step(); raise KeyError('lr')", "on one rank: KeyError: 'lr' (train.py:", "KeyError: 'lr'"),
        ("if rank == 1: raise KeyError('lr')\nstep(); step()", "on 2 ranks: rank 1: KeyError: 'lr' (train", "KeyError"),
        ("if rank == 1: sys.exit(3)\nstep(); step()", "on 2 ranks: rank 1: it exited with code 3 without", ""),
        ("model.cuda(); step(); step()", "it uses a GPU, and ranks are processes on this host's CPU", ""),
        ("input('name? '); step(); step()", "it asks for input, and a rank has no terminal (train.py:", ""),
        ("os.kill(os.getpid(), 9)", "on one rank: killed by SIGKILL", ""),
        ("sys.stdout.close(); step(); sys.stderr.close()", "ended after 1 optimizer step, and 2 are compared", ""),
        ("x = x / 0; step(); step()", "on one device is nan", ""),
        ("model.eval(); step(); step()", "no nn.Module is called with tensors in training mode", ""),
        ("x = x.roll(rank, 0); step(); step()", "the ranks drew other samples: in step 1, 7 of 8 are those of one", ""),
    ],
)
def test_refused(refused, code, says, shows):
    verdict = refused(code)
    assert says in verdict.reason
    assert shows in verdict.details


def test_its_own_arguments_are_wrong(refused):
    code = "import argparse\nargparse.ArgumentParser().parse_args()"
    verdict = refused(code, "--lr", "3")
    assert "it exited with code 2" in verdict.reason
    assert "train.py: error: unrecognized arguments: --lr 3" in verdict.details
    # --help after the file is the script's.
    assert "usage: train.py" in refused(code, "--help").details


def test_another_backend(refused):
    assert (
        "it uses NCCL, and ranks are"
        in refused("", begin='import torch.distributed as d\nd.init_process_group("nccl")').reason
    )


@pytest.mark.parametrize(
    "start",
    [
        "mp.spawn(main, nprocs=2)",
        "process = mp.get_context('fork').Process(target=main, args=(0,)); process.start(); process.join()",
        long("process = mp.get_context('spawn').Process(target=main, args=(0,)); process.start(); process.join()"),
    ],
)
def test_a_script_with_ranks_of_its_own(refused, start):
    verdict = refused("", begin=OWN_RANKS.replace("START", start))
    assert "it starts ranks of its own: give a script that torchrun could start" in verdict.reason


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("if rank == 1: time.sleep(1000)\nstep(); step()", "rank 0 waited in a collective that rank 1 did not reach"),
        long(
            "step()\nif rank == 0: dist.barrier()\nstep(); step()",
            "all of them were in collectives, but not",
        ),
    ],
)
def test_a_hang(refused, code, says):
    # The hang is waited for in full, and the run on one rank before it takes 0.3 s: a burst of processes must not
    # stretch the limit to minutes.
    verdict = refused(code, timeout=min(stretched(2), 15.0))
    assert says in verdict.reason
    assert "train.py" in verdict.details


NOISY = """
class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (f"{NOISY}\nmodel.__class__ = Noisy\nstep(); step()", "Random numbers that a model draws in its forward move"),
        ("import random\ntorch.manual_seed(random.randrange(1 << 40))\nmodel.reset_parameters(); step(); step()",
         "not deterministic: weight has other initial weights in a second run on one rank"),
        ("import random\nx = torch.full_like(x, random.random()); step(); step()",
         "not deterministic: a second run on one rank drew other samples in step 1"),
    ],
)  # fmt: skip
def test_not_deterministic(refused, code, says):
    assert says in refused(code).reason


def test_what_it_starts_prints_and_writes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = """
import subprocess
for line in range(20_000):
    print("line", line)
step()
Path(f"written-{rank}-{world_size}").touch()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
Path(f"pid-{child.pid}").write_text(str(child.pid))
step()
Path("after").touch()
"""
    Path("train.py").write_text(BEGIN + code)
    assert verify_program(["train.py"], (1, 2), timeout=PATIENCE).same
    assert {path.name for path in tmp_path.glob("written-*")} == {"written-0-1", "written-0-2", "written-1-2"}
    # The second step ends the script.
    assert not Path("after").exists()
    assert "line" not in capfd.readouterr().out
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2 * (1 + 2 + 1 + 1)
    assert not any(map(runs, pids))
    verify_program(["train.py"], (1, 2), timeout=PATIENCE, verbose=True)
    # Rank 0 of the run on one rank, and of that on two.
    assert capfd.readouterr().out.count("line 19999\n") == 2


def test_interrupted(tmp_path):
    (tmp_path / "train.py").write_text(BEGIN + "time.sleep(1000)")
    command = [sys.executable, "-m", "mmm_verify", "--program", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, preexec_fn=as_from_a_terminal())
    deadline = time.monotonic() + PATIENCE
    while not any(path.read_text() for path in tmp_path.glob("pid-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) != 0
    assert not any(runs(int(path.read_text())) for path in tmp_path.glob("pid-*"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--program", "no.py"], "--program no.py: there is no such file"),
        (["--program"], "--program names no script"),
        (["--program", "--ranks", "1,2"], "--program names no script"),
        (["--program", "-m"], "--program names no script"),
        (["mlp:make", "--program", "train.py"], "mlp:make stands before --program"),
        (["--lr", "1", "--program", "train.py"], "--lr stands before --program"),
        (["--program", "train.py", "--ranks", "2,4"], "--ranks 2,4: write 1 and the number of ranks"),
        (["--program", "train.py", "--ranks", "1"], "--ranks 1: write 1 and"),
        (["--program", "train.py", "--ranks", "1,x"], "--ranks 1,x: write 1 and"),
        (["--program", "train.py", "--ranks", "1,4000"], "64 at most"),
        (["--ranks", "1,2", "--program", "train.py", "--ranks", "1,4"], "--ranks 1,4 is the second --ranks"),
    ],
)
def test_wrong_arguments(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_a_module_that_does_not_exist():
    assert "No module named" in verify_program(["-m", "no_such.module"], (1, 2), timeout=PATIENCE).reason


@pytest.mark.parametrize(
    ("argv", "script", "ranks"),
    [
        (["--program", "a.py", "--lr", "1", "--ranks", "1,2"], ["a.py", "--lr", "1"], [1, 2]),
        (["--ranks", "1,3", "--program=a.py", "x", "--ran", "y"], ["a.py", "x", "--ran", "y"], [1, 3]),
        (["--program", "a.py", "--lr=1", "--", "--ranks", "2"], ["a.py", "--lr=1", "--ranks", "2"], [1, 4]),
        (["--program", "-m", "a.b", "--help", "--", "--", "-h"], ["-m", "a.b", "--help", "--", "-h"], [1, 4]),
        (["--program", "a.py", "--neg", "-3", "x", "--json", "f", "z"], ["a.py", "--neg", "-3", "x", "z"], [1, 4]),
    ],
)
def test_whose_argument_it_is(argv, script, ranks):
    from mmm_verify.program.command import parse

    args, own = parse(argv, "mmm-verify")
    assert (own, args.ranks) == (script, ranks)


def test_help(capsys):
    for argv in (["--program", "--help"], ["--help", "--program", "a.py"]):
        with pytest.raises(SystemExit, match="0"):
            main(argv)
        assert re.search("Everything else after FILE is an argument of the script", capsys.readouterr().out)
