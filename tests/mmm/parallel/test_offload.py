"""Parts of a model on the host: the same losses, gradients and norm, and what it moves."""

import pytest
import torch

from mmm.errors import ConfigError
from mmm.models.draw import parameter_count
from mmm.models.transformer import Transformer
from mmm.parallel import Layout, apply, build_mesh, loss_of, materialize
from mmm.parallel.memory.offload import check_offload, moved, moved_text
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from mmm.trainer import lm
from mmm.trainer.config.command_line import configure
from support import anywhere, reference

CPU = torch.device("cpu")
F64 = torch.float64


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


@pytest.mark.parametrize(
    ("layout", "pieces"),
    [
        (Layout(dp_shard=2), {"data_parallel": "fsdp", "loss_chunks": 2}),
        (Layout(dp_shard=2), {"data_parallel": "zero2"}),
        pytest.param(Layout(dp_shard=2, tp=2), {}, marks=pytest.mark.long),
        pytest.param(Layout(dp_replicate=2, dp_shard=2), {"data_parallel": "hsdp"}, marks=pytest.mark.long),
        pytest.param(Layout(pp=2, dp_shard=2), {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_same_as_without(run_on_ranks, layout, pieces):
    batch = 6 if layout.ranks == 3 else 8
    techniques = {"accumulate": 2, "steps": 3, "optimizer": "adamw", "global_batch": batch}
    ranks = run_on_ranks(train, layout.ranks, layout, {**pieces, "offload": True}, techniques)
    anywhere.assert_same(ranks, reference.train("adamw", F64, 3, reference.CONFIG, batch))


def kept(rank, technique):
    mesh = build_mesh(Layout(dp_shard=2), "cpu")
    with torch.device("meta"):
        model = Transformer(reference.CONFIG)
    precision = Precision("fp64", F64, F64)
    model = apply(model, mesh, transformer_plan(), precision, data_parallel=technique, offload=True)
    materialize(model, CPU, reference.SEED)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = reference.tokens().batch(0, 2, rank.rank, 1)
    loss_of(model)(model(batch.inputs), batch.targets, batch.count).backward()
    optimizer.step()
    if technique == "zero2":  # loading reaches the host as well
        one = model.sharded["layers.0.attention.wq.weight"]
        model.module.load_state_dict({name: p.detach() * 2 for name, p in model.module.state_dict().items()})
        assert torch.equal(one.host, one.memory[one.rows])
        assert one.host.data_ptr() != one.memory[one.rows].data_ptr()
    return moved([model], optimizer), moved_text([model], optimizer, CPU)


LAST = (reference.CONFIG.vocab_size + 1) * reference.CONFIG.dim * 8 / 2  # norm and output stay gathered until backward


@pytest.mark.parametrize(("technique", "times", "once"), [("fsdp", 2, LAST), ("zero2", 1, 0)])
def test_what_is_kept_and_moved(run_on_ranks, technique, times, once):
    """Half of all parameters on each of two ranks, in float64; AdamW's state is twice that."""
    half = parameter_count(Transformer(reference.CONFIG)) * 8 / 2
    for numbers, text in run_on_ranks(kept, 2, technique):
        expected = {"host_parameters": 1, "host_state": 2, "down": 1}
        expected_bytes = {name: share * half for name, share in expected.items()}
        assert numbers == expected_bytes | {"up": times * half - once}
        assert f"on the host {half / 1e6:.2f} MB of parameters" in text
        assert text.endswith("(one memory: the device is the CPU)")


@pytest.mark.parametrize("parallel", ["fsdp", "zero2"])
def test_the_trainer_says_what_is_moved(tmp_path, capsys, parallel):
    sizes = {"preset": "debug", "seq_length": 16, "max_iters": 2, "eval_batches": 1, "batch_size": 2}
    lm.train(configure(lm.Config, **sizes, plots=False, parallel=parallel, offload=True, outdir=tmp_path))
    assert "offload: on the host" in capsys.readouterr().out


def test_refused():
    with pytest.raises(ConfigError, match=r"zero1, zero2"):
        check_offload("ddp")
    with pytest.raises(ConfigError, match=r"fp16"):
        check_offload("fsdp", "fp16")
