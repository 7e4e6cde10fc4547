"""The log: one format, one line a message, rank 0 unless asked."""

import re
from pathlib import Path

import pytest

from mmm.runtime.log import get_logger, logging_to

LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]\[INFO\]\[test_log:\d+\]( ?\[rank \d\])? - iter=2 loss=10\.783049\n"
)


@pytest.mark.parametrize(("rank", "all_ranks", "lines"), [(0, False, 1), (1, False, 0), (1, True, 1)])
def test_format_and_ranks(capsys, tmp_path, rank, all_ranks, lines):
    with logging_to(rank, tmp_path / "log.txt", all_ranks) as log:
        log.info("iter=2 loss=10.783049")
    out = capsys.readouterr().out
    assert out.count("\n") == lines
    assert not lines or LINE.fullmatch(out)
    assert ("[rank 1]" in out) is (rank == 1 and all_ranks)
    if rank == 0:
        assert (tmp_path / "log.txt").read_text() == out
    else:
        assert not (tmp_path / "log.txt").exists()


def test_silent_outside(capsys):
    with logging_to(0):
        pass
    assert get_logger().handlers == []
    get_logger().info("nobody hears this")
    assert capsys.readouterr().out == ""


def test_a_full_disk_ends_the_file_and_not_the_run(capsys):
    with logging_to(0, Path("/dev/full")):
        for _ in range(3):
            get_logger().info("a line")
    out, err = capsys.readouterr()
    assert out.count("a line") == 3
    assert err == "/dev/full ends here: No space left on device\n"
