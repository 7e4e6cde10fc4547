"""Float32 and bf16: the tolerance is measured, right programs are the same within it, and mistakes are still named."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mmm_verify import verify
from mmm_verify.command import main
from mmm_verify.difference import size_of
from mmm_verify.errors import ConfigError
from mmm_verify.noise import moved_by_rounding
from mmm_verify.relations import describe_relation
from mmm_verify.subject import make_subject
from support.by_hand import averaged, nothing
from support.clock import long

LOW = ("float32", "bf16")
adamw = partial(torch.optim.AdamW, lr=1e-2, foreach=False)


class Block(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        h = self.word(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def tokens():
    return torch.randint(16, (8, 8)), torch.randint(16, (8, 8))


def sharded(model, mesh, **settings):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **settings)
    fully_shard(model, mesh=mesh["dp"], **settings)


def tensor_parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def both(model, mesh):
    tensor_parallel(model, mesh)
    sharded(model, mesh)


def clipped(model, batch):
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss.detach()


def autocast(model, batch, mesh, always=True):
    with torch.autocast("cpu", torch.bfloat16, enabled=always or mesh is not None):
        return F.cross_entropy(model(batch[0]).flatten(0, -2).float(), batch[1].flatten())


def summed(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))


def one_not_averaged(model, mesh):
    # All but the second block.
    averaged(nn.ModuleList([model.word, model.blocks[0], model.head]), mesh)


def bias_twice(model, mesh):
    tensor_parallel(model, mesh)
    down = model.blocks[1].down
    # Its output has the bias already.
    down.register_forward_hook(lambda module, args, output: output + module.bias.to_local())


def own_norm(model, batch, mesh):
    """Clips by the norm of the rank's own shards."""
    if mesh is None:
        return clipped(model, batch)
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    loss.backward()
    parameters = list(model.parameters())
    # Other ranks have other shards.
    norm = nn.utils.get_total_norm([parameter.grad.to_local() for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return loss.detach()


def half_the_loss(model, batch, mesh):
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    if mesh is None:
        return loss
    # What is shown is right, and its gradients are half.
    (loss / 2).backward()
    return loss.detach()


def first_samples(batch, mesh):
    """The same for all ranks."""
    return tuple(tensor[:4] for tensor in batch)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("parallelize", "mesh", "settings"),
    [
        (sharded, "dp2", {"step_fn": clipped, "optimizer_fn": adamw}),
        long(tensor_parallel, "tp2", {"step_fn": autocast}),
        long(tensor_parallel, "tp2", {"optimizer_fn": adamw}),
        long(both, "dp2,tp2", {"optimizer_fn": adamw}),
        long(averaged, "dp4", {"step_fn": autocast}),
    ],
)
def test_right(dtype, parallelize, mesh, settings):
    verdict = verify(Language, parallelize, tokens, mesh=mesh, dtype=dtype, **settings)
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert f"in {dtype}\n" in str(verdict)
    assert "autocast" not in str(verdict)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("parallelize", "mesh", "settings", "says"),
    [
        long(nothing, "dp2", {}, "missing all-reduce over dp"),
        long(summed, "dp2", {}, "2 times (the size of dp) what it should be"),
        (one_not_averaged, "dp2", {}, "first difference: gradient of blocks.1.down.weight"),
        (bias_twice, "tp2", {}, "first difference: output of blocks.1.down on rank 0"),
        long(sharded, "dp2", {"step_fn": half_the_loss}, "1/2 times (one over the size of dp)"),
        long(sharded, "dp2", {"step_fn": own_norm}, "rank 0 counted only its own parts"),
        long(sharded, "dp2", {"local_batch_fn": first_samples}, "sample 4 and 3 more are on no rank"),
    ],
)
def test_wrong(dtype, parallelize, mesh, settings, says):
    verdict = verify(Language, parallelize, tokens, mesh=mesh, dtype=dtype, **settings)
    assert verdict.result == "not the same", f"{verdict}\n{verdict.details}"
    assert says in str(verdict)


def rounded(tensor):
    """In bf16, off by another rounding of each element."""
    # bf16 has 8 bits: a rounding is at most 1/256 of a number.
    return (tensor * (1 + (torch.rand(tensor.shape) - 0.5) / 128)).bfloat16()


def relation(tensors, expected, alone=None):
    """What is said of rank 0's tensor, if the ranks of dp2 have `tensors` and should have `expected`."""
    subject = make_subject(Language, nothing, tokens, None, "dp2", dtype="bf16")
    scale = size_of(expected[0])
    return describe_relation(
        tensors[0], expected[0], scale, 0, lambda rank: (tensors[rank], expected[rank]), alone, subject, alike=0.03
    )


def test_relations_are_seen_through_rounding():
    torch.manual_seed(0)
    full, other, shard = torch.randn(3, 64, 8)
    right = [rounded(full)] * 2
    # Two summands.
    assert relation([rounded(shard), rounded(full - shard)], right).startswith("partial over dp")
    assert "mean is correct but was never taken" in relation([rounded(shard), rounded(2 * full - shard)], right)
    assert relation([rounded(2 * full)] * 2, right) == "2 times (the size of dp) what it should be"
    # A factor that no size of the mesh explains.
    assert relation([rounded(0.3 * full)] * 2, right) == "about 0.3 times what it should be"
    assert relation([rounded(other), rounded(full)], [rounded(full), rounded(other)]) == "is rank 1's shard"
    assert "computes by itself" in relation([rounded(shard)] * 2, right, alone=rounded(shard))
    assert relation([rounded(shard)] * 2, right) == "differs"


# FSDP computes and sums gradients in 16 bits.
IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("parallelize", "step"),
    [
        (partial(sharded, mp_policy=IN_16_BITS), None),
        long(partial(sharded, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), None),
        long(averaged, partial(autocast, always=False)),
    ],
)
def test_a_program_that_rounds_more_is_not_called_the_same(parallelize, step):
    verdict = verify(Language, parallelize, tokens, step, dtype="float32")
    assert verdict.exit_code == 2
    assert "rounds to 16 bits what the model computes in float32" in verdict.reason


def test_mixed_precision_is_compared_in_bf16():
    assert verify(Language, partial(sharded, mp_policy=IN_16_BITS), tokens, dtype="bf16")


class Steep(nn.Linear):
    """Moves far when a weight moves a little."""

    def forward(self, x):
        return torch.sin(100 * super().forward(x))


# In targets, of a place that is land.
IGNORED = -100


def fields():
    return torch.randn(8, 4), torch.randn(8, 4)


def test_noise_that_would_hide_a_factor_is_said():
    verdict = verify(lambda: Steep(4, 4), nothing, fields, dtype="bf16")
    assert verdict.exit_code == 2
    assert "a wrong factor would not be seen" in verdict.reason


def fields_with_land():
    inputs, targets = fields()
    targets[:, :2] = IGNORED
    return inputs, targets


def error_at_sea(model, batch):
    inputs, targets = batch
    errors = model(inputs) - targets
    return errors[targets != IGNORED].square().mean()


def test_a_rounding_that_makes_sea_of_land():
    """A number that stands for something is not moved: its square would be most of the loss."""
    verdict = verify(lambda: nn.Linear(4, 4), averaged, fields_with_land, error_at_sea, dtype="float32")
    assert verdict, verdict


def test_tolerances_are_measured():
    """A steep function has a larger one than a plain one."""
    plain, steep = (
        verify(model, averaged, fields, dtype="float32").tolerances["gradients"]
        for model in (lambda: nn.Linear(4, 4), lambda: Steep(4, 4))
    )
    assert set(plain) == {"weight", "bias"}
    for tolerance in plain.values():
        assert 1e-7 < tolerance < 1e-3
    # Rounding moves its output a hundred times as far.
    assert steep["weight"] > 10 * plain["weight"]


def a_module_of_its_own(dtype, model, mesh):
    assert nn.Linear(2, 2).weight.dtype == dtype
    averaged(model, mesh)


def test_modules_that_are_made_in_parallelize_have_the_type():
    assert verify(Language, partial(a_module_of_its_own, torch.bfloat16), tokens, dtype="bf16")


def test_samples_that_see_each_other_are_no_noise():
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    verdict = verify(make, averaged, fields, dtype="float32")
    assert verdict.result == "not the same"
    assert "note: 1 notices the other samples of a batch" in str(verdict)


def test_what_ranks_drop_is_not_compared_in_bf16():
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))

    assert "what ranks drop is not compared in bf16" in str(verify(make, averaged, fields, dtype="bf16"))


PROGRAM = """
import torch
from torch import nn
def make(): return nn.Linear(3, 2)
def batch(): return torch.randn(4, 3), torch.randn(4, 2)
def wrong(model, mesh): pass
"""


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear_in_float32.py").write_text(PROGRAM)
    line = ["linear_in_float32:make", "--batch", "linear_in_float32:batch", "--parallelize", "linear_in_float32:wrong"]
    assert main([*line, "--dtype", "float32", "--json", "verdict.json"]) == 1
    printed = capsys.readouterr().out
    assert "against one device, in float32" in printed
    assert "tolerance  measured: " in printed
    (verdict,) = json.loads((tmp_path / "verdict.json").read_text())["verdicts"]
    assert verdict["dtype"] == "float32"
    assert set(verdict["tolerances"]["gradients"]) == {"weight", "bias"}
    # A type that it does not know.
    assert main([*line, "--dtype", "fp8"]) == 2
    assert capsys.readouterr().err == "mmm-verify: error: --dtype fp8: write float64, float32, bf16\n"


def test_an_unknown_type():
    with pytest.raises(ConfigError, match=r"torch\.float16"):
        verify(Language, nothing, tokens, dtype=torch.float16)


def positive():
    return torch.rand(8, 4) + 1


def test_a_second_step_without_gradients():
    """The first step has moved the weights so far that the model gives only zeros."""

    def step(model, batch):
        return model(batch).mean()

    def make():
        linear = nn.Linear(4, 4)
        nn.init.ones_(linear.weight)
        return nn.Sequential(linear, nn.ReLU())

    # One step makes all weights negative: the ReLU gives zeros.
    far = partial(torch.optim.SGD, lr=1e3)
    verdict = verify(make, nothing, positive, step, "tp2", dtype="float32", optimizer_fn=far)
    assert verdict.same, str(verdict)


@pytest.mark.parametrize(("dtype", "times"), [(torch.float64, 2), (torch.float32, 1), (torch.bfloat16, 1)], ids=str)
def test_a_rounding_moves_numbers_up_and_down(dtype, times):
    """With float32 as the default type too, in which 1 plus half a rounding is 1."""
    values = torch.linspace(1.1, 1.9, 100).to(dtype)
    moved = moved_by_rounding(values, times * torch.finfo(dtype).eps, torch.Generator().manual_seed(0))
    assert (moved > values).sum() > 20
    assert (moved < values).sum() > 20


# Prints the tolerances of a model with several parameters, whose names Python's sets have in another order each time.
MEASURED = """
import torch
from torch import nn
from mmm_verify.repeat import compute_reference
from mmm_verify.subject import make_subject

make_model = lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
make_batch = lambda: (torch.randn(4, 4), torch.randn(4, 4))
subject = make_subject(make_model, lambda model, mesh: None, make_batch, None, "dp2", dtype="float32")
print(compute_reference(subject).tolerances())
"""


@pytest.mark.long
def test_the_measured_tolerances_do_not_depend_on_the_order_of_names():
    processes = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", MEASURED]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    first, second = (process.communicate()[0] for process in processes)
    assert first
    assert first == second
