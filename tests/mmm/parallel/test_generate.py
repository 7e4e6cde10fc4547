"""The same tokens on every layout, with the keys and values kept, as when all is computed anew for each token."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from mmm.data import Batch
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn.sampling import Sampling
from mmm.nn.weights import initialize
from mmm.parallel import Layout, Plan, Techniques, build_mesh, partition_model
from mmm.parallel.generate import generate
from mmm.parallel.parallel_model import ParallelModel
from support.compiling import without_code
from support.own_model import FP64

CPU = torch.device("cpu")
# Sizes that 2, 3 and 6 ranks divide, and a vocabulary that none of them does.
SIZES = TransformerConfig(dim=48, n_layers=2, n_heads=12, n_kv_heads=6, vocab_size=71, ffn_dim=60)
PROMPT = [5, 17, 3, 70, 44, 8, 21, 60]
# More than a block: the text goes on from its last half.
BLOCK, TOKENS = 14, 16
# Weights as they start give nearly even logits: any token comes.
HOT = Sampling(temperature=3.0, top_k=60, seed=4)


def made(axes, sizes=SIZES, **fields):
    ranks = torch.distributed.get_world_size()
    layout = Layout(**axes).fit(ranks)
    techniques = Techniques(**fields)
    with torch.device("meta"):
        model = Transformer(sizes)
        inputs = torch.zeros(2 * layout.pp, 24, dtype=torch.int64)
    plan = transformer_plan(sizes)
    partition = partition_model(model, plan, layout, techniques, inputs)
    mesh = build_mesh(layout, "cpu", experts=sizes.n_experts > 0)
    return ParallelModel(model, plan, mesh, FP64, techniques, partition, device=CPU, seed=0)


def texts(rank, axes, fields):
    fields = dict(fields)
    sizes = replace(SIZES, **fields.pop("changed", {}))
    with without_code() if "compile" in fields else nullcontext():
        model = made(axes, sizes, **fields)
    inputs = torch.arange(96).view(4, 24) % 71
    targets = torch.arange(1, 97).view(4, 24) % 71
    inputs = inputs[: 2 * model.layout.pp]
    targets = targets[: 2 * model.layout.pp]
    model.train(False)
    before = model.evaluate(Batch(inputs, targets, 1))
    shown = []

    def keep(token, likeliest):
        shown.append((token, likeliest))

    arguments = model, PROMPT, TOKENS, BLOCK
    result = [generate(*arguments, HOT, 70), generate(*arguments, Sampling(temperature=0), 70, show=3, on_token=keep)]
    assert [token for token, _ in shown] == [likeliest[0][0] for _, likeliest in shown] == result[1]
    for _, ((_, first), (_, second), (_, third)) in shown:
        assert 1 > first > second > third > 0
    # Attention is the model's own again.
    assert torch.equal(model.evaluate(Batch(inputs, targets, 1)), before)
    return result


def written_by(model, sampling):
    """What a plain model writes after the prompt, if it computes the whole text for each token."""
    text, first = list(PROMPT), 0
    for step in range(TOKENS):
        if len(text) - first > BLOCK:
            first = len(text) - BLOCK // 2
        with torch.no_grad():
            logits = model(torch.tensor([text[first:]]))[0, -1]
        text.append(sampling.draw(logits[:70], step))
    return text[len(PROMPT) :]


@cache
def anew(sizes):
    """The same texts by one plain model, which computes everything for each token."""
    model = Transformer(sizes).double()
    initialize(model, 0)
    return [written_by(model, sampling) for sampling in (HOT, Sampling(temperature=0))]


@pytest.mark.parametrize(
    ("ranks", "axes", "fields"),
    [
        (1, {}, {}),
        (1, {}, {"changed": {"window": 3}}),
        (4, {"pp": 2, "tp": 2}, {"changed": {"n_kv_heads": 1, "n_layers": 3, "tie_word_embeddings": True}}),
        pytest.param(2, {"pp": 2}, {"schedule": "ZBVZeroBubble", "changed": {"n_layers": 4}}, marks=pytest.mark.long),
        pytest.param(
            4,
            {"pp": 2},
            {"schedule": "Interleaved1F1B", "loss_chunks": 3, "changed": {"n_layers": 4}},
            marks=pytest.mark.long,
        ),
        pytest.param(4, {"cp": 2, "tp": 2}, {"cp_style": "ulysses"}, marks=pytest.mark.long),
        pytest.param(4, {"ep": 2}, {"changed": {"n_experts": 4, "ffn_dim": 16}}, marks=pytest.mark.long),
        pytest.param(1, {}, {"compile": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_tokens(run_on_ranks, ranks, axes, fields):
    expected = anew(replace(SIZES, **fields.get("changed", {})))
    assert len(set(expected[0])) > 10
    for by_rank in run_on_ranks(texts, ranks, axes, fields):
        assert by_rank == expected


class Recurrent(torch.nn.Module):
    """A language model whose tokens meet in a GRU, and in no attention. It has no need of their positions."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(71, 12)
        self.memory = torch.nn.ModuleDict({"0": torch.nn.GRU(12, 12, batch_first=True)})
        self.head = torch.nn.Linear(12, 71)

    def forward(self, tokens, positions=None):
        h = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.memory.values():
            h, _ = layer(h)
        if self.head is None:
            return h
        return self.head(h)


PARTS = ("embedding", "memory.*", "head")
MEMORY = Plan(tensor={}, fsdp_units=PARTS, stages=PARTS, sequence=True)


def remembered(rank, axes):
    layout = Layout(**axes).fit(torch.distributed.get_world_size())
    techniques = Techniques()
    with torch.device("meta"):
        model = Recurrent()
        inputs = torch.zeros(2 * layout.pp, 24, dtype=torch.int64)
    partition = partition_model(model, MEMORY, layout, techniques, inputs)
    mesh = build_mesh(layout, "cpu")
    model = ParallelModel(model, MEMORY, mesh, FP64, techniques, partition, device=CPU, seed=0)
    model.train(False)
    return generate(model, PROMPT, TOKENS, BLOCK, HOT, 70)


@pytest.mark.parametrize(("ranks", "axes"), [(1, {}), (2, {"pp": 2}), (2, {})], ids=str)
def test_a_model_with_a_memory_does_not_forget(run_on_ranks, ranks, axes):
    """No keys and values keep what a GRU remembers: it saw each token as the first of a text."""
    model = Recurrent().double()
    initialize(model, 0)
    expected = written_by(model, HOT)
    for written in run_on_ranks(remembered, ranks, axes):
        assert written == expected


def stopping(rank):
    model = made({})
    model.train(False)
    text = generate(model, PROMPT, TOKENS, BLOCK, HOT, 70)
    return text, generate(model, PROMPT, TOKENS, BLOCK, HOT, 70, stop=(text[3],))


def test_a_text_ends_at_the_token_that_ends_texts(run_on_ranks):
    ((text, short),) = run_on_ranks(stopping, 1)
    assert short == text[: text.index(text[3]) + 1]


def in_small_parts(rank, parts):
    model = made({})
    model.train(False)
    with patch("mmm.parallel.generate.AT_ONCE", parts):
        return generate(model, PROMPT, 5, BLOCK, HOT, 70)


def test_a_long_prompt_goes_in_parts(run_on_ranks):
    assert run_on_ranks(in_small_parts, 1, 3) == run_on_ranks(in_small_parts, 1, 256)
