"""What a PyTorch cannot do is refused by name before the ranks meet, and said by doctor, plan and docs/install.md."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel
from torch.torch_version import TorchVersion

from mmm.errors import DeviceError
from mmm.layout import Layout, Techniques
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Plan, local, meta_parameters
from mmm.parallel.checks import check_techniques
from mmm.parallel.partition import partition_model
from mmm.parallel.pp.replay import action_lists
from mmm.parallel.tp.checks import check_style
from mmm.torch_private import faults
from mmm.torch_private.faults import COMPLEX, FAULTS, FEW, INTEGERS, MATRIX, SPLIT_CHUNKS, Fault
from mmm_lab.cli import plan
from mmm_lab.cli.doctor import devices

PAGE = Path(__file__).parents[3] / "docs/install.md"
CONFIG = TransformerConfig(dim=16, n_layers=4, n_heads=2, n_kv_heads=2, ffn_dim=16, vocab_size=32)


def without(monkeypatch, *choices: str) -> Fault:
    """This PyTorch cannot do what has all of `choices`."""
    fault = Fault(set(choices), "9.9", lambda: False, "it is not there", "take a spoon")
    monkeypatch.setattr(faults, "FAULTS", (fault,))
    return fault


def partition(**techniques):
    with meta_parameters():
        model = Transformer(CONFIG)
    pp = Layout(pp=2, dp_shard=1)
    inputs = torch.zeros(4, 8, dtype=torch.int64, device="meta")
    return partition_model(model, transformer_plan(), pp, Techniques(**techniques), inputs)


@pytest.mark.parametrize(
    ("choices", "techniques", "others"),
    [
        (("DualPipeV",), {"schedule": "DualPipeV"}, {"schedule": "1F1B"}),
        (("GPipe", FEW), {"schedule": "GPipe", "microbatches": 1}, {"schedule": "GPipe", "microbatches": 2}),
        (
            (SPLIT_CHUNKS,),
            {"schedule": "InterleavedZeroBubble", "loss_chunks": 2},
            {"schedule": "InterleavedZeroBubble"},
        ),
        (("exact",), {"exact": 4, "schedule": "GPipe"}, {"schedule": "GPipe"}),
    ],
)
def test_a_row_refuses_what_meets_it_and_nothing_else(monkeypatch, choices, techniques, others):
    """Without the check, a run ends in PyTorch's own traceback on every rank."""
    without(monkeypatch, *choices)
    with pytest.raises(DeviceError, match=rf"{choices[0]}.*it is not there; take a spoon.*{torch.__version__[:4]}"):
        partition(**techniques)
    assert partition(**others).microbatches


def test_parameters_and_matrices_are_refused_where_pytorch_would_end(monkeypatch):
    """On every rank, with its own traceback."""
    model = nn.Sequential(nn.Linear(2, 2))
    plan = Plan({}, fsdp_units=())
    without(monkeypatch, "SequenceParallel", MATRIX)
    with pytest.raises(DeviceError, match=r"SequenceParallel.*take a spoon"):
        check_style(model, "0", SequenceParallel(), 2)
    without(monkeypatch, INTEGERS)
    check_techniques(model, plan, Layout(dp_shard=1), Techniques())
    model[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(DeviceError, match=r"integers.*take a spoon"):
        check_techniques(model, plan, Layout(dp_shard=1), Techniques())
    without(monkeypatch, COMPLEX, "fsdp")
    model[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    # Before the ranks meet nobody knows whether one rank has FSDP.
    check_techniques(model, plan, Layout(dp_shard=1), Techniques())
    check_techniques(model, plan, Layout(dp_shard=2), Techniques(data_parallel="zero1"), device_type="cpu")
    for ranks, device_type in ((1, "cpu"), (2, "")):
        with pytest.raises(DeviceError, match=r"complex.*take a spoon"):
            check_techniques(model, plan, Layout(dp_shard=ranks), Techniques(), device_type=device_type)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    check_techniques(model, plan, Layout(dp_shard=2), Techniques(), device_type="cuda")


def test_a_schedule_that_is_not_there_is_refused_where_its_actions_are_asked_for(monkeypatch):
    without(monkeypatch, "DualPipeV")
    with pytest.raises(DeviceError, match="DualPipeV"):
        action_lists("DualPipeV", 2, 4, [[0, 3], [1, 2]])


def test_doctor_and_plan_say_what_this_pytorch_cannot_do(monkeypatch, tmp_path, capsys):
    """A user of a site's older PyTorch copies the line of `mmm plan`, and learns only in the job that it is refused."""
    fault = without(monkeypatch, "ZBVZeroBubble")
    result = {finding.seen: finding for finding in devices.check_torch(tmp_path, 5)}
    assert result[f"cannot do ZBVZeroBubble: {fault.reason}"].fix == fault.instead
    asked = ["--model", "llama-8b", "--site", "polaris", "--nhosts", "2", "--pp", "2", "--schedule"]
    for schedule, is_said in (("ZBVZeroBubble", True), ("1F1B", False)):
        assert plan.main([*asked, schedule]) == 0
        assert (f"# the PyTorch here cannot do {fault}" in capsys.readouterr().out) == is_said


def test_what_the_tested_pytorch_can_do():
    """A probe that is wrong refuses a layout that is right. 2.13 can do all; a row names the releases that cannot."""
    release = ".".join(torch.__version__.split(".")[:2])
    for fault in FAULTS:
        cannot = fault.versions.split(", ")
        assert fault.works() == (release not in cannot), fault.what
        for version in cannot:
            assert TorchVersion(version) < "2.13"


def test_what_is_built_of_parts_is_in_order(run_on_ranks):
    """3 rows of each of tp's halves, on 2 ranks of dp: before 2.10, PyTorch itself gives 0, 1, 2, 0, 3, 5."""
    for results in run_on_ranks(gathered, 4):
        for rows in results:
            assert rows == [0, 1, 2, 3, 4, 5]


def gathered(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.arange(6.0), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    rows = [local.unsharded(model.weight).tolist()]
    # As before 2.10, whatever PyTorch this is.
    local.GATHERS_STRIDED = False
    return [*rows, local.unsharded(model.weight).tolist()]


def test_the_page_has_the_table():
    text = PAGE.read_text()
    for fault in FAULTS:
        assert f"| {fault.what} | {fault.versions} | {fault.reason} | {fault.instead} |" in text
