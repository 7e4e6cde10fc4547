"""The pictures of a search and of a dry run: nothing is cut, and what they show is what was found."""

import pytest

from mmm.history.plots.style import style
from mmm.machines.find import named
from mmm.plan.dry_run import DryRun, RankReport
from mmm.plan.dry_run_picture import _thinned, step_figure
from mmm.plan.named_model import read_model
from mmm.plan.pictures import SHARDING, frontier_figure, memory_figure, ranks_figure, sharding_figure
from mmm.plan.report import why_each
from mmm.plan.search import Search
from mmm.plan.tracker import PARTS, MemoryPeak, MemoryTimeline
from support.pictures import flaws

GIB, MIB = 2**30, 2**20


@pytest.fixture(
    scope="module",
    params=[("llama-8b", "perlmutter", 2), ("vit-base", "laptop", 1), ("gpt2", "polaris", 1), ("small", "polaris", 2)],
)
def searched(request):
    model, site, hosts = request.param
    search = Search(read_model(model, {}, 1024), named({}, site).changed({"hosts": hosts}), 16, "bf16")
    return search, search.run()


def test_nothing_is_cut(searched):
    search, found = searched
    with style("dark" if search.machine.hosts > 1 else "light"):
        figures = [memory_figure(search, why_each(found, search.machine.budget)), sharding_figure(search)]
        figures += [ranks_figure(search, found), frontier_figure(search, found)]
        assert [flaw for figure in figures if figure is not None for flaw in flaws(figure)] == []


def test_bars_are_of_the_moment_that_they_name(searched):
    """Each as long as the peak that the search has found."""
    search, found = searched
    axes = memory_figure(search, found.kinds[:5]).axes[0]
    rows = axes.texts[: len(found.kinds[:5])]
    for text, candidate in zip(rows, found.kinds, strict=False):
        assert text.get_text().strip(" »").startswith(f"{candidate.bytes / GIB:,.3g} GiB, at ")
    with_logits = [candidate.memory["logits"] > 0 for candidate in found.kinds[:5]]
    assert all(text.get_text().endswith("at the loss") for text, has in zip(rows, with_logits, strict=True) if has)


def test_each_stage_of_zero_keeps_less_beside_the_budget(searched):
    search, _ = searched
    figure = sharding_figure(search)
    if search.machine.ranks == 1:
        assert figure is None
        return
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(SHARDING.values())
    optimizer = [bar for bar in axes.patches if bar.get_facecolor()[:3] == pytest.approx((0, 0x9E / 255, 0x73 / 255))]
    widths = [bar.get_width() for bar in optimizer]
    assert widths[0] == pytest.approx(widths[1] * search.machine.ranks, rel=0.1)
    assert all(line.get_xdata()[0] == pytest.approx(search.machine.budget / GIB) for line in axes.lines)
    assert f"budget {search.machine.budget / GIB:,.1f} GiB" in " ".join(text.get_text() for text in axes.texts)


def test_ranks_of_one_host_are_its_devices():
    """More than a dot. Of a single device there is no curve."""
    spec = read_model("gpt2", {}, 256)
    search = Search(spec, named({}, "polaris").changed({"hosts": 1}), 16, "bf16")
    (_, predicted) = ranks_figure(search, search.run()).axes[0].lines
    assert predicted.get_xdata().tolist() == [1, 2, 4]
    alone = Search(spec, named({}, "polaris").changed({"hosts": 1, "ranks_per_host": 1}), 16, "bf16")
    assert ranks_figure(alone, alone.run()) is None


def report(rank, totals):
    parts = {part: [0] * len(totals) for part in PARTS}
    parts |= {"parameters": [10 * MIB] * len(totals), "activations": [(total - 10) * MIB for total in totals]}
    third = len(totals) // 3
    doing = ["forward"] * third + ["backward"] * third + ["forward"] * (len(totals) - 2 * third)
    timeline = MemoryTimeline("step 1", parts, doing)
    peak = MemoryPeak(max(totals) * MIB, dict.fromkeys(PARTS, 0), "step 1", "backward")
    return RankReport(rank, "pp2", "cpu", "fp32", {"pp": rank}, (1, 1), {"step 1": peak}, [], 0.1, timeline=timeline)


def test_memory_over_a_step():
    tops = [10 + abs(50 - abs(50 - place)) for place in range(100)]
    figure = step_figure(DryRun(2, [report(0, tops), report(1, [top // 2 + 10 for top in tops])]), 70 * MIB)
    assert flaws(figure) == []
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()  # one scale
    said = [text.get_text() for text in first.texts]
    assert "most: 60.00 MiB, backward" in said
    assert "budget 70.00 MiB " in said
    assert said[-3:] == ["forward", "backward", "optimizer"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["parameters", "activations"]
    assert flaws(step_figure(DryRun(2, [report(0, tops)]), 900 * MIB)) == []  # beyond the axis: not drawn


def test_the_peak_survives_thinning():
    total = [place % 97 for place in range(5000)]
    total[3333] = 1000
    kept = _thinned(total)
    assert len(kept) <= 1501
    assert max(total[place] for place in kept) == 1000
    assert kept == sorted(kept)
