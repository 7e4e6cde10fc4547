"""Start-up times from other programs' logs: hours, midnight, and logs from which nothing can be read."""

from datetime import datetime

import pytest

from mmm.cli.startup_logs import read_log
from mmm.errors import DataError

# A study of start-up: a job script writes the first line, the program the others.
STUDY = """\
model: GPT25B
Job started at: 2023-11-02-183323 on x3005c0s13b0n0
NGPUS=8 max_iters=1000 warmup_steps=100
[2023-11-02 18:33:31,004][INFO][train.py:12] - building model, world_size=8, steps: 1000
[2023-11-02 18:33:50,123][INFO][train.py:99] - step=1 loss=10.93 dt=4.1
[2023-11-02 18:33:52,008][INFO][train.py:99] - step=2 loss=10.42 dt=1.9
Job started at: 2023-11-02-185952 on x3005c0s13b0n0
world_size=64
[2023-11-02 19:00:46,900][INFO][train.py:99] - iter=0 loss=10.9
Job started at: 2023-11-02-235930 on x3005c0s13b0n0
WORLD_SIZE: 128
model_name=GPT1T
23:59:59 loading step files
00:00:31 iteration        1/   10000 | consumed samples: 128
Job started at: 2023-11-03-010000 on x3005c0s13b0n0
world_size=256
Killed before it had begun
"""


def read(folder, text, **given):
    (folder / "a.log").write_text(text)
    return read_log(folder / "a.log", **given)


def test_study(tmp_path):
    """The reference's study takes 190046 - 185952 = 4094 for seconds; they are 54."""
    (simple, hour, midnight), without = read(tmp_path, STUDY)
    assert without == 1
    assert (simple.model, simple.ranks, simple.seconds) == ("GPT25B", 8, 27)
    assert (hour.model, hour.ranks, hour.seconds) == ("GPT25B", 64, 54)
    assert (hour.start, hour.stop) == (datetime(2023, 11, 2, 18, 59, 52), datetime(2023, 11, 2, 19, 0, 46))
    assert (midnight.model, midnight.ranks, midnight.seconds) == ("GPT1T", 128, 61)
    assert midnight.stop == datetime(2023, 11, 3, 0, 0, 31)


@pytest.mark.parametrize(
    ("start", "line", "seconds"),
    [
        ("2023-11-02-183323", "[2023-11-02 18:33:50,123] step 1", 27),
        ("2023-11-02-183323", "2023-11-02T18:33:50.5 Iteration: 1 of 7", 27),
        ("2023-11-02-183323", "2023-11-02-183350 iter=0", 27),
        ("2023-12-31-235959", "00:00:01 step=1", 2),
        ("2024-02-28-235959", "[2024-02-29 00:00:09] step=1", 10),
        ("2023-11-02-185952", "19:00:46 | step: 0", 54),
        ("2023-11-02-000000", "step [1/10] 2023-11-03 00:00:00", 86400),
        ("2023-11-02-183323", "step=100000 loss=183324.123456 (18:33:25)", 2),
        ("2023-11-02-183323", "step=1 took 99:99:99, at 18:33:24", 1),
        ("2023-11-02 18:33:23", "18:33:23 step 1", 0),
    ],
)
def test_times(tmp_path, start, line, seconds):
    (found,) = read(tmp_path, f"Job started at: {start} on n1\nworld_size=2\n{line}\n").starts
    assert found.seconds == seconds


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("world_size=4", 4),
        ("WORLD_SIZE: 4", 4),
        ("NGPUS=12", 12),
        ("'world_size': 6", 6),
        ("4 ranks (launch)", 4),
        ("using 16 GPUs", 16),
        ("nranks=3", 3),
        ("ranks: 5", 5),
    ],
)
def test_ranks(tmp_path, line, ranks):
    text = f"Job started at: 2023-11-02-183323 on n1\n{line}\n18:33:24 step=1\n"
    assert read(tmp_path, text).starts[0].ranks == ranks
    assert read(tmp_path, text, ranks=99, model="mine").starts[0].ranks == 99
    assert read(tmp_path, text, model="mine").starts[0].model == "mine"
    assert read(tmp_path, text).starts[0].model == "-"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "none of its 0 lines is `Job started at"),
        ("18:33:24 step=1 world_size=4", "none of its 1 lines"),
        ("Job started at: 2023-11-02-183323 on n1\nsteps: 5 at 18:33:24\nstep=1 without a time\n", "no line after it"),
        ("Job started at: 2023-13-02-183323 on n1\n18:33:24 step=1", "is no time: month"),
        ("Job started at: 2023-11-02-183323 on n1\n18:33:24 step=1", r"how many ranks.*world_size=N.*--ranks N"),
        ("Job started at: 2023-11-02-183323 on n1\n2023-11-02 18:33:20 step=1", "lies before the start"),
    ],
)
def test_nothing_to_be_read(tmp_path, text, words):
    with pytest.raises(DataError, match=words) as raised:
        read(tmp_path, text)
    assert "a.log" in str(raised.value)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.log: No such file"):
        read_log(tmp_path / "none.log")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.log").write_bytes(b"\xff\xfe\nJob started at: 2023-11-02-183323 on n1\n18:33:24 step=1 4 ranks\n")
    assert read_log(tmp_path / "a.log").starts[0].seconds == 1
