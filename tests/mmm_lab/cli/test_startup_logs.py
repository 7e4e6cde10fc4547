"""Start-up times from the logs of a study, and logs from which nothing can be read."""

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
