"""What each rank has, as boxes: the numbers stand in colours of the ranks that they are from."""

from mmm.examples._support import collective_boxes
from mmm.history.plots.style import style
from support.pictures import flaws

RANKS = 3
FULL = [[10 * rank + place for place in range(RANKS)] for rank in range(RANKS)]
TOTAL = [sum(column) for column in zip(*FULL, strict=True)]
EVERYTHING = {
    "all_reduce": [(FULL[rank], TOTAL) for rank in range(RANKS)],
    "broadcast": [(FULL[0] if rank == 0 else [], FULL[0]) for rank in range(RANKS)],
    "all_to_all": [(FULL[rank], [row[rank] for row in FULL]) for rank in range(RANKS)],
}


def test_the_terminal_has_the_numbers_of_the_table_in_colours():
    for name, by_rank in EVERYTHING.items():
        text = collective_boxes.boxes(name, by_rank)
        shown = text.plain.splitlines()[1:]
        table = collective_boxes.drawn(name, by_rank).splitlines()[1:]
        assert [line.split() for line in shown] == [line.replace(" -", "").split() for line in table]
    colors = [
        str(span.style).rpartition(" ")[2]
        for span in collective_boxes.boxes("all_reduce", EVERYTHING["all_reduce"]).spans
    ]
    assert set(colors) >= set(collective_boxes.COLORS[:RANKS])


def test_picture(tmp_path):
    with style():
        figure = collective_boxes.figure_of(EVERYTHING)
    assert flaws(figure) == []
    boxes = figure.axes[0].patches
    singles = RANKS * RANKS + (1 + RANKS) * RANKS + 2 * RANKS * RANKS
    assert len(boxes) == singles + RANKS * RANKS * RANKS  # a sum has a stripe for each rank
    (file,) = collective_boxes.draw(EVERYTHING, tmp_path)
    assert file == tmp_path / "plots/mplot/pngs/collectives.png"
    many = [([rank], [rank]) for rank in range(9)]
    assert collective_boxes.draw({"all_gather": many}, tmp_path) == []  # more ranks than colours
