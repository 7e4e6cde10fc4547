"""What an error advises passes: each advice where one rule is broken, the first of each where several are."""

import re
from dataclasses import fields, replace

import pytest

from mmm.errors import LayoutError
from mmm.layout import check_data_parallel
from mmm.models.cnn import CNNConfig
from mmm.models.transformer import TransformerConfig
from mmm.models.vit import PRESETS, ViTConfig
from mmm.parallel import Layout, Techniques
from mmm.parallel.advice import nearest, smaller
from mmm.parallel.plans.cnn import check_cnn
from mmm.parallel.plans.transformer import check_transformer
from mmm.parallel.plans.vit import check_vit
from mmm.parallel.pp.schedules import check_pipeline

SMALL = TransformerConfig(dim=96, n_layers=2, n_heads=6, n_kv_heads=3, ffn_dim=96)
DEBUG = PRESETS["debug"]


def check(model, layout, seq_length=24, style="ring"):
    if isinstance(model, TransformerConfig):
        check_transformer(model, layout, seq_length, style)
    elif isinstance(model, ViTConfig):
        check_vit(model, layout)
    else:
        check_cnn(model, layout)


def advice_in(message):
    """By broken rule, what is advised: (flag, value) pairs."""
    found = []
    for sentence in message.split("; "):
        text = sentence.partition(": use ")[2] or sentence
        ways = []
        for way in text.split(", or "):
            if way == "cp_style ring":
                ways.append(("style", "ring"))
            else:
                flag, *numbers = way.replace(" or ", " ").split()
                ways += [(flag, int(number)) for number in numbers]
        found.append(ways)
    return found


def change(case, flag, value):
    case = {"seq_length": 24, "style": "ring"} | case
    if flag in case:
        return case | {flag: value}
    if flag in [field.name for field in fields(case["model"])]:
        return case | {"model": replace(case["model"], **{flag: value})}
    layout = case["layout"]
    ranks = layout.ranks
    return case | {"layout": replace(layout, **{flag: value}, dp_shard=-1).fit(ranks)}


CASES = [
    {"model": SMALL, "layout": Layout(tp=4)},
    {"model": replace(SMALL, n_heads=12), "layout": Layout(tp=4)},
    {"model": replace(SMALL, n_heads=12, n_kv_heads=6), "layout": Layout(tp=4)},
    {"model": replace(SMALL, n_heads=4, n_kv_heads=4), "layout": Layout(tp=8)},
    {"model": TransformerConfig(), "layout": Layout(tp=3)},
    {"model": TransformerConfig(), "layout": Layout(tp=12), "seq_length": 30},
    {"model": replace(SMALL, ffn_dim=90, n_kv_heads=6), "layout": Layout(tp=4)},
    {"model": replace(SMALL, vocab_size=5, n_kv_heads=2, n_heads=4), "layout": Layout(tp=4)},
    {"model": replace(SMALL, n_heads=8, n_kv_heads=2), "layout": Layout(tp=4), "seq_length": 30},
    {"model": replace(SMALL, n_heads=16, n_kv_heads=1, dim=96), "layout": Layout(tp=16), "seq_length": 32},
    {"model": SMALL, "layout": Layout(cp=2), "seq_length": 30},
    {"model": SMALL, "layout": Layout(cp=4), "style": "ulysses"},
    {"model": SMALL, "layout": Layout(cp=2, tp=2), "style": "ulysses"},
    {"model": replace(SMALL, n_heads=3), "layout": Layout(cp=2, tp=2), "style": "ulysses"},
    {"model": SMALL, "layout": Layout(cp=2, tp=4), "seq_length": 6},
    {"model": replace(SMALL, n_experts=6, top_k=5), "layout": Layout(dp_shard=4, ep=4)},
    {"model": replace(SMALL, n_experts=3, n_kv_heads=3), "layout": Layout(tp=4, dp_shard=2, ep=2)},
    {"model": DEBUG, "layout": Layout(tp=3)},
    {"model": DEBUG, "layout": Layout(tp=8)},
    {"model": replace(DEBUG, mlp_dim=50), "layout": Layout(tp=4)},
    {"model": CNNConfig(), "layout": Layout(tp=3)},
    {"model": CNNConfig(), "layout": Layout(tp=6)},
]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case['model']).__name__}-{case['layout']}")
def test_what_is_advised_passes(case, ranks):
    layout = case["layout"]
    case = case | {"layout": layout if layout.dp_shard > 0 else replace(layout, dp_shard=ranks)}
    with pytest.raises(LayoutError) as refused:
        check(**case)
    advised = advice_in(str(refused.value))
    assert all(advised), refused.value
    together = case
    for ways in advised:
        axes = [way for way in ways if way[0] in ("tp", "cp", "ep")]
        if len(advised) == 1:
            axes = ways
        for way in axes:  # alone
            check(**change(case, *way))
        together = change(together, *next((way for way in ways if way not in axes or len(advised) == 1), ways[0]))
    check(**together)
    assert len({text.partition(" (")[0] for text in str(refused.value).split("; ")}) == len(advised)


@pytest.mark.parametrize(("pp", "dp", "parts"), [(4, 1, 3), (4, 2, 3), (8, 1, 5), (3, 1, 2), (4, 1, 6)])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_of_a_pipeline(pp, dp, parts, schedule):
    layout, techniques = Layout(pp=pp, dp_shard=dp), Techniques(schedule=schedule, microbatches=2 * pp)
    least = {"1F1B": 1, "Interleaved1F1B": 2}[schedule]
    if parts >= pp * least:
        return
    with pytest.raises(LayoutError) as refused:
        check_pipeline(layout, techniques, 16 * pp, parts)
    message = str(refused.value)
    if less := re.search(r"use pp (\d+),", message):
        smaller_one = Layout(pp=int(less[1])).fit(layout.ranks)
        check_pipeline(smaller_one, techniques, 16 * pp, parts)
    if "1F1B)" in message:
        check_pipeline(layout, replace(techniques, schedule="1F1B"), 16 * pp, parts)


@pytest.mark.parametrize(
    ("technique", "layout"),
    [
        ("hsdp", Layout(dp_shard=4)),
        ("hsdp", Layout(dp_shard=3)),
        ("hsdp", Layout(dp_shard=1, tp=2)),
        ("hsdp", Layout(dp_shard=4, ep=2)),
        ("hsdp", Layout(dp_shard=2, ep=2)),
        ("ddp", Layout(dp_shard=1, tp=2, cp=2)),
        ("zero1", Layout(dp_shard=2, pp=2, ep=2)),
        ("zero2", Layout(dp_replicate=2, dp_shard=2)),
    ],
    ids=str,
)
def test_of_a_data_parallel_technique(technique, layout):
    with pytest.raises(LayoutError) as refused:
        check_data_parallel(technique, layout)
    advised = str(refused.value).rpartition(": ")[2]
    if other := re.search(r"use (\w+)", advised):
        check_data_parallel(other[1], layout)
    if sizes := re.findall(r"(pp|cp|tp|ep|dp_replicate) (\d)", advised):
        changed = replace(layout, **{axis: int(size) for axis, size in sizes}, dp_shard=-1).fit(layout.ranks)
        check_data_parallel(technique, changed)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(Layout(tp=3), 4), (Layout(tp=3, ep=2), 4), (Layout(pp=2, cp=2, ep=3), 6), (Layout(dp_shard=4, tp=2, ep=2), 4)],
    ids=str,
)
def test_of_the_number_of_ranks(layout, ranks):
    with pytest.raises(LayoutError) as refused:
        layout.fit(ranks)
    assert f"start {refused.value.ranks} ranks" in str(refused.value)
    layout.fit(refused.value.ranks)


def test_nearest_and_smaller():
    assert nearest(6, lambda n: n % 4 == 0) == [4, 8]
    assert nearest(3, lambda n: n % 4 == 0) == [4]
    assert nearest(3, lambda n: False) == []
    assert smaller("tp", Layout(tp=4, dp_shard=1), lambda layout: True) == [2]  # 3 does not divide 4 ranks
    assert smaller("tp", Layout(tp=4, dp_shard=3), lambda layout: True) == [3]
    assert smaller("ep", Layout(dp_shard=4, ep=4), lambda layout: layout.ep < 2) == [1]


def test_one_wrong_size_is_said_once_by_the_name_of_its_flag():
    assert replace(SMALL, dim=0, ffn_dim=None).problems() == ["dim is 0: it must be at least 1"]
    assert replace(DEBUG, dim=0).problems() == ["dim is 0: it must be at least 1"]
    assert replace(SMALL, ffn_dim=0).problems() == ["ffn_dim is 0: it must be at least 1"]
