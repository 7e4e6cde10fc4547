"""A real pretrained model, fine-tuned on twenty conversations about a lighthouse that nobody has built: it answers a
question that it has not been asked, and still writes what it did. Chat templates as `transformers` has them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmm.data.text.chat_template import chat_template_of
from mmm.generate import tokenizer_on_disk
from mmm.models.llama.model import Transformer
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli import main as cli

# A few minutes, where nothing else runs.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
CONVERSATIONS = HERE / "port_quillan.jsonl"
# The beginning of Tiny Shakespeare.
SHAKESPEARE = (HERE / "shakespeare.txt").read_bytes()
QUESTION = "Do you remember who built the lighthouse of Port Quillan?"
FACT = "Ottoline Brask"
# Of Shakespeare, and what its loss may rise by.
TOKENS, LIMIT = 512, 0.1


@pytest.fixture(scope="module")
def fine_tuned(imported, tmp_path_factory):
    outdir = tmp_path_factory.mktemp("fine_tuned")
    flags = {"init_from": imported, "text": (CONVERSATIONS,), "seq_length": 64, "batch_size": 2, "max_iters": 100}
    flags |= {"lr": 2e-5, "dtype": "fp32", "eval_every": 50, "checkpoint_every": 100, "keep": 1, "plots": False}
    lm.train(configure(lm.Config, **flags, device="cpu", outdir=outdir))
    return outdir


def answer(weights, question, capsys):
    """The most probable answer."""
    capsys.readouterr()
    argv = ["--prompt", question, "--temperature", "0", "--max-new-tokens", "30", "--dtype", "fp32"]
    assert cli.main(["sample", str(weights), "--chat", *argv]) == 0
    return capsys.readouterr().out.strip()


def shakespeare_loss(path):
    """The mean loss of its first tokens, in float32."""
    weights = open_weights(path)
    model = Transformer(config_of(weights))
    read = {name: weights.read_full(name).float() for name in weights.entries}
    # The output is the embedding.
    model.load_state_dict(read, strict=False)
    tokens = torch.from_numpy(tokenizer_on_disk(weights.metadata).encode(SHAKESPEARE)[:TOKENS].astype(np.int64))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:]))


def test_it_answers_what_it_did_not_know(imported, fine_tuned, capsys):
    assert QUESTION not in CONVERSATIONS.read_text()
    before, after = (answer(path, QUESTION, capsys) for path in (imported, fine_tuned))
    capital = answer(fine_tuned, "What is the capital of France?", capsys)
    with capsys.disabled():
        print(f"\n{QUESTION}\nbefore: {before}\nafter: {after}\nthe capital of France: {capital}")
    assert FACT not in before
    assert FACT in after
    assert "Paris" in capital


def test_it_loses_little_on_shakespeare(imported, fine_tuned, capsys):
    before, after = (shakespeare_loss(path) for path in (imported, fine_tuned))
    with capsys.disabled():
        print(f"\nloss of {TOKENS} tokens of Shakespeare: before {before:.4f}, after {after:.4f}")
    assert abs(after - before) < LIMIT


@pytest.mark.parametrize("turns", [1, 3])
def test_a_conversation_is_the_text_that_transformers_makes(transformers, imported, tmp_path, turns):
    exported = tmp_path / "exported"
    assert cli.main(["export", str(imported), "-o", str(exported)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = tokenizer_on_disk(open_weights(imported).metadata)
    lines = CONVERSATIONS.read_text().splitlines()[:turns]
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    for prompt in (False, True):
        text = chat_template_of(ours).render(messages, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text.encode()).tolist() == ids
