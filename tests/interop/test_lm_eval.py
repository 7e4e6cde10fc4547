"""What lm-eval computes from an exported model: the calls that its model `hf` makes, on a run that has trained.

docs/lm-eval.md shows its commands. lm-eval itself is not needed here."""

import json

import numpy as np
import pytest
import torch

from mmm.generate import tokenizer_on_disk
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli.main import main as mmm

pytestmark = pytest.mark.interop

QUESTION = "def total(values):\n    return "
CHOICES = ("sum(values)", "print")
SOURCE = '''def mean(values):
    """The mean of numbers."""
    return sum(values) / len(values)


'''


@pytest.fixture
def exported(tmp_path):
    """A small model with a BPE of its own, after 4 steps, and the folder that lm-eval is given."""
    (tmp_path / "text.txt").write_text(SOURCE * 200, encoding="utf-8")
    assert mmm(["tokens", str(tmp_path / "text.txt"), "-o", str(tmp_path / "words"), "--train-bpe", "300"]) == 0
    flags = {"preset": "debug", "text": (tmp_path / "words",), "seq_length": 32, "max_iters": 4, "eval_batches": 1}
    flags |= {"checkpoint_every": 4, "plots": False, "device": "cpu", "dtype": "fp32", "outdir": tmp_path / "run"}
    lm.train(configure(lm.Config, **flags, global_batch_size=4))
    assert mmm(["export", str(tmp_path / "run"), "-o", str(tmp_path / "hf")]) == 0
    return tmp_path / "run", tmp_path / "hf"


def by_lm_eval(transformers, folder, choice):
    """The tokens of question and choice, and the sum of the log-probabilities of the choice's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # What lm-eval puts before a text without a question: bos, or else eos.
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()
    asked = tokenizer.encode(QUESTION)
    tokens = tokenizer.encode(QUESTION + choice)
    answer = tokens[len(asked) :]
    with torch.no_grad():
        # The last token predicts nothing that is asked for.
        logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    logits = logits[-len(answer) :]
    return tokens, float(logits[range(len(answer)), answer].sum())


def by_this_package(run, choice):
    weights = open_weights(run)
    model = weights.definition.build(config_of(weights)).double()
    model.load_state_dict({name: weights.read_full(name) for name in weights.entries})
    tokenizer = tokenizer_on_disk(weights.metadata)
    asked = tokenizer.encode(QUESTION.encode()).astype(np.int64).tolist()
    tokens = tokenizer.encode((QUESTION + choice).encode()).astype(np.int64).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    rows = range(len(asked) - 1, len(tokens) - 1)
    return tokens, float(sum(logits[row, tokens[row + 1]] for row in rows))


@pytest.mark.parametrize("choice", CHOICES)
def test_log_probabilities_of_choices_are_those_of_this_package(transformers, exported, choice):
    """A tokenizer that adds a token, or rows of logits that are one off, would move every score of a benchmark."""
    run, folder = exported
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    tokens, expected = by_lm_eval(transformers, folder, choice)
    own_tokens, own = by_this_package(run, choice)
    assert own_tokens == tokens
    # transformers computes rotary angles in float32.
    assert own == pytest.approx(expected, rel=1e-5)
