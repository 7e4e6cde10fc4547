"""What `verify` takes, what it says of models that it cannot compare, and its command."""

import importlib
import json
import os
import re
import signal
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmm_lab.cli.main import main
from mmm_verify import plain, verify
from mmm_verify.errors import ConfigError, UserError
from mmm_verify.observe import Observed, innermost_first
from mmm_verify.ranks.ranks import fork_one
from mmm_verify.repeat import compute_reference
from mmm_verify.run import ImportOrder, import_all
from mmm_verify.subject import make_subject
from support.by_hand import averaged, nothing
from support.clock import long, stretched
from support.verify.models import Mixer, fields


class Chaotic(Mixer):
    calls = 0

    def forward(self, x):
        Chaotic.calls += 1
        return super().forward(x) * Chaotic.calls


class Noisy(Mixer):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x) * self.training)


def hanging(model, mesh):
    if mesh.get_rank() == 1:
        time.sleep(60)
    torch.distributed.barrier()


def raising(model, mesh):
    if mesh.get_rank() == 1:
        raise RuntimeError("no such layer")


@pytest.mark.parametrize(
    ("model", "result", "says"),
    [
        (Chaotic, "not comparable", "not deterministic: the model gives something else the second time"),
        (Noisy, "same", "draws random numbers in training: compared in evaluation mode"),
    ],
)
def test_a_model_against_itself(model, result, says):
    verdict = verify(model, nothing, fields, mesh="dp1")
    assert verdict.result == result
    assert says in str(verdict)


class Halves(nn.Linear):
    """The product of each sample with all others' mean."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_samples_that_see_each_other():
    verdict = verify(lambda: nn.Sequential(Halves(3, 4), nn.Linear(4, 2)), averaged, fields, mesh="dp2")
    assert verdict.result == "not the same"
    assert "note: 0 notices the other samples of a batch" in str(verdict)
    assert "output of 0 on rank 0: is what this rank computes by itself" in verdict.first


class Rounded(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias.float()).double()


def test_float32_inside_is_said_and_compared_to_its_noise():
    def make():
        return nn.Sequential(nn.Linear(3, 4), Rounded(4, 4), nn.Tanh(), nn.Linear(4, 2))

    verdict = verify(make, averaged, fields, mesh="dp2")
    assert verdict.same, str(verdict)
    assert "something in it computes in less than float64, first seen in the gradient of 1." in str(verdict)


def test_a_loss_in_float32_is_compared_as_one():
    """Though the loss of the batch and those of its parts are equal, by chance."""

    def step(model, batch):
        output = model(batch[0]).float()
        return (output - output.detach()).mean()

    subject = make_subject(Mixer, nothing, fields, step, "dp2")
    assert compute_reference(subject).loss_floor >= torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize(
    ("parallelize", "says"),
    [
        (raising, "rank 1: RuntimeError"),
        long(hanging, "no answer in 12 s .*: rank 0 waited in a collective that rank 1 did not reach"),
    ],
)
def test_a_program_that_fails(parallelize, says):
    began = time.monotonic()
    verdict = verify(Mixer, parallelize, fields, mesh="dp2", timeout=12)
    assert verdict.exit_code == 1
    assert re.search(says, verdict.first)
    assert time.monotonic() - began < stretched(45)


def wrong_on_rank_1(model, mesh):
    """Gradients are averaged over the ranks, and rank 1 then has another of the first."""
    first = next(model.parameters())

    def average(parameter):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= mesh.size() if mesh.get_rank() == 0 or parameter is not first else 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def test_a_gradient_that_is_wrong_on_one_rank():
    verdict = verify(Mixer, wrong_on_rank_1, fields, mesh="dp2", optimizer_fn=partial(torch.optim.SGD, lr=0.0))
    assert verdict.exit_code == 1
    (finding,) = verdict.findings
    assert (finding.stage, finding.rank) == ("gradients", 1)


def test_larger_than_memory(monkeypatch):
    monkeypatch.setattr(plain, "total_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"float64"):
        verify(Mixer, nothing, fields, mesh="dp2")


def lacks_arguments(width):
    return Mixer(width)


def raises():
    raise OSError("no weights here")


class Empty(nn.Module):
    def forward(self, x):
        return x * 0


def wrong_width():
    return torch.randn(8, 6, 5), torch.randn(8, 6, 2)


@pytest.mark.parametrize(
    ("model", "batch", "mesh", "says"),
    [
        (raises, fields, "dp2", "OSError"),
        (lacks_arguments, fields, "dp2", "TypeError.*width"),
        (lambda: 3, fields, "dp2", "nn.Module"),
        (lambda: nn.LazyLinear(3), fields, "dp2", "has no size yet"),
        (lambda: Mixer().to("meta"), fields, "dp2", "has to have its values"),
        (Mixer, wrong_width, "dp2", "RuntimeError: .*mat1 and mat2"),
        (Mixer, lambda: "text", "dp2", "--batch gives str"),
        (Mixer, raises, "dp2", "OSError"),
        (Mixer, fields, "dp3", "8 samples"),
        (Empty, lambda: torch.randn(8, 3), "dp2", "no parameter has a gradient"),
    ],
)
def test_refused(model, batch, mesh, says):
    with pytest.raises(UserError, match=says):
        verify(model, nothing, batch, mesh=mesh)


def test_a_killed_rank_is_no_fault_of_the_program():
    def killed(model, mesh):
        if mesh.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    verdict = verify(Mixer, killed, fields, mesh="dp2")
    assert verdict.result == "not comparable"
    assert "rank 1: killed by SIGKILL" in verdict.reason
    assert "memory" in verdict.reason


def test_an_error_that_speaks_of_a_killed_rank_is_the_programs_own():
    def fails(model, mesh):
        raise RuntimeError("a loader was killed by SIGKILL")

    verdict = verify(Mixer, fails, fields, mesh="dp2")
    assert verdict.result == "not the same"
    assert "memory" not in verdict.reason


def test_a_long_error_is_cut_in_a_line_and_not_in_its_traceback():
    def fails(model, mesh):
        raise RuntimeError("a tensor:\n" + "0.25, " * 1000)

    verdict = verify(Mixer, fails, fields, mesh="dp2")
    (finding,) = verdict.findings
    assert finding.relation.endswith("… (6,009 characters)")
    assert "a tensor: 0.25, " in finding.relation
    assert len(finding.relation) < 800
    assert "0.25, " * 1000 in verdict.details


PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn

def make(): return nn.Linear(3, 2)
def batch(): return torch.randn(4, 3), torch.randn(4, 2)
def right(model, mesh):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: average(p.grad))
def average(grad):
    torch.distributed.all_reduce(grad.div_(torch.distributed.get_world_size()))
def wrong(model, mesh): pass
"""


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear_of_mine.py").write_text(PROGRAM)
    line = ["verify", "linear_of_mine:make", "--batch", "linear_of_mine:batch", "--parallelize"]
    # Two meshes after one flag, or after two.
    assert main([*line, "linear_of_mine:right", "--mesh", "dp2", "--mesh", "dp1"]) == 0
    assert capsys.readouterr().out.count("same: dp") == 2
    assert main([*line, "linear_of_mine:right", "--mesh", "dp1", "dp2", "--json", "verdict.json"]) == 0
    assert capsys.readouterr().out.count("same: dp") == 2
    known = json.loads((tmp_path / "verdict.json").read_text())
    assert [verdict["result"] for verdict in known["verdicts"]] == ["same", "same"]
    assert known["functions"]["parallelize"]["name"] == "linear_of_mine.right"
    assert len(known["functions"]["model"]["sha256"]) == 64
    assert main([*line, "linear_of_mine:wrong"]) == 1
    assert "every gradient" in capsys.readouterr().out
    for wrong, says in (
        (["linear_of_mine:nope"], "linear_of_mine has no nope"),
        (["no_such_module:x"], "importing no_such_module failed"),
        (["linear_of_mine"], "such as the one of `mmm verify MODEL --write plan.py`, which is plan:parallelize"),
        (["linear_of_mine:right", "--mesh", "dp2", "x"], "write axes with their sizes"),
        (["linear_of_mine:right", "--mesh", "dp2,dp2"], "dp2,dp2"),
        (["linear_of_mine:right", "--mesh", "dp128"], "128 ranks"),
        (["linear_of_mine:right", "--batch-axes", "tp"], "the mesh has dp"),
        (["linear_of_mine:right", "--json", "nowhere/x.json"], "cannot be written"),
        (["linear_of_mine:right", "--optimizer", "a:b", "--optimizer", "a:c"], "--optimizer a:c is the second"),
        (["linear_of_mine:right", "--dtype", "float64", "--dtype", "bf16"], "--dtype bf16 is the second"),
    ):
        assert main([*line, *wrong]) == 2
        assert says in capsys.readouterr().err


def test_a_module_is_looked_at_after_those_inside_and_before_the_next():
    """Also of a model that calls nothing but elements of lists: its output is wrong where one of theirs is."""
    outputs = {name: [] for name in ("", "layers.0", "layers.0.up", "layers.0.down", "layers.1")}
    names = innermost_first(Observed(outputs=outputs))
    assert names == ["layers.0.up", "layers.0.down", "layers.0", "layers.1", ""]


def imported_for_circle():
    imports = ImportOrder()
    importlib.import_module("torch.circle")
    return imports.modules()


def test_modules_in_a_circle_are_imported_as_the_reference_imported_them(tmp_path, monkeypatch):
    # `back` needs `circle` to be imported first: it would use `back` before anything is in it.
    (tmp_path / "circle.py").write_text("from torch import back\nback.use()\n")
    (tmp_path / "back.py").write_text("from torch import circle\ndef use(): pass\n")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    modules = fork_one("the reference", imported_for_circle, timeout=60.0)
    assert modules == ["torch.circle", "torch.back"]
    fork_one("the parent of the ranks", import_all, modules, timeout=60.0)
