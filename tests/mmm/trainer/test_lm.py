"""The language-model trainer on products of axes: losses, clipped and at a falling rate, as on one rank; model.pt."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mmm.history
from mmm.data.text.prepare import Preparation, prepare
from mmm.errors import DivergedError, RecordError, UserError
from mmm.models.llama.model import Transformer
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.trainer.load_text import load_text, open_text
from mmm.trainer.sizes import model_sizes
from support.pool import program_on

# Flags of a training that takes a second; SGD, which shows a gradient that is off by a factor.
SMALL = {
    "preset": "debug",
    "seq_length": 32,
    "global_batch_size": 8,
    "max_iters": 4,
    "dtype": "fp64",
    "plots": False,
    "optimizer": "sgd",
    "lr": 0.3,
    "max_norm": 0.5,
    "warmup": 2,
    "eval_every": 2,
    "eval_batches": 2,
    "save_model": True,
}


def run(rank, outdir, flags):
    """The trainer's own `train`, on a rank of the pool, whose process group is there already."""
    with program_on(rank):
        lm.train(configure(lm.Config, **SMALL, **flags, device="cpu", outdir=outdir))


def saved(folder, **flags):
    config = configure(lm.Config, **SMALL, **flags)
    model = Transformer(model_sizes(config.model, None, 32, 256)).double()
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    outdir = tmp_path_factory.mktemp("lm")
    lm.train(configure(lm.Config, **SMALL, device="cpu", outdir=outdir))
    return outdir


@pytest.mark.parametrize(
    "flags",
    [
        {"cp": 2, "dp_shard": 1},
        pytest.param({"pp": 2, "tpsize": 2, "schedule": "DualPipeV"}, marks=pytest.mark.long),
        pytest.param({"cp": 2, "dp_replicate": 2, "activation_checkpointing": "full"}, marks=pytest.mark.long),
        pytest.param({"pp": 2, "cp": 2, "schedule": "ZBVZeroBubble", "microbatches": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_layout_trains_the_same_model(run_on_ranks, alone, tmp_path, flags):
    run_on_ranks(run, 2 if "dp_shard" in flags else 4, tmp_path, flags)
    one, many = (mmm.history.load(folder) for folder in (alone, tmp_path))
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-9)
    np.testing.assert_allclose(many.val_loss, one.val_loss, rtol=1e-9)
    # A byte is a token.
    np.testing.assert_allclose(many.val_bpb, one.val_loss / np.log(2), rtol=1e-9)
    np.testing.assert_allclose(many.grad_norm, one.grad_norm, rtol=1e-9)
    ranks = many.sizes["rank"]
    about = json.loads((tmp_path / "config.json").read_text())["mfu"]
    assert about["flops_per_sample"] == json.loads((alone / "config.json").read_text())["mfu"]["flops_per_sample"]
    np.testing.assert_allclose(many.sps_per_gpu * ranks, many.sps, rtol=1e-12)
    np.testing.assert_allclose(many.tps_per_gpu * ranks, many.tps, rtol=1e-12)
    used = many.sps_per_gpu * about["flops_per_sample"] / about["peak_flops_per_rank"]
    np.testing.assert_allclose(many.mfu, used, rtol=1e-12)
    assert "measured, a product of" in about["peak"]
    # the legend
    assert (tmp_path / "log.txt").read_text().count("model FLOPs utilisation, a part of") == 1
    parts = [many[column].values for column in ("dtd", "dtf", "dtb", "dto", *(["dtw"] if "pp" in flags else []))]
    np.testing.assert_allclose(sum(parts), many.dt, rtol=1e-12)
    weights = dict(saved(tmp_path).named_parameters())
    for name, parameter in saved(alone).named_parameters():
        torch.testing.assert_close(weights[name], parameter, rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Flags of a folder of long and short documents, packed; and a run on one rank."""
    folder = tmp_path_factory.mktemp("packed")
    rng = np.random.RandomState(0)
    # Letters of a document.
    for name, least, most in (("a", 1, 60), ("b", 18, 30)):
        documents = ("".join(map(chr, rng.randint(97, 123, rng.randint(least, most)))) for _ in range(600))
        (folder / name).write_text("#".join(documents))
    prepare(Preparation((folder / "a", folder / "b"), folder / "ab.tokens", separator="#"), 1)
    flags = {"text": (folder / "ab.tokens",), "pack": True, "document_mask": True}
    lm.train(configure(lm.Config, **SMALL, **flags, device="cpu", outdir=folder / "one"))
    return SimpleNamespace(flags=flags, outdir=folder / "one")


def test_the_loss_of_packed_documents_is_that_of_each_alone(packed):
    """The validation loss: the mean over the targets, each document computed by itself."""
    config = configure(lm.Config, **SMALL, **packed.flags)
    data = config.data
    validation = load_text(data, open_text(data), 256, config.run.seed).validation
    model = saved(packed.outdir)
    total, count = 0.0, 0
    for step in range(config.evaluation.eval_batches):
        batch = validation.batch(step, 8, 0, 8)
        for inputs, targets, starts in zip(batch.inputs, batch.targets, batch.documents.start_of_token, strict=True):
            for start in starts.unique():
                document = (starts == start) & (targets != -100)
                if document.any():
                    with torch.no_grad():
                        logits = model(inputs[document][None])
                    total += torch.nn.functional.cross_entropy(logits[0], targets[document], reduction="sum").item()
                    count += int(document.sum())
    # Some targets are padding.
    assert 0 < count < config.evaluation.eval_batches * 8 * 32
    assert total / count == pytest.approx(float(mmm.history.load(packed.outdir).val_loss[-1]), rel=1e-12)


# 2,990 bytes, whose last 299 have 298 targets: 9 sequences of 32, and one of 10.
WHOLE = {"max_iters": 1, "lr": 1e-30, "eval_every": 1, "eval_batches": 1000, "seq_length": 32}


@pytest.fixture(scope="module")
def loss_of_text(tmp_path_factory):
    """A text, and the loss of all targets of its last tenth by plain PyTorch, in float64, of the drawn model."""
    folder = tmp_path_factory.mktemp("whole")
    text = bytes(np.random.RandomState(0).randint(97, 123, 2990, dtype=np.uint8))
    (folder / "text").write_bytes(text)
    flags = {**SMALL, **WHOLE, "text": (folder / "text",), "device": "cpu"}
    lm.train(configure(lm.Config, **flags, outdir=folder / "alone"))
    model = saved(folder / "alone")
    tokens = torch.tensor(list(text[-299:]))
    total = 0.0
    for begin in range(0, 298, 32):
        stretch = tokens[begin : begin + 33]
        with torch.no_grad():
            total += torch.nn.functional.cross_entropy(
                model(stretch[None, :-1])[0], stretch[1:], reduction="sum"
            ).item()
    return flags, total / 298


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 16])
def test_the_validation_loss_is_that_of_the_whole_text_for_every_batch_size(loss_of_text, tmp_path, batch_size):
    """The last batch has fewer samples than the others, and the last sample fewer tokens: both were left out."""
    flags, expected = loss_of_text
    lm.train(configure(lm.Config, **{**flags, "global_batch_size": batch_size}, outdir=tmp_path / "run"))
    assert float(mmm.history.load(tmp_path / "run").val_loss[-1]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        # The second rank has two samples of the last batch, or none.
        (2, {"global_batch_size": 6}),
        (2, {"global_batch_size": 6, "exact": 2}),
        (2, {"pp": 2, "microbatches": 4}),
        (2, {"tpsize": 2, "loss_chunks": 3}),
        pytest.param(4, {"global_batch_size": 12}, marks=pytest.mark.long),
        pytest.param(4, {"pp": 2, "tpsize": 2, "schedule": "1F1B", "microbatches": 4}, marks=pytest.mark.long),
        pytest.param(4, {"cp": 2, "dp_replicate": 2, "microbatches": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_validation_loss_is_that_of_the_whole_text_on_every_mesh(
    run_on_ranks, loss_of_text, tmp_path, ranks, flags
):
    alone, expected = loss_of_text
    run_on_ranks(run_plainly, ranks, tmp_path / "run", {**alone, **flags})
    assert float(mmm.history.load(tmp_path / "run").val_loss[-1]) == pytest.approx(expected, rel=1e-12)


def run_plainly(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **flags, outdir=outdir))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"parallel": "zero1", "offload": True}, "offload with zero1"),
        ({"loss_chunks": 0}, "--loss_chunks 0"),
        ({"offload": True, "optimizer": "muon"}, "--optimizer muon with --offload"),
        ({"offload": True, "dtype": "fp16"}, "offload with dtype fp16"),
        ({"n_experts": 4, "balance_rate": float("inf")}, "--balance_rate inf"),
        (
            {"model": "qwen3", "preset": "debug", "n_experts": 4, "balance_rate": 0.01},
            "--balance_rate 0.01: the experts' scores are a softmax",
        ),
        ({"timeout": float("inf")}, "--timeout inf"),
        ({"max_norm": float("nan")}, "--max_norm nan"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"seed": 1 << 63}, "--seed 9223372036854775808"),
        ({"eval_every": -1}, "--eval_every -1"),
        ({"decay": 3}, "--decay 3"),
        ({"weight_decay": -0.1}, "--weight_decay -0.1"),
        ({"decayed": "matrices"}, "--decayed"),
        ({"eval_batches": 0}, "--eval_batches 0"),
        ({"document_mask": True}, "--pack"),
        ({"pack": True}, "library does not say where documents end: prepare its texts by mmm tokens"),
        ({"document_mask": True, "dataset": "random"}, "--document_mask and --dataset"),
    ],
    ids=str,
)
def test_refused_before_anything_is_written(monkeypatch, tmp_path, flags, message, no_process_group):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        lm.train(configure(lm.Config, **{**SMALL, **flags}, outdir=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_part_of_a_model(monkeypatch, tmp_path):
    def full(state, path):
        path.write_text("a part")
        raise RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RecordError, match=r"cannot write .*model\.pt: .* bytes are free there"):
        lm.train(configure(lm.Config, **SMALL, device="cpu", outdir=tmp_path))
    # A run that fails leaves it.
    torch.distributed.destroy_process_group()
    assert not list(tmp_path.glob("model*"))
    # The record is complete all the same.
    assert len(mmm.history.load(tmp_path).loss) == SMALL["max_iters"]


@pytest.mark.parametrize(
    ("dtype", "rate"), [("fp64", 1e200), pytest.param("fp32", 1e30, marks=pytest.mark.long), ("bf16", 1e30)]
)
def test_a_loss_that_is_no_number(tmp_path, dtype, rate):
    flags = SMALL | {"dtype": dtype, "lr": rate, "max_norm": 0.0, "warmup": 0, "eval_every": 0}
    with pytest.raises(DivergedError, match=r"--lr") as refused:
        lm.train(configure(lm.Config, **flags, device="cpu", outdir=tmp_path))
    # A run that fails leaves it.
    torch.distributed.destroy_process_group()
    assert str(refused.value).endswith(", or try --dtype fp32") == (dtype == "bf16")
