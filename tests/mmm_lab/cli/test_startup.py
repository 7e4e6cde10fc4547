"""``mmm startup`` as a command: the table, the picture, and what is refused."""

import json

import pytest

from mmm_lab.cli import main as cli
from mmm_lab.cli import startup as command

LOG = """\
Job started at: {day}-{start} on x3005c0s13b0n0
[{day} {stop},123][INFO][train.py:99] - step=1 loss=10.93
"""


def log(folder, name, model, ranks, start, stop):
    path = folder / f"{model}_z1" / f"{name}-nhosts1-ngpu{ranks}-.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text(LOG.format(day="2023-11-02", start=start, stop=stop))
    return str(path)


@pytest.fixture
def study(tmp_path):
    return [
        log(tmp_path, "b", "GPT25B", 16, "185952", "19:00:46"),
        log(tmp_path, "a", "GPT25B", 8, "183323", "18:33:50"),
        log(tmp_path, "c", "GPT1T", 8, "120000", "12:01:10"),
    ]


def made_record(folder, **more):
    marks = {
        "started": [1e9] * 2,
        "began": [1e9 + 1] * 2,
        "ready": [1e9 + 2] * 2,
        "group": [1e9 + 3] * 2,
        "model": [1e9 + 4] * 2,
        "first_step": [1e9 + 5, 1e9 + 5.25],
    }
    startup = {"started_from": "launch", "marks": marks, "imports": {"shared": {}, "ranks": [{}, {}]}}
    folder.mkdir()
    config = {"module": "fsdp_tp", "ranks": [{"host": "a"}, {"host": "b"}], "startup": startup} | more
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_table_of_logs(study, capsys):
    assert command.main(study) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["model", "ranks", "start", "stop", "seconds", "log"],
        ["GPT1T", "8", "2023-11-02", "12:00:00", "2023-11-02", "12:01:10", "70", "c-nhosts1-ngpu8-.log"],
        ["GPT25B", "8", "2023-11-02", "18:33:23", "2023-11-02", "18:33:50", "27", "a-nhosts1-ngpu8-.log"],
        ["GPT25B", "16", "2023-11-02", "18:59:52", "2023-11-02", "19:00:46", "54", "b-nhosts1-ngpu16-.log"],
    ]


def test_a_study_of_119_logs_is_one_table(tmp_path, capsys):
    """Named as Megatron-DeepSpeed's job scripts name them: model and ranks are in the path alone; some never began."""
    models, paths = ("SP_actCkpt_GPT125M", "actCkpt_GPT1T_4L", "GPT2_7B"), []
    for number in range(119):
        hosts, start = 2 ** (number % 4), f"{10 + number // 60:02}{number % 60:02}30"
        folder = tmp_path / f"gpt_{models[number % 3]}_z1_seqlen2048_mp8_pp2_sp1_nl4_hs25600_gb16_mb1" / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"user-x3004c0s13b0n0-nhosts{hosts}-ngpu{4 * hosts}-2023-11-02-{start}.log"
        stop = f"{10 + (number + 1) // 60:02}:{(number + 1) % 60:02}:{number % 60:02},122"  # of the next minute
        step = f"[2023-11-02 {stop}] [INFO] [logging.py:96:log_dist] [Rank 0] step=0, skipped=0, lr=[0.0, 0.0]"
        path.write_text(f"Job started at: 2023-11-02-{start} on x3004c0s13b0n0\n{step if number else ''}\n")
        paths.append(str(path))
    assert cli.main(["startup", *paths]) == 0
    out, error = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[1:119]]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert {row[0] for row in rows} == {"GPT125M", "GPT1T_4L", "GPT2_7B"}
    assert {row[1] for row in rows} == {"4", "8", "16", "32"}
    assert len({row[7] for row in rows}) == 118  # of each its log
    by_log = {row[7]: row for row in rows}
    assert by_log["user-x3004c0s13b0n0-nhosts8-ngpu32-2023-11-02-105930.log"][6] == "89"  # 10:59:30 to 11:00:59
    assert error.startswith(f"left out: {paths[0]}: a job began")


def test_picture(study, tmp_path, capsys):
    assert command.main([*study, "--png", str(tmp_path / "new" / "x.png")]) == 0
    assert (tmp_path / "new" / "x.png").read_bytes()[1:4] == b"PNG"
    assert cli.main(["startup", *study, "--png", str(tmp_path / "x.nope")]) == 2
    assert "nope" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert cli.main(["startup", *study, "--png", str(tmp_path / "file" / "x.png")]) == 2


def test_records(study, tmp_path, capsys):
    run = made_record(tmp_path / "run")
    assert command.main([run]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[0:2] == ["fsdp_tp", "2"]
    assert out.splitlines()[1].endswith(f" 5.25  {run}")
    assert "rank 1 on b: 5.25 s" in out
    assert command.main([run, *study]) == 0
    assert "first step" not in capsys.readouterr().out


def test_wrong_flags(capsys):
    assert cli.main(["startup"]) == 2
    assert "RUN|LOG" in capsys.readouterr().err
    assert cli.main(["startup", "no/such.log"]) == 2
    assert "no/such.log" in capsys.readouterr().err
