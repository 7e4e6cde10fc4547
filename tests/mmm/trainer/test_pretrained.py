"""Training that starts from weights on disk, and writes text at each evaluation: the same on every layout."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mmm.errors import ConfigError, DataError, UserError
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.trainer.lm import resolve
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from support import gpt2
from support.gpt2 import GPT2
from support.llamas import CHARS, CONFIG, MIXTRAL, QWEN3_MOE, byte_bpe, logits, tensors, write_hugging_face
from support.pool import program_on
from support.resuming import curve

TIED = {**CONFIG, "tie_word_embeddings": True}
# Flags of a training that takes a second.
SMALL = {
    "seq_length": 24,
    "global_batch_size": 4,
    "max_iters": 3,
    "dtype": "fp64",
    "plots": False,
    "optimizer": "sgd",
    "lr": 0.1,
    "warmup": 1,
    "eval_every": 2,
    "eval_batches": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pretrained")


@pytest.fixture(scope="module")
def text(folder):
    rng = np.random.RandomState(0)
    (folder / "text").write_text("".join(rng.choice(list(CHARS), 4000)))
    return folder / "text"


@pytest.fixture(scope="module")
def imported(folder):
    write_own(open_weights(write_hugging_face(folder / "hf", TIED)), folder / "own")
    return folder / "own"


def run(rank, outdir, flags):
    """The trainer's own `train`, on a rank of the pool, whose process group is there already."""
    with program_on(rank):
        lm.train(configure(lm.Config, **{**SMALL, **flags}, device="cpu", outdir=outdir))


@pytest.fixture(scope="module")
def alone(folder, imported, text):
    flags = {"init_from": imported, "text": (text,), "prompt": "Speak,"}
    lm.train(
        configure(
            lm.Config, **SMALL, **flags, device="cpu", outdir=folder / "alone", checkpoint_every=2, save_model=True
        )
    )
    return flags


def test_the_first_loss_is_that_of_the_weights(folder, alone):
    """Of the same batch, by what `transformers` computes."""
    batch = resolve(configure(lm.Config, **SMALL, **alone)).data.train.batch(0, 4, 0, 4)
    theirs = logits(TIED, tensors(TIED), batch.inputs)
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), batch.targets.flatten())
    assert curve(folder / "alone")[0] == pytest.approx(float(loss), rel=1e-10)
    about = json.loads((folder / "alone" / "config.json").read_text())
    assert about["init_from"]["sizes"]["tie_word_embeddings"] is True
    assert about["data"]["tokenizer"] == f"chars, {len(CHARS)} tokens"


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, {"tpsize": 2}),
        (2, {"parallel": "zero2"}),
        (2, {"parallel": "ddp"}),
        (4, {"cp": 2, "tpsize": 2}),
        (4, {"pp": 2, "tpsize": 2}),
        (2, {"tpsize": 2, "loss_chunks": 3, "offload": True}),
    ],
    ids=str,
)
def test_losses_and_texts_are_the_same_on_every_layout(run_on_ranks, folder, alone, tmp_path, ranks, flags):
    one = folder / "alone"
    run_on_ranks(run, ranks, tmp_path / "many", {**alone, **flags})
    np.testing.assert_allclose(curve(tmp_path / "many"), curve(one), rtol=1e-9)
    samples = [json.loads((path / "config.json").read_text())["samples"] for path in (one, tmp_path / "many")]
    assert samples[0] == samples[1]
    assert [sample["iter"] for sample in samples[0]] == [1, 2]
    assert all(sample["text"].startswith("Speak,") and len(sample["text"]) == 106 for sample in samples[0])
    log = (tmp_path / "many" / "log.txt").read_text()
    assert f"sample after step 2:\n{samples[0][1]['text']}" in log


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "ranks", "flags"),
    [
        (GPT2, 2, {"tpsize": 2}),
        (GPT2, 4, {"pp": 2, "parallel": "zero1"}),
        (MIXTRAL, 4, {"pp": 2, "ep": 2}),
        (QWEN3_MOE, 4, {"tpsize": 2, "ep": 2}),
    ],
    ids=lambda value: value.get("model_type", str(value)) if isinstance(value, dict) else value,
)
def test_a_gpt2_and_mixtures_of_the_hub_train_on_layouts(run_on_ranks, text, tmp_path, config, ranks, flags):
    """Each rank reads its part of the files: of matrices that are transposed there, and of its own experts."""
    weights = gpt2.tensors() if config is GPT2 else tensors(config)
    path = write_hugging_face(tmp_path / "hf", config, weights)
    options = {"init_from": path, "text": (text,), "eval_every": 0, "checkpoint_every": 3}
    lm.train(configure(lm.Config, **{**SMALL, **options}, device="cpu", outdir=tmp_path / "one"))
    batch = resolve(configure(lm.Config, **{**SMALL, **options})).data.train.batch(0, 4, 0, 4)
    theirs = gpt2.logits(weights, batch.inputs) if config is GPT2 else logits(config, weights, batch.inputs)
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), batch.targets.flatten())
    assert curve(tmp_path / "one")[0] == pytest.approx(float(loss), rel=1e-10)
    run_on_ranks(run, ranks, tmp_path / "many", {**options, **flags})
    np.testing.assert_allclose(curve(tmp_path / "many"), curve(tmp_path / "one"), rtol=1e-9)
    # What training leaves can be exported: no bias of an expert has moved.
    export(open_weights(tmp_path / "many"), tmp_path / "back", None, 10**9, print)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == config["model_type"]
    one, many = open_weights(tmp_path / "one"), open_weights(tmp_path / "back")
    for name in many.entries:
        torch.testing.assert_close(many.read_full(name), one.read_full(name), rtol=1e-8, atol=1e-10)


def test_a_checkpoint_has_its_tokenizer_and_block(folder, alone):
    weights = open_weights(folder / "alone")
    assert weights.path.name == "step-3"
    # The base knows 64 positions, and the run trains on 24.
    assert (weights.metadata.block, weights.metadata.eos) == (64, (66,))
    assert json.loads(weights.metadata.tokenizer[1])["chars"] == CHARS
    assert weights.check() is None
    saved = torch.load(folder / "alone" / "model.pt", weights_only=True)
    for name in weights.entries:
        assert torch.equal(weights.read_full(name), saved[name]), name


# What a base says of itself beyond its sizes.
DESCRIPTIONS = {
    "config.json": {**TIED, "eos_token_id": 65, "pad_token_id": 3, "bos_token_id": 1, "head_dim": 8, "a_key": "kept"},
    "generation_config.json": {"eos_token_id": [66, 65], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.9},
    "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "model_max_length": 64},
    "special_tokens_map.json": {"unk_token": "<unk>"},
}


@pytest.fixture(scope="module")
def described(folder):
    """A base whose files say more than its sizes, with the bytes as tokens."""
    path = write_hugging_face(folder / "described", {**TIED, "vocab_size": 260}, files=1)
    (path / "tokenizer.json").write_bytes(byte_bpe(("<s>", "</s>", "<p>", "<end>")))
    for name, content in DESCRIPTIONS.items():
        more = {"vocab_size": 260} if name == "config.json" else {}
        (path / name).write_text(json.dumps({**content, **more}))
    return path


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ({}, {}),
        ({"seq_length": 96}, {"config.json": {"max_position_embeddings": 96}}),
        ({"lora": 2}, {}),
        ({"dtype": "fp32"}, {"config.json": {"torch_dtype": "float32"}}),
    ],
    ids=str,
)
def test_an_export_says_what_the_base_said_but_for_what_training_has_changed(described, text, tmp_path, flags, changed):
    """Lengths and special tokens were lost: a server then took prompts of --seq_length tokens, and never stopped."""
    flags = {**SMALL, "max_iters": 1, "init_from": described, "text": (text,), "checkpoint_every": 1, **flags}
    lm.train(configure(lm.Config, **flags, device="cpu", outdir=tmp_path / "run"))
    export(open_weights(tmp_path / "run"), tmp_path / "out", None, 10**9, print)
    changed = {"config.json": {}, **changed}
    changed["config.json"] = {"torch_dtype": "float64", "vocab_size": 260, **changed["config.json"]}
    for name, content in DESCRIPTIONS.items():
        assert json.loads((tmp_path / "out" / name).read_text()) == {**content, **changed.get(name, {})}, name


def test_an_export_of_a_text_with_another_tokenizer_does_not_name_the_tokens_of_the_base(described, text, tmp_path):
    flags = {**SMALL, "max_iters": 1, "init_from": described, "text": (text,), "checkpoint_every": 1}
    flags |= {"tokenizer": Path("bytes"), "device": "cpu", "outdir": tmp_path / "run"}
    lm.train(configure(lm.Config, **flags))
    export(open_weights(tmp_path / "run"), tmp_path / "out", None, 10**9, print)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config.get("pad_token_id")) == (None, None, None)
    assert (config["max_position_embeddings"], config["rope_theta"]) == (64, 10_000)


@pytest.mark.parametrize("documents", [False, True], ids=["text", "conversations"])
def test_a_tokenizer_may_have_more_tokens_than_the_model_has_rows(folder, tmp_path, documents):
    """As a Llama 2 with [PAD]. If the text has one of the tokens beyond, it is refused, with its number."""
    base = write_hugging_face(tmp_path / "hf", {**TIED, "vocab_size": 258})
    (base / "tokenizer.json").write_bytes(byte_bpe(("<s>", "</s>", "<p>", "<q>")))

    def resolved(word):
        text = tmp_path / ("text.jsonl" if documents else "text")
        line = json.dumps({"prompt": "q", "answer": f"a {word}"}) if documents else f"some words {word}"
        text.write_text(f"{line}\n" * 200)
        flags = {**SMALL, "init_from": base, "text": (text,), "outdir": tmp_path / "run", "device": "cpu"}
        return resolve(configure(lm.Config, **flags))

    assert resolved("</s>").sizes.vocab_size == 258
    # The model has 258 rows.
    with pytest.raises(DataError, match="token 259, and the model's vocabulary ends at 257"):
        resolved("<q>")


@pytest.mark.long
def test_a_run_that_goes_on_does_not_start_again(folder, alone, imported, text, tmp_path):
    flags = {**SMALL, **alone, "checkpoint_every": 2, "outdir": tmp_path / "run", "device": "cpu"}
    lm.train(configure(lm.Config, **{**flags, "max_iters": 2}))
    lm.train(configure(lm.Config, **{**flags, "resume": Path("auto")}))
    log = (tmp_path / "run" / "log.txt").read_text()
    # Read once: a run that goes on has its own.
    assert log.count(f"weights of {imported}") == 1
    assert "resumed from" in log
    np.testing.assert_allclose(curve(tmp_path / "run")[2], curve(folder / "alone")[2], rtol=1e-12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 64}, "dim 32"),
        ({"preset": "debug"}, "--preset debug and --init_from"),
        # Also the one that stands where none is given.
        ({"preset": "small"}, "--preset small and --init_from"),
        ({"prompt": "Zoë"}, "--prompt"),
        ({"prompt": "x" * 25}, "--prompt has 25"),
        ({"dataset": "random", "text": ()}, "--prompt"),
        ({"tokenizer": "bytes"}, r"text has token 122, and the model's vocabulary ends at 66"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_flags_that_do_not_fit(alone, tmp_path, changed, message):
    with pytest.raises(UserError) as refused:
        lm.train(configure(lm.Config, **{**SMALL, **alone, **changed}, device="cpu", outdir=tmp_path / "out"))
    assert re.search(message, str(refused.value).replace("\n", "¶")), refused.value
    assert isinstance(refused.value, ConfigError | DataError)
    assert not (tmp_path / "out").exists()
