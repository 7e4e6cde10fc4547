"""A picture of a layout: well-formed, the same every time, inside its frame, legible; a piece that axes cut is one."""

import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from mmm.layout import Layout, Techniques
from mmm.palette import AXES_DARK, DARK, LIGHT
from mmm.parallel.collective_bytes import Call
from mmm.parallel.cp.ring import positions_of
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.held import HeldTensor, HeldTensors, Sharding, axis_of
from mmm_lab.planner.picture.facts import Facts
from mmm_lab.planner.picture.picture import picture
from mmm_lab.planner.picture.words import meaning
from mmm_lab.planner.sent_calls import SentCall

SVG = "{http://www.w3.org/2000/svg}"


def made_up(layout, module="w"):
    """Facts without a dry run: one matrix of 64 × 32, rows over dp_shard, columns over tp."""
    resolved = SimpleNamespace(techniques=Techniques(), sample=SimpleNamespace(shape=(2, 64)))
    held = HeldTensors(layout, resolved, "cpu", "fp32")
    shards = (Sharding(1, "tp", layout.tp), Sharding(0, "dp_shard", layout.dp_shard))
    local = (-(-64 // layout.dp_shard), 32 // layout.tp)
    held.modules = tuple(f"layers.{stage}" for stage in range(layout.pp)) if layout.pp > 1 else ()
    held.stages = tuple((module,) for module in held.modules)
    held.parameters.append(HeldTensor(f"layers.0.{module}.weight", (64, 32), shards, local))
    held.updated.append(HeldTensor("", (64, 32), shards, local, local[0] * local[1]))
    calls = [
        SentCall("step 1", "dp_shard", Call("all_gather", layout.dp_shard, 0, 8000), "forward"),
        SentCall("step 1", "tp", Call("all_reduce", layout.tp, 0, 1000), "forward"),
        SentCall("step 1", "dp_shard", Call("reduce_scatter", layout.dp_shard, 0, 8000), "backward"),
    ]
    if layout.pp > 1:
        calls.append(SentCall("step 1", "pp", Call("send", layout.pp, 0, 500, 1, 500), "forward"))
    reports = [RankReport(rank, held, {}, calls, 1.0) for rank in {0, layout.ranks // layout.pp * (layout.pp - 1)}]
    return Facts(DryRun(layout.ranks, reports))


# All ranks are drawn, or only the first of many.
FEW = made_up(Layout(dp_shard=2, tp=2))
MANY = made_up(Layout(dp_shard=256, tp=4))


# One rank, ranks in several rows, a mesh of three axes, and one of five with the long names of someone's program.
ALONE = made_up(Layout(dp_shard=1))
WRAPPED = made_up(Layout(dp_shard=16))
WIDE = made_up(Layout(4, 1, 2, 1, 2))
CROWDED = made_up(Layout(2, 2, 2, 2, 2), "attention_output_projection")
LONG_COMMAND = f"mmm draw /{'a_long_folder/' * 12}train.py"


def drawn(facts, width=680):
    """The elements of a picture, by tag: each with its attributes and text."""
    root = ET.fromstring(picture(facts, LONG_COMMAND, width))
    return lambda tag: list(root.iter(f"{SVG}{tag}"))


def number(element, name):
    return float(element.get(name))


@pytest.mark.parametrize("width", [390, 680, 1280])
@pytest.mark.parametrize("facts", [FEW, MANY, ALONE, WRAPPED, WIDE, CROWDED], ids=lambda facts: str(facts.layout))
def test_everything_is_inside_and_legible(facts, width):
    """An average character is at least half as wide as high. Texts of a card stay on it."""
    find = drawn(facts, width)
    (ground, *rects), texts = find("rect"), find("text")
    cards = [rect for rect in rects if rect.get("rx")]
    for rect in rects:
        assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= width + 0.01
        assert 0 <= number(rect, "y") + number(rect, "height") <= number(ground, "height")
    for text in texts:
        x, y, size = (number(text, name) for name in ("x", "y", "font-size"))
        # Pixels that the text takes at least.
        long = 0.5 * size * len(text.text)
        assert size >= 11
        assert y < number(ground, "height")
        if text.get("text-anchor") == "end":
            x -= long
        assert 0 <= x <= x + long <= width
        for card in cards:
            left = number(card, "x")
            top = number(card, "y")
            if left < x < left + number(card, "width") and top < y < top + number(card, "height"):
                assert x + long < left + number(card, "width"), text.text


@pytest.mark.parametrize(("width", "columns"), [(390, 1), (680, 2)])
def test_cards_are_a_grid_and_stacked_where_it_is_narrow(width, columns):
    cards = [rect for rect in drawn(FEW, width)("rect") if rect.get("rx")]
    assert len(cards) == 4
    assert len({rect.get("x") for rect in cards}) == columns
    assert len({rect.get("y") for rect in cards}) == 4 // columns


def test_a_piece_that_two_axes_cut_is_one_rectangle_in_both_colours():
    """The matrix of 64 × 32 is cut in four: each rank has one piece, of a quarter of the outline, in its own place."""
    find = drawn(FEW)
    (stripes,) = find("linearGradient")
    assert {stop.get("class") for stop in stripes} == {"dp_shard", "tp"}
    assert f".{stripes.get('id')}{{fill:url(#{stripes.get('id')})}}" in [style.text for style in find("style")]
    striped = [rect for rect in find("rect") if rect.get("class") == stripes.get("id")]
    # weight, gradient, optimizer state
    assert len(striped) == 4 * 3
    outlines = [rect for rect in find("rect") if rect.get("class") == "idle"][:1]
    area = number(outlines[0], "width") * number(outlines[0], "height")
    for piece in striped:
        assert number(piece, "width") * number(piece, "height") == pytest.approx(area / 4, rel=0.01)
    assert len({FEW.grids(rank)[0].pieces for rank in range(4)}) == 4


def luminance(color):
    """WCAG's relative luminance."""
    channels = [int(color[position : position + 2], 16) / 255 for position in (1, 3, 5)]
    # sRGB's curve.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", AXES_DARK.values(), ids=AXES_DARK)
@pytest.mark.parametrize("ground", [DARK.paper, DARK.idle])
def test_each_axis_stands_out_from_the_dark(color, ground):
    # WCAG's bound for text.
    assert (luminance(color) + 0.05) / (luminance(ground) + 0.05) >= 4.5


def test_svg_is_the_same_every_time_and_says_what_it_is():
    made = picture(FEW, "mmm draw <a & b>", 680)
    assert made == picture(FEW, "mmm draw <a & b>", 680)
    root = ET.fromstring(made)
    assert root.find(f"{SVG}title").text == "dp2·tp2, 4 ranks, fsdp"
    assert [text.text for text in root.iter(f"{SVG}text")][-1] == "mmm draw <a & b>"
    odd = ET.fromstring(picture(FEW, "mmm draw 'a\x1b\x00\udcff'", 680))
    assert [text.text for text in odd.iter(f"{SVG}text")][-1] == "mmm draw 'a\\x1b\\x00\\udcff'"


def test_colours_follow_the_reader_s_setting():
    light, _, dark = picture(FEW, "", 680).partition("@media (prefers-color-scheme:dark)")
    assert LIGHT.ink in light
    assert DARK.ink not in light
    assert AXES_DARK["dp_shard"] not in light
    assert DARK.ink in dark


def test_what_hybrid_data_parallel_shards_has_both_axes():
    facts = made_up(Layout(dp_replicate=2, dp_shard=2))
    assert {facts.batch(rank).axes for rank in range(4)} == {("dp_replicate", "dp_shard")}
    assert [facts.batch(rank).pieces[0][0] for rank in range(4)] == [0, 2, 4, 6]


def test_gradients_are_of_the_backward_also_between_forwards():
    """A stage of several sums the gradients of one while another is in its forward."""
    facts = made_up(Layout(dp_shard=2, tp=2))
    for axis, operation in (("dp_shard", "reduce_scatter"), ("tp", "reduce_scatter")):
        facts.dry.ranks[0].calls.insert(0, SentCall("step 1", axis, Call(operation, 2, 0, 8000), "forward"))
    parts = {(flow.axis, flow.operation, flow.doing) for flow in facts.flows(0)}
    assert ("tp", "reduce_scatter", "forward") in parts
    assert ("dp_shard", "reduce_scatter", "forward") not in parts


def test_what_an_all_reduce_of_tp_is_for():
    """It sums activations without sequence parallelism, and else only the parts of the loss."""
    facts = made_up(Layout(dp_shard=2, tp=2))
    (flow,) = [flow for flow in facts.flows(0) if flow.axis == "tp"]
    assert meaning(facts, flow).startswith("activations, summed")
    assert "the loss" in meaning(facts, flow)


def test_axes_have_the_names_of_the_layout():
    """Whatever a program calls them: by the ranks of their groups."""
    layout = Layout(pp=2, dp_shard=2, cp=2, tp=2)
    of = {"tp": (0, 1), "cp": (0, 2), "dp_shard": (0, 4), "dp_shard_cp": (0, 2, 4, 6), "pp": (0, 8)}
    assert {axis_of("mine", ranks, layout): ranks for ranks in of.values()} == of
    assert axis_of("dp_cp", (0, 2), Layout(dp_shard=2, tp=2)) == "dp_shard"
    assert axis_of("expert_dp", (0, 2), Layout(dp_shard=2, tp=2)) == "expert_dp"


def test_samples_and_tokens_are_shared_out_once():
    facts = made_up(Layout(dp_shard=2, cp=2))
    seen = []
    for rank in range(4):
        for top, left, rows, columns in facts.batch(rank).pieces:
            seen += [(s, t) for s in range(top, top + rows) for t in range(left, left + columns)]
            assert set(range(left, left + columns)) <= {*positions_of(rank % 2, 2, 64).tolist()}
    # Four samples of 64 tokens.
    assert sorted(seen) == [(s, t) for s in range(4) for t in range(64)]


def test_of_many_ranks_the_first_are_drawn():
    texts = [text.text for text in drawn(MANY)("text")]
    assert [text for text in texts if re.fullmatch(r"rank \d+", text)] == [f"rank {n}" for n in range(16)]
    assert any(text.startswith("Ranks 0 to 15 of 1,024") for text in texts)


def test_what_is_sent_has_a_part_for_each_part_of_a_step():
    texts = [text.text for text in drawn(FEW)("text")]
    table = texts[texts.index("Forward") :]
    assert table.index("1 × all-gather over dp_shard") < table.index("Backward")
    assert table.index("Backward") < table.index("1 × reduce-scatter over dp_shard") < table.index("Optimizer step")
    assert table.index("Optimizer step") < table.index("nothing")
    # Of 8,000 bytes that two ranks gather, each sends half in a ring.
    assert table[table.index("1 × all-gather over dp_shard") + 1] == "3.91 KiB"
    assert table[table.index("1 × all-gather over dp_shard") + 2].startswith("ranks 0 2: ")


@pytest.mark.parametrize(("width", "rows"), [(680, 3), (1280, 1)])
def test_the_parts_of_a_step_are_side_by_side_where_there_is_room(width, rows):
    headings = [text for text in drawn(FEW, width)("text") if text.text in ("Forward", "Backward", "Optimizer step")]
    assert len({text.get("y") for text in headings}) == rows
