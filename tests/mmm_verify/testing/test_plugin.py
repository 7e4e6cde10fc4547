"""The plugin on a stranger's test files, in a pytest of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAD = """
import os, signal, threading, time
import pytest
import torch
import torch.distributed as dist
"""


def run(folder, text, *flags):
    """A stranger's tests. Returns the exit code and what pytest printed."""
    (folder / "test_theirs.py").write_text(HEAD + text)
    plugins = ["-p", "mmm_verify.testing.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", *flags]
    options = {"env": {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_ADDOPTS": ""}, "capture_output": True}
    done = subprocess.run(command, cwd=folder, text=True, timeout=300, check=False, **options)
    return done.returncode, done.stdout + done.stderr


GOOD = """
FACTOR = 3

@pytest.fixture(scope="module")
def weights():
    return torch.arange(4.0)

@pytest.fixture(scope="session")
def started():
    return os.getpid()

@pytest.mark.ranks(4)
def test_all_scopes(weights, started, rank, tmp_path, monkeypatch):
    def total(x):                                # a closure
        dist.all_reduce(x)
        return x
    assert os.getpid() != started and os.path.isdir(tmp_path)
    assert dist.get_rank() == rank and dist.get_world_size() == 4
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [int(os.environ[name]) for name in names] == [rank, 4, rank, 4]
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")
    assert total(weights * FACTOR + rank).tolist() == [6, 18, 30, 42]

def test_in_the_process_itself(weights):
    assert weights.sum() == 6

@pytest.mark.ranks("dp2,tp2")
@pytest.mark.parametrize("scale", [1, 2])
def test_mesh(mesh, rank, scale):
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh["tp"].get_local_rank() == rank % 2
    x = torch.ones(1) * scale
    dist.all_reduce(x, group=mesh["tp"].get_group())
    assert x.item() == 2 * scale

@pytest.mark.ranks(2)
def test_environment(monkeypatch):
    assert os.environ["OURS"] == "yes"

@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setenv("OURS", "yes")

class TestOfAClass:
    @pytest.mark.ranks(2, timeout=60)
    def test_method(self, rank):
        assert rank in (0, 1)

@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not today")

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_expected(rank):
    assert rank == 5
"""

BAD = """
@pytest.mark.ranks(3)
def test_rewritten(rank):
    numbers = [1, 2, rank]
    print("here is", rank)
    assert numbers == [1, 2, 0]

@pytest.mark.ranks(3)
def test_dead(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.ranks(3, timeout=5)
def test_hang(rank):
    if rank != 1:
        dist.barrier()
    time.sleep(0 if rank != 1 else 100)

@pytest.mark.ranks(2, timeout=5)
def test_fewer_calls(rank):
    if rank == 0:
        dist.barrier()
    else:
        os.environ["GONE"] = "1"

@pytest.mark.ranks(2)
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("only here")

@pytest.mark.ranks(2)
def test_threads():
    pass

def test_mesh_without_a_mark(mesh):
    pass

@pytest.mark.ranks("dp2", size=3)
def test_wrong_mark():
    pass

@pytest.fixture(autouse=True)
def thread(request):
    if "threads" in request.node.name:
        over = threading.Event()
        held = threading.Thread(target=over.wait, name="loader", daemon=True)
        held.start()
        yield
        over.set()
        held.join()
    else:
        yield

@pytest.mark.ranks(2)
def test_after_all_that(rank):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
"""


@pytest.mark.long
def test_what_passes(tmp_path):
    code, output = run(tmp_path, GOOD, "-rs")
    assert code == 0, output
    assert "6 passed, 1 skipped, 1 xfailed" in output
    assert "not today" in output


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    code, output = run(tmp_path_factory.mktemp("bad"), BAD, "--ranks-timeout", "60")
    assert code == 1, output
    parts = re.split(r"_{3,} (?:ERROR at setup of )?(test_\w+) _{3,}", output)
    return {"all": output, **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "test_rewritten",
            [r"rank \d: AssertionError", r"assert \[1, 2, \d\] == \[1, 2, 0\]", r"\[rank 2\] here is 2"],
        ),
        ("test_dead", [r"rank 1: killed by SIGKILL"]),
        (
            "test_hang",
            [r"no answer in 5 s", r"rank 0, 2 waited in a collective that rank 1 did not reach", "rank 1:\n"],
        ),
        ("test_fewer_calls", [r"rank 0 waited in a collective, but rank 1 had already ended: it made fewer calls"]),
        ("test_one_skips", [r"rank 1 left the test \(only here\), but the others did not"]),
        ("test_threads", [r"this process has other threads \(loader\)"]),
        ("test_mesh_without_a_mark", [r"the fixture mesh is for tests with @pytest.mark.ranks"]),
        ("test_wrong_mark", [r"takes a number or a mesh"]),
    ],
)
def test_what_fails(bad, name, says):
    for one in says:
        assert re.search(one, bad[name], re.DOTALL), bad[name]


def test_a_failure_is_that_test_s_alone(bad):
    assert "1 passed" in bad["all"]


WITH_XDIST = """
@pytest.mark.parametrize("number", range(6))
@pytest.mark.ranks(2)
def test_sum(number):
    x = torch.tensor([number])
    dist.all_reduce(x)
    assert x.item() == 2 * number
"""


@pytest.mark.long
def test_with_xdist_and_without_capture(tmp_path):
    assert "6 passed" in run(tmp_path, WITH_XDIST, "-n", "2")[1]
    code, output = run(tmp_path, WITH_XDIST.replace("assert", "print('number', number)\n    assert"), "-s")
    assert code == 0
    assert "[rank 1] number 5" in output


VERIFIED = """
def make(): return torch.nn.Linear(3, 2)
def batch(): return torch.randn(4, 3), torch.randn(4, 2)
def average(model, mesh):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(mesh.size())))

def test_right(verify):
    assert verify(make, average, batch, mesh="dp2").compared["loss"]

def test_wrong(verify):
    verify(make, lambda model, mesh: None, batch, mesh="dp2")
"""


@pytest.mark.long
def test_verify(tmp_path):
    code, output = run(tmp_path, VERIFIED)
    assert code == 1
    assert "1 failed, 1 passed" in output
    assert "first difference: every gradient" in output


@pytest.mark.ranks("dp2,tp2")
def test_it_is_here_too(mesh, rank):
    assert mesh.get_rank() == rank


# The first has the model, the second its tests.
PAGES = {"mlp": ROOT / "docs" / "verify.md", "test_mlp": ROOT / "docs" / "verify-project.md"}


@pytest.mark.long
def test_those_of_the_page(tmp_path):
    """The pages' tests pass in a pytest of their own."""
    for name, page in PAGES.items():
        (code,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        (tmp_path / f"{name}.py").write_text(code)
    _, output = run(tmp_path, "")
    assert "3 passed" in output, output
