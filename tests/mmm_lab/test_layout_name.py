"""The name of a layout, taken apart; wrong ones are in the tests of who asks: mmm_lab.parity, mmm draw, mmm plan."""

import pytest

from mmm.layout import AXES, Layout
from mmm_lab.layout_name import parse_layout


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("1", {}),
        ("pp2·dp4·tp2", {"pp": 2, "dp_shard": 4, "tp": 2}),
        ("dp_replicate2,dp_shard=3, cp4", {"dp_replicate": 2, "dp_shard": 3, "cp": 4}),
        (" tp1*ep2.dp:4 ", {"tp": 1, "ep": 2, "dp_shard": 4}),
    ],
)
def test_sizes(name, sizes):
    assert parse_layout(name) == (sizes, [])


def test_what_a_layout_is_called_is_read_back():
    for layout in (
        Layout(dp_shard=1),
        Layout(2, 2, 4, 2, 2, ep=2),
        *(Layout(**{"dp_shard": 1, axis: 3}) for axis in AXES),
    ):
        assert Layout(**{"dp_shard": 1} | parse_layout(str(layout))[0]) == layout


def test_further_words():
    assert parse_layout("zero1.tp2", {"zero1": "dp_shard"}) == ({"tp": 2}, ["zero1"])
    assert parse_layout("zero1:8", {"zero1": "dp_shard"}) == ({"dp_shard": 8}, ["zero1"])
