"""Start-up times from the logs of a study, and logs from which nothing can be read."""

from datetime import datetime

import pytest

from mmm.errors import DataError
from mmm_lab.cli.startup_logs import read_log

STEP = "[{}] [INFO] [logging.py:96:log_dist] [Rank 0] step=0, skipped=0, lr=[0.0, 0.0]"


def read(folder, *lines):
    logs = folder / "gpt_SP_actCkpt_GPT1T_4L_z1_seqlen2048" / "logs"
    logs.mkdir(parents=True)
    path = logs / "user-x3004c0s13b0n0-nhosts4-ngpu16-2023-11-02-183323.log"
    path.write_text("\n".join(lines) + "\n")
    return read_log(path)


@pytest.mark.parametrize(
    ("start", "step", "seconds"),
    [
        ("2023-11-02-183323", "2023-11-02 18:33:50,123", 27),
        ("2023-11-02-185952", "2023-11-02 19:00:46,900", 54),  # and not 190046 - 185952 = 4094
        ("2023-12-31-235959", "2024-01-01 00:00:01,000", 2),
        ("2024-02-28-235959", "2024-02-29 00:00:09,000", 10),
    ],
)
def test_times(tmp_path, start, step, seconds):
    found = read(
        tmp_path, "before", f"Job started at: {start} on n1", "[2023-11-02 18:33:24,000] steps: 5", STEP.format(step)
    )
    assert found.seconds == seconds
    assert (found.model, found.ranks) == ("GPT1T_4L", 16)
    assert found.start == datetime.strptime(start, "%Y-%m-%d-%H%M%S")
    assert found.log == "user-x3004c0s13b0n0-nhosts4-ngpu16-2023-11-02-183323.log"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["", STEP.format("2023-11-02 18:33:50,123")], "no line is `Job started at"),
        (["Job started at: 2023-11-02-183323 on n1", "step=1 without a time"], "a job began"),
        (["Job started at: 2023-13-02-183323 on n1", STEP.format("2023-11-02 18:33:50,123")], "is no time"),
        (["Job started at: 2023-11-02-183323 on n1", STEP.format("2023-11-02 18:33:20,000")], "before the start"),
    ],
)
def test_nothing_to_be_read(tmp_path, lines, words):
    with pytest.raises(DataError, match=words) as raised:
        read(tmp_path, *lines)
    assert ".log" in str(raised.value)


@pytest.mark.parametrize("name", ["GPT1T_4L_z1/a.log", "big/x-nhosts4-ngpu16-1.log"])
def test_a_path_that_does_not_say_model_and_ranks(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text("Job started at: 2023-11-02-183323 on n1\n" + STEP.format("2023-11-02 18:33:50,123"))
    with pytest.raises(DataError, match="_MODEL_z1_"):
        read_log(path)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.log: No such file"):
        read_log(tmp_path / "none.log")
