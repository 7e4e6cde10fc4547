"""What a checkpoint and an export say of a model besides its sizes: which token ends a text, and its chat template."""

import json
from types import SimpleNamespace

import pytest

from mmm.checkpoint.model_metadata import ChatFormat, ModelMetadata
from mmm.data.text.tokenizer import HuggingFaceTokenizer, train_bpe
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.trainer.language import metadata_of
from mmm_lab.cli.main import main as mmm

END = "<|endoftext|>"
INSTRUCTED = ChatFormat("{% for m in messages %}{{ m.content }}<e>{% endfor %}", {"eos_token": "<e>"})


def test_an_export_names_the_end_that_tokens_were_prepared_with(tmp_path):
    """Without it lm-eval has no token to begin a text with, and a sample runs over the end of its document."""
    text = tmp_path / "a.txt"
    text.write_text("def f(x):\n    return x\n" * 100)
    folder = tmp_path / "tokens"
    assert mmm(["tokens", str(text), "-o", str(folder), "--train-bpe", "280"]) == 0
    flags = {
        "preset": "debug",
        "text": (folder,),
        "seq_length": 16,
        "global_batch_size": 2,
        "max_iters": 1,
        "eval_batches": 1,
        "checkpoint_every": 1,
        "plots": False,
        "device": "cpu",
    }
    lm.train(configure(lm.Config, **flags, outdir=tmp_path / "run"))
    assert mmm(["export", str(tmp_path / "run"), "-o", str(tmp_path / "hf")]) == 0

    def said(name):
        return json.loads((tmp_path / "hf" / name).read_text())

    token = said("tokenizer.json")["model"]["vocab"][END]
    assert said("config.json")["eos_token_id"] == token
    # Nothing in these texts comes before their first word, so there is no bos.
    assert said("tokenizer_config.json") == {"eos_token": END}


@pytest.mark.parametrize(
    ("same", "own", "expected"),
    [
        (True, ChatFormat("", {"eos_token": END}), INSTRUCTED),
        (True, None, INSTRUCTED),
        (True, ChatFormat("{{ bos_token }}"), ChatFormat("{{ bos_token }}")),
        (False, ChatFormat("", {"eos_token": END}), ChatFormat("", {"eos_token": END})),
    ],
    ids=["tokens on disk", "a file alone", "a template of its own", "another tokenizer"],
)
def test_a_chat_template_would_be_lost_by_tokens_on_disk(same, own, expected):
    """They have the same tokenizer as the weights that a run starts from, and no template."""
    tokenizer = HuggingFaceTokenizer(train_bpe(iter(["a b"]), 260, END), "a")
    tokenizer.chat = own
    # The tokenizer of the weights.
    content = tokenizer.content if same else b"another"
    metadata = ModelMetadata(tokenizer=("tokenizer.json", content), chat=INSTRUCTED)
    weights = SimpleNamespace(metadata=metadata, lora=None)
    data = SimpleNamespace(tokenizer=tokenizer, train=SimpleNamespace(seq_length=8))
    assert metadata_of(weights, None, data).chat == expected
