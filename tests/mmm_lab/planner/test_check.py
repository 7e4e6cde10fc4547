"""What is said of a layout that was run here: a rank whose memory is not as predicted is found among those that are."""

from dataclasses import replace

import pytest

from mmm_lab.planner.check import Checked, RankMemory, json_of, text_of
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.tracker import PARTS, MemoryPeak

PARTS_OF = dict.fromkeys(PARTS, 0) | {"parameters": 600_000, "activations": 400_000}


def checked(*measured):
    """Two pipeline ranks of 1,000,000 bytes by the dry run, and what each had."""
    peaks = {"start": MemoryPeak(9_000_000, PARTS_OF, "start", "forward")}
    peaks["step 1"] = MemoryPeak(1_000_000, PARTS_OF, "step 1", "backward")
    report = RankReport(0, "pp2", "cpu", "fp32", {"pp": 0}, (1, 1), peaks, [], 1.0)
    reports = [report, replace(report, rank=1, coordinates={"pp": 1})]
    formula = {"parameters": 600_000.0, "optimizer": 350_000.0}
    ranks = [RankMemory(rank, rank, PARTS_OF, size, "a count", formula) for rank, size in enumerate(measured)]
    return Checked(DryRun(2, reports), ranks, "launch …")


@pytest.mark.parametrize(
    ("measured", "right", "worst"),
    [((1_000_000, 1_020_000), True, 1), ((1_000_000, 960_000), False, 1), ((1_040_000, 1_000_000), False, 0)],
)
def test_the_worst_rank_decides(measured, right, worst):
    found = checked(*measured)
    assert found.right is right
    assert found.worst[1].rank == worst
    assert json_of(found)["right"] is right
    text = text_of(found)
    assert f"memory at the peak of rank {worst}, pp {worst}, MiB" in text
    assert ("MORE THAN" in text) is not right
    assert "optimizer state" in text
