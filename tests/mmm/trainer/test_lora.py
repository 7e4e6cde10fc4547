"""``--lora``: A and B are trained as plain PyTorch trains them, on every layout; the frozen model stays as it is, bit
for bit. What a checkpoint gives: a merged model, and an adapter in the names and the order of rows of Hugging Face."""

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmm.checkpoint import read_manifest
from mmm.errors import CheckpointError, ConfigError, UserError
from mmm.models.llama.model import Transformer
from mmm.nn import weights as initial
from mmm.nn.init import convert
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm.weights.peft import export_adapter
from support.llamas import CHARS, CONFIG, logits, tensors, write_hugging_face
from support.pool import program_on
from support.resuming import curve, train

# 4 key/value heads, so that 2 · 2 ranks have one each. Embedding and output are one weight.
BASE = {**CONFIG, "num_key_value_heads": 4, "tie_word_embeddings": True}
STEPS = 4
SAMPLES = 8
SEQ = 24
LR = 0.5
MAX_NORM = 1.0
RANK, ALPHA = 3, 12.0
# Flags of a training that takes a second.
FLAGS = {
    "lora": RANK,
    "lora_alpha": ALPHA,
    "lora_targets": ("all-linear",),
    "seq_length": SEQ,
    "global_batch_size": SAMPLES,
    "max_iters": STEPS,
    "dtype": "fp64",
    "optimizer": "sgd",
    "lr": LR,
    "max_norm": MAX_NORM,
    "warmup": 0,
    "lr_schedule": "wsd",
    "decay": 0,
    "eval_every": 0,
    "eval_batches": 1,
    "checkpoint_every": 2,
    "save_model": True,
}
# All that LoRA is added to in a layer.
MATRICES = [f"attention.w{letter}" for letter in "qkvo"] + [f"feed_forward.w{n}" for n in (1, 2, 3)]
# Ranks, and the flags of each layout.
LAYOUTS = [
    (2, {"parallel": "ddp"}),
    (2, {"parallel": "zero1"}),
    (2, {"tpsize": 2}),
    (2, {"pp": 2, "microbatches": 4}),
    (4, {"tpsize": 2}),
    *(
        pytest.param(ranks, flags, marks=pytest.mark.long)
        for ranks, flags in [
            (2, {"parallel": "zero2"}),
            (2, {"offload": True, "microbatches": 2}),
            (2, {"tpsize": 2, "loss_chunks": 3, "activation_checkpointing": "full"}),
            (2, {"cp": 2}),
            (2, {"compile": True}),
            (2, {"pp": 2, "loss_chunks": 3}),
            (4, {"parallel": "hsdp"}),
            (4, {"pp": 2, "tpsize": 2}),
            (4, {"cp": 2, "tpsize": 2, "activation_checkpointing": "selective"}),
            (4, {"tpsize": 4, "fingerprints": 1}),
        ]
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def flags(folder):
    """Flags of a run that starts from a folder of Hugging Face's."""
    rng = np.random.RandomState(0)
    (folder / "text").write_text("".join(rng.choice(list(CHARS), 4000)))
    write_hugging_face(folder / "hf", BASE, tensors(BASE, dtype=torch.float64))
    return {**FLAGS, "init_from": folder / "hf", "text": (folder / "text",), "tokenizer": Path("chars")}


@pytest.fixture(scope="module")
def base(flags):
    """The weights on disk, by this package's names."""
    weights = open_weights(flags["init_from"])
    return {name: weights.read_full(name) for name in weights.entries}


@pytest.fixture(scope="module")
def plain(flags, base):
    """One process and plain PyTorch: losses, norms of the gradients, and A and B of each matrix. The model is one
    without LoRA: its matrices are computed from A and B."""
    job = lm.resolve(configured(**flags))
    convert(job.model, torch.float64)
    drawn = job.model.to_empty(device="cpu")
    initial.initialize(drawn, seed=configured(**flags).run.seed)
    small = {name: p.detach().clone() for name, p in drawn.named_parameters() if "lora" in name}
    assert len(small) == 2 * 2 * len(MATRICES)
    for name, tensor in small.items():
        assert ("lora_B" in name) == (not tensor.any())
        tensor.requires_grad_()
    model = Transformer(job.sizes).double()
    state = {**base, "output.weight": base["tok_embeddings.weight"]}
    losses, norms = [], []
    for step in range(STEPS):
        merged = dict(state)
        for name in small:
            if "lora_A" in name:
                matrix = name.replace("lora_A.", "")
                b = small[name.replace("lora_A", "lora_B")]
                merged[matrix] = state[matrix] + ALPHA / RANK * b @ small[name]
        batch = job.data.train.batch(step, SAMPLES, 0, SAMPLES)
        output = torch.func.functional_call(model, merged, (batch.inputs,))
        loss = F.cross_entropy(output.flatten(0, 1), batch.targets.flatten())
        gradients = dict(zip(small, torch.autograd.grad(loss, list(small.values())), strict=True))
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        losses.append(loss.item())
        norms.append(norm.item())
        with torch.no_grad():
            for name, tensor in small.items():
                tensor -= LR * min(1.0, MAX_NORM / (norm.item() + 1e-6)) * gradients[name]
    return losses, norms, {name: tensor.detach() for name, tensor in small.items()}


def configured(**flags):
    return configure(lm.Config, **flags, device="cpu", plots=False)


def run(rank, flags):
    """The trainer's own `train`, on a rank of the pool, whose process group is there already."""
    with program_on(rank):
        lm.train(configured(**flags))


@pytest.fixture(scope="module")
def alone(folder, flags):
    lm.train(configured(**flags, outdir=folder / "alone"))
    return folder / "alone"


def check(outdir, plain, base):
    losses, norms, small = plain
    np.testing.assert_allclose(curve(outdir), losses, rtol=1e-11)
    np.testing.assert_allclose(curve(outdir, "grad_norm"), norms, rtol=1e-9)
    saved = torch.load(outdir / "model.pt", weights_only=True)
    assert saved.keys() - {"output.weight"} == base.keys() | small.keys()
    for name, tensor in base.items():
        assert torch.equal(saved[name], tensor), name
    for name, tensor in small.items():
        assert tensor.any(), name
        # All that SGD has made of four gradients.
        torch.testing.assert_close(saved[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_one_rank_trains_as_plain_pytorch_does(alone, plain, base):
    check(alone, plain, base)
    log = (alone / "log.txt").read_text()
    assert f"--lora 3: {sum(tensor.numel() for tensor in plain[2].values()):,} parameters are trained, next to" in log
    about = json.loads((alone / "config.json").read_text())
    assert about["lora"]["rank"] == RANK


@pytest.mark.parametrize(("ranks", "changed"), LAYOUTS, ids=str)
def test_every_layout_trains_as_plain_pytorch_does(run_on_ranks, flags, plain, base, tmp_path, ranks, changed):
    run_on_ranks(run, ranks, {**flags, **changed, "outdir": tmp_path / "many"})
    check(tmp_path / "many", plain, base)


@pytest.mark.long
def test_it_resumes_on_another_layout(run_on_ranks, flags, plain, base, tmp_path):
    flags = {**flags, "outdir": tmp_path / "run"}
    run_on_ranks(run, 2, {**flags, "tpsize": 2, "max_iters": 2})
    # Whatever stands at --init_from by now, the run goes on from its checkpoint.
    run_on_ranks(run, 2, {**flags, "resume": Path("auto")})
    check(tmp_path / "run", plain, base)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": 4}, "--lora 3 there"),
        ({"lora_targets": ("q_proj",)}, "--lora_targets .*q_proj"),
        ({"lora_alpha": 6.0}, "--lora_alpha 12"),
        ({"lora": 0, "lora_alpha": None, "lora_targets": ()}, "--lora 3 there"),
    ],
    ids=str,
)
def test_another_lora_is_another_run(run_on_ranks, flags, alone, tmp_path, changed, message):
    flags = {**flags, **changed, "resume": alone, "max_iters": 6, "outdir": tmp_path / "out"}
    for error in run_on_ranks(train, 2, "mmm.trainer.lm", flags):
        assert re.search(message, error), error


def test_another_base_is_another_run(run_on_ranks, flags, alone, tmp_path):
    """The frozen weights of the checkpoint are those of the first one, and an adapter would name the second."""
    other = write_hugging_face(tmp_path / "other", BASE, tensors(BASE, seed=1, dtype=torch.float64))
    flags = {**flags, "init_from": other, "resume": alone, "max_iters": 6, "outdir": tmp_path / "out"}
    for error in run_on_ranks(train, 2, "mmm.trainer.lm", flags):
        assert re.search(f"--init_from .*hf there, {other} here", error), error


@pytest.mark.parametrize("kind", ["folder", "import", "run", "none"])
def test_an_adapter_names_a_base_that_peft_can_open(flags, alone, tmp_path, monkeypatch, kind):
    """That is the folder of transformers, also if the run starts from an import of it, by a relative path. A run of
    mmm's own is no such folder: the export says so."""
    hugging_face = flags["init_from"]
    monkeypatch.chdir(hugging_face.parent)
    if kind == "import":
        write_own(open_weights(Path(hugging_face.name)), tmp_path / "imported")
    starts = {"folder": Path("hf"), "import": tmp_path / "imported", "run": alone, "none": None}
    changed = {"init_from": starts[kind], "outdir": tmp_path / "run", "max_iters": 1, "checkpoint_every": 1}
    lm.train(configured(**{**flags, **changed}))
    messages = []
    export_adapter(open_weights(tmp_path / "run"), tmp_path / "adapter", None, messages.append)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    if kind in ("folder", "import"):
        assert Path(about["base_model_name_or_path"]) == hugging_face
        assert not messages
    else:
        assert about["base_model_name_or_path"] is None
        assert len(messages) == 1
        assert "mmm export" in messages[0]


def test_a_checkpoint_is_read_merged(alone, plain, base):
    _, _, small = plain
    weights = open_weights(alone)
    assert weights.entries.keys() == base.keys()
    for name, tensor in base.items():
        a = small.get(name.replace(".weight", ".lora_A.weight"))
        if a is not None:
            tensor = tensor + ALPHA / RANK * small[name.replace(".weight", ".lora_B.weight")] @ a
        read = weights.read_full(name)
        torch.testing.assert_close(read, tensor, rtol=1e-9, atol=1e-11)
        if tensor.ndim == 2:
            # As a rank of tp reads it.
            shard = weights.read(name, (3, 5), (7, 9))
            torch.testing.assert_close(shard, read[3:10, 5:14], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
def test_the_adapter_is_that_of_hugging_face_s_model(folder, flags, tmp_path, kind):
    """Added to Hugging Face's matrices, as PEFT does, it computes the logits of the merged model."""
    config = {**BASE, "model_type": kind, "head_dim": 16 if kind == "qwen3" else 8}
    theirs = tensors(config, dtype=torch.float64)
    write_hugging_face(tmp_path / "hf", config, theirs)
    changed = {"init_from": tmp_path / "hf", "outdir": tmp_path / "run", "max_iters": 2, "checkpoint_every": 2}
    lm.train(configured(**{**flags, **changed}))
    weights = open_weights(tmp_path / "run")
    export_adapter(weights, tmp_path / "adapter", None, print)

    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["peft_type"], about["r"], about["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert about["base_model_name_or_path"] == str(tmp_path / "hf")
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} == set(about["target_modules"])
    adapter = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    adapted = dict(theirs)
    for name, a in adapter.items():
        if "lora_A" in name:
            b = adapter[name.replace("lora_A", "lora_B")]
            module = re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name)[1]
            scale = about["lora_alpha"] / about["r"]
            adapted[f"{module}.weight"] = theirs[f"{module}.weight"] + scale * b @ a
    # A and B, of two layers.
    assert len(adapter) == 2 * 2 * len(MATRICES)

    tokens = torch.arange(40).view(2, 20) * 7 % 67
    before, after = (logits(config, state, tokens) for state in (theirs, adapted))
    model = Transformer if kind != "qwen3" else weights.definition.build
    module = model(lm.resolve(configured(**{**flags, **changed})).sizes).double()
    state = {name: weights.read_full(name) for name in weights.entries}
    module.load_state_dict({**state, "output.weight": state["tok_embeddings.weight"]})
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), after, rtol=1e-10, atol=1e-10)
    assert (after - before).abs().max() > 0.01


def read_safetensors(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            assert about["dtype"] == "F64"
            stored = np.frombuffer(content[8 + size + begin : 8 + size + end])
            tensors[name] = torch.from_numpy(stored.reshape(about["shape"]).copy())
    return tensors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--lora": "3"}, "damaged: its --lora is '3'"),
        ({"--lora_alpha": "12"}, "damaged: its --lora is 3, '12'"),
        ({"--lora": RANK + 1}, r"w[qk].lora_A.weight is \(3, 32\), and .* makes it \(4, 32\)"),
        ({"--lora": None}, r"w[qk].lora_A.weight is .* makes it \(0, 32\)"),
    ],
    ids=str,
)
def test_a_checkpoint_that_contradicts_itself(alone, changed, message):
    manifest = read_manifest(alone / "checkpoints" / "step-4")
    manifest = replace(manifest, identity={**manifest.identity, **changed})
    with patch("mmm.weights.own.read_manifest", lambda path: manifest), pytest.raises(CheckpointError, match=message):
        open_weights(alone)


def test_weights_without_lora_have_no_adapter(flags, tmp_path):
    with pytest.raises(CheckpointError, match="has no adapter"):
        export_adapter(open_weights(flags["init_from"]), tmp_path / "adapter", None, print)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": -1}, "--lora -1"),
        ({"lora": 0}, "--lora_alpha 12.0|--lora_targets"),
        ({"lora_alpha": float("nan")}, "--lora_alpha nan"),
        ({"lora_targets": ("c_attn",)}, "--lora_targets c_attn: llama has q_proj, k_proj"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"exact": 2}, "--exact 2"),
        ({"init_from": None, "n_experts": 2, "tokenizer": None}, "--n_experts 2"),
        ({"init_from": None, "model": "gpt", "preset": "shakespeare-cpu"}, "--model gpt"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(flags, tmp_path, changed, message):
    flags = {**flags, **changed, "outdir": tmp_path / "out"}
    with pytest.raises(UserError, match=message) as refused:
        lm.train(configured(**flags))
    assert isinstance(refused.value, ConfigError)
    assert not (tmp_path / "out").exists()


def test_a_first_stage_without_a_matrix_is_refused(run_on_ranks, flags):
    # Two layers, and 4 stages: the first has only the embedding.
    flags = {**flags, "pp": 2, "schedule": "Interleaved1F1B", "microbatches": 4}
    with pytest.raises(Exception, match="the first of 4 stages has only tok_embeddings"):
        run_on_ranks(run, 2, flags)
