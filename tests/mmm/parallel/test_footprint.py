"""A model that cannot fit into memory is refused before anything is made; the bound is one from below, and close."""

import pytest
import torch

from mmm.errors import LayoutError
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.optim.adamw import make_optimizer
from mmm.parallel import Layout, Techniques, apply, build_mesh, cross_entropy, footprint, materialize
from mmm.parallel.memory.measure import local_elements
from mmm.run.command_line import configure
from mmm.runtime.device import Precision
from mmm.runtime.ranks import Rank
from mmm.trainer import cnn, lm, vit

FP32 = Precision("fp32", torch.float32, torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("program", [lm, vit, cnn], ids=lambda program: program.__name__.partition(".")[2])
def test_every_trainer(monkeypatch, tmp_path, program, no_process_group):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(footprint, "host_memory", lambda: 1_000_000)
    images = {"dataset": "digits"} if program is cnn else {}
    with pytest.raises(LayoutError, match=r"this host would hold at least .* GB of parameters, .* 0.0 GB are left"):
        program.train(configure(program.Config, **images, device="cpu"))
    assert not list(tmp_path.iterdir())


def test_the_largest_preset_is_not_built(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(footprint, "host_memory", lambda: 64 * 10**9)
    words = r"68,456,554,496 parameters: the ranks on this host would hold at least 1,095.3 GB .* 64.0 GB are left"
    with pytest.raises(LayoutError, match=words):
        lm.train(configure(lm.Config, preset="llama-70b", device="cpu"))
    lm.train(configure(lm.Config, preset="llama-70b", device="cpu", summary=True))  # shapes alone


def held(rank, technique: str, layout: Layout, optimizer: str) -> int:
    mesh, config = build_mesh(layout, "cpu"), TransformerConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=4)
    with torch.device("meta"):
        model = Transformer(config)
    model = apply(model, mesh, transformer_plan(), FP32, data_parallel=technique)
    materialize(model, CPU, 0)
    updates = make_optimizer(optimizer, model.parameters(), 1e-3)
    cross_entropy(model(torch.zeros(1, 8, dtype=torch.int64)), torch.zeros(1, 8, dtype=torch.int64), 8).backward()
    updates.step()
    return sum(local_elements(model, updates).values())


@pytest.mark.parametrize(
    "technique", ["ddp", "zero2", "fsdp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("zero1", "hsdp"))]
)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.long)])
def test_the_bound_is_below_what_ranks_hold_and_close(run_on_ranks, technique, optimizer):
    layout = Layout(dp_replicate=2 if technique == "hsdp" else 1).fit(4)
    with torch.device("meta"):
        model = Transformer(TransformerConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=4))
    count = sum(p.numel() for p in model.parameters())
    bound = footprint.least_elements(count, layout, technique, footprint.STATE[optimizer])
    real = run_on_ranks(held, 4, technique, layout, optimizer)
    assert 0.9 * max(real) < bound <= min(real)


def check(parameters, layout, ranks_here, there, monkeypatch, device="cpu", rank=0, technique="fsdp"):
    monkeypatch.setattr(footprint, "host_memory", lambda: there)
    monkeypatch.setattr(footprint, "device_memory", lambda device: there)
    place = Rank(rank, layout.ranks, rank % ranks_here, ranks_here, "launch")
    techniques = Techniques(data_parallel=technique)
    footprint.check_fits(parameters, techniques, 2, layout, place, torch.device(device), FP32)


def test_by_hosts_devices_and_stages(monkeypatch):
    two = (1000, 3000)  # a pipeline of two ranks; 16 bytes a parameter
    check(two, Layout(pp=2).fit(2), 2, 64_000, monkeypatch)
    with pytest.raises(LayoutError, match="4,000 parameters"):
        check(two, Layout(pp=2).fit(2), 2, 63_999, monkeypatch)
    check(two, Layout(pp=2).fit(2), 1, 16_000, monkeypatch)  # a host each: either may be the one with less
    with pytest.raises(LayoutError, match="4,000 parameters"):
        check(two, Layout(pp=2).fit(2), 1, 15_999, monkeypatch)
    check(two, Layout(pp=2).fit(2), 2, 16_000, monkeypatch, "cuda", rank=0)
    with pytest.raises(LayoutError, match="the ranks on cuda would hold at least"):
        check(two, Layout(pp=2).fit(2), 2, 47_999, monkeypatch, "cuda", rank=1)
    check((1000,), Layout(tp=2).fit(4), 4, 16_000, monkeypatch)  # tp × dp: one copy in all
    with pytest.raises(LayoutError, match="fsdp"):
        check((1000,), Layout().fit(4), 4, 63_999, monkeypatch, technique="ddp")
    check((1000,), Layout().fit(4), 4, None, monkeypatch, technique="ddp")  # nothing is told
