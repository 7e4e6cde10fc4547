"""A picture of a layout: well-formed, reproducible, inside its frame, arrows as wide as the bytes."""

import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from mmm.layout import Layout, Techniques
from mmm.palette import AXES, DARK, LIGHT
from mmm.parallel.collective_bytes import Call
from mmm.parallel.cp.ring import positions_of
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.held import HeldTensor, HeldTensors, Sharding, axis_of
from mmm_lab.planner.picture.arrange import THICK, Arrangement
from mmm_lab.planner.picture.cards import filled, shade
from mmm_lab.planner.picture.compose import MARGIN, WIDTH, picture
from mmm_lab.planner.picture.facts import Facts, Shard
from mmm_lab.planner.picture.scene import Line, Polygon, Rect, Text, text_width
from mmm_lab.planner.picture.svg import svg
from mmm_lab.planner.picture.words import meaning
from mmm_lab.planner.sent_calls import SentCall

SVG = "{http://www.w3.org/2000/svg}"


def made_up(layout):
    """Facts without a dry run: one matrix of 64 × 32, rows over dp_shard, columns over tp."""
    resolved = SimpleNamespace(techniques=Techniques(), sample=SimpleNamespace(shape=(2, 64)))
    held = HeldTensors(layout, resolved)
    shards = (Sharding(1, "tp", layout.tp), Sharding(0, "dp_shard", layout.dp_shard))
    local = (-(-64 // layout.dp_shard), 32 // layout.tp)
    held.modules = tuple(f"layers.{at}" for at in range(layout.pp)) if layout.pp > 1 else ()
    held.stages = tuple((module,) for module in held.modules)
    held.parameters.append(HeldTensor("layers.0.w.weight", (64, 32), shards, local))
    held.updated.append(HeldTensor("", (64, 32), shards, local, local[0] * local[1]))
    calls = [
        SentCall("step 1", "dp_shard", Call("all_gather", layout.dp_shard, 0, 8000), "forward"),
        SentCall("step 1", "tp", Call("all_reduce", layout.tp, 0, 1000), "forward"),
        SentCall("step 1", "dp_shard", Call("reduce_scatter", layout.dp_shard, 0, 8000), "backward"),
    ]
    if layout.pp > 1:
        calls.append(SentCall("step 1", "pp", Call("send", layout.pp, 0, 500, 1, 500), "forward"))
    reports = [
        RankReport(rank, held, "cpu", "fp32", (), {}, calls, 1.0)
        for rank in {0, layout.ranks // layout.pp * (layout.pp - 1)}
    ]
    return Facts(DryRun(layout.ranks, reports))


FEW, MANY = made_up(Layout(dp_shard=2, tp=2)), made_up(Layout(dp_shard=256, tp=4))


ALONE, WRAPPED, WIDE = (made_up(each) for each in (Layout(dp_shard=1), Layout(dp_shard=16), Layout(4, 1, 2, 1, 2)))


@pytest.mark.parametrize("facts", [FEW, MANY, ALONE, WRAPPED, WIDE], ids=lambda facts: str(facts.layout))
def test_everything_is_inside(facts):
    scene = picture(facts, "mmm draw")
    for item in scene.items:
        if isinstance(item, Rect):
            xs, ys = (item.x, item.x + item.width), (item.y, item.y + item.height)
        elif isinstance(item, Polygon):
            xs, ys = zip(*item.points, strict=True)
        elif isinstance(item, Line):
            xs, ys = (item.x1, item.x2), (item.y1, item.y2)
        else:
            width = text_width(item.text, item.size, item.bold)
            left = item.x - {"start": 0, "middle": 0.5, "end": 1}[item.anchor] * width
            xs, ys = (left, left + width), (item.y - item.size, item.y)
        assert 0 <= min(xs) <= max(xs) <= scene.width, item
        assert 0 <= min(ys) <= max(ys) <= scene.height, item


def test_svg_is_the_same_every_time_and_says_what_it_is():
    scene = picture(FEW, "mmm draw <a & b>")
    text = svg(scene)
    assert text == svg(picture(FEW, "mmm draw <a & b>"))
    root = ET.fromstring(text)
    assert root.find(f"{SVG}title").text == "FSDP (ZeRO-3) × tensor parallel: dp2·tp2, 4 ranks"
    assert "all-gather over dp_shard" in root.find(f"{SVG}desc").text
    assert [each.text for each in root.iter(f"{SVG}text")][-1] == "mmm draw <a & b>"
    odd = ET.fromstring(svg(picture(FEW, "mmm draw 'a\x1b\x00\udcff'")))
    assert [each.text for each in odd.iter(f"{SVG}text")][-1] == "mmm draw 'a\\x1b\\x00\\udcff'"


def test_a_picture_that_is_wider():
    scene = picture(WIDE, "")
    assert scene.title == "Pipeline × FSDP (ZeRO-3) × tensor parallel: pp4·dp2·tp2, 16 ranks"
    assert scene.width > WIDTH
    assert max(item.x for item in scene.items if isinstance(item, Text) and item.y == 36) == scene.width - MARGIN


def test_themes():
    scene = picture(FEW, "")
    auto, light, dark = (svg(scene, theme) for theme in ("auto", "light", "dark"))
    assert "prefers-color-scheme: dark" in auto
    assert DARK.ink in auto
    assert "<style>" not in light + dark
    assert DARK.ink not in light
    assert LIGHT.ink not in dark


def test_arrows_are_as_wide_as_the_bytes():
    arranged = Arrangement(FEW, range(4), 900, 0, 0)
    over_dp, over_tp = FEW.sent(0)["dp_shard"], FEW.sent(0)["tp"]
    assert (over_dp, over_tp) == (8000, 1000)
    assert arranged.line(over_dp) == THICK
    assert arranged.line(over_tp) == THICK / 8
    arrows = {item.fill for item in arranged.items() if isinstance(item, Polygon) and len(item.points) > 4}
    assert arrows == {AXES["dp_shard"], AXES["tp"]}


def test_ranks_of_ep_are_beside_and_of_expert_dp_below():
    cells = Arrangement(made_up(Layout(dp_shard=4, ep=2)), range(4), 912, 0, 0).cells
    assert cells == {0: (0, 0, 0), 1: (0, 0, 1), 2: (0, 1, 0), 3: (0, 1, 1)}


def test_what_hybrid_data_parallel_shards_has_both_colours():
    """Samples are shared out over both axes, each with as many shades as the legend has."""
    facts = made_up(Layout(dp_replicate=2, dp_shard=2))
    assert [facts.batch(rank)[0].shards for rank in (0, 3)] == [
        (Shard("dp_replicate", 0, 2), Shard("dp_shard", 0, 2)),
        (Shard("dp_replicate", 1, 2), Shard("dp_shard", 1, 2)),
    ]
    assert [facts.batch(rank)[0].top for rank in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_colours_of_several_axes_fill_the_part(count):
    parts = filled([Shard(axis, 0, 2) for axis in list(AXES)[:count]], 1, 2, 10, 4)
    assert len({part.fill for part in parts}) == count

    assert sum(part.width * part.height for part in parts) == pytest.approx(40)


def test_gradients_are_of_the_backward_also_between_forwards():
    """A stage of several sums the gradients of one while another is in its forward."""
    facts = made_up(Layout(dp_shard=2, tp=2))
    for axis, operation in (("dp_shard", "reduce_scatter"), ("tp", "reduce_scatter")):
        facts.dry.ranks[0].calls.insert(0, SentCall("step 1", axis, Call(operation, 2, 0, 8000), "forward"))
    parts = {(flow.axis, flow.operation, flow.doing) for flow in facts.flows(0)}
    assert ("tp", "reduce_scatter", "forward") in parts
    assert ("dp_shard", "reduce_scatter", "forward") not in parts


def test_what_an_all_reduce_of_tp_is_for():
    """Without sequence parallelism it sums activations, of images as of text."""
    facts = made_up(Layout(dp_shard=2, tp=2))
    (flow,) = [flow for flow in facts.flows(0) if flow.axis == "tp"]
    assert meaning(facts, flow).startswith("activations: summed")
    facts.dry.ranks[0].calls.insert(0, SentCall("step 1", "tp", Call("reduce_scatter", 2, 0, 8000), "forward"))
    assert meaning(facts, flow).startswith("the loss")


def test_axes_have_the_names_of_the_layout():
    """Whatever a program calls them: by the ranks of their groups."""
    layout = Layout(pp=2, dp_shard=2, cp=2, tp=2)
    of = {"tp": (0, 1), "cp": (0, 2), "dp_shard": (0, 4), "dp_shard_cp": (0, 2, 4, 6), "pp": (0, 8)}
    assert {axis_of("mine", ranks, layout): ranks for ranks in of.values()} == of
    assert axis_of("dp_cp", (0, 2), Layout(dp_shard=2, tp=2)) == "dp_shard"
    assert axis_of("expert_dp", (0, 2), Layout(dp_shard=2, tp=2)) == "expert_dp"


def test_the_same_color_is_the_same_part():
    seen = {}
    for rank in range(4):
        grid = FEW.grids(rank)[0]
        look = tuple((item.fill, item.opacity) for item in filled(grid.shards, 0, 0, 1, 1))
        seen.setdefault(look, set()).add((grid.top, grid.left))
    assert len(seen) == 4
    assert all(len(parts) == 1 for parts in seen.values())
    assert [shade(Shard("tp", at, 3)) for at in range(3)] == [1.0, pytest.approx(0.71), pytest.approx(0.42)]


def test_samples_and_tokens_are_shared_out_once():
    facts, seen = made_up(Layout(dp_shard=2, cp=2)), []
    for rank in range(4):
        for piece in facts.batch(rank):
            seen += [(s, t) for s in range(piece.top, piece.bottom) for t in range(piece.left, piece.right)]
            assert set(range(piece.left, piece.right)) <= {*positions_of(rank % 2, 2, 64).tolist()}
    assert sorted(seen) == [(s, t) for s in range(4) for t in range(64)]


def test_of_many_ranks_the_first_are_drawn():
    texts = [item.text for item in picture(MANY, "").items if isinstance(item, Text)]
    assert [text for text in texts if re.fullmatch(r"rank \d+", text)] == [f"rank {n}" for n in range(16)]
    assert any(text.startswith("Ranks 0 to 15 of 1,024.") for text in texts)


def test_what_is_sent_has_a_column_for_each_part_of_a_step():
    texts = [item.text for item in picture(FEW, "").items if isinstance(item, Text)]
    table = texts[texts.index("forward") :]
    assert table.index("all-gather") < table.index("backward") < table.index("reduce-scatter")
    assert table.index("optimizer step") < table.index("nothing travels")
