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


def test_logs_as_megatron_deepspeed_names_them(tmp_path, capsys):
    """Model and ranks are in the path alone; a job that never began has no row."""
    folder = tmp_path / "gpt_SP_actCkpt_GPT1T_4L_z1_seqlen2048_mp8_pp2" / "logs"
    folder.mkdir(parents=True)
    began, never = (folder / f"user-x3004c0s13b0n0-nhosts4-ngpu16-2023-11-02-18332{n}.log" for n in (3, 4))
    never.write_text("Job started at: 2023-11-02-183324 on x3004c0s13b0n0\n")
    step = "[2023-11-02 18:33:50,122] [INFO] [logging.py:96:log_dist] [Rank 0] step=0, skipped=0, lr=[0.0, 0.0]"
    began.write_text(f"Job started at: 2023-11-02-183323 on x3004c0s13b0n0\n{step}\n")
    assert cli.main(["startup", str(began), str(never)]) == 0
    out, error = capsys.readouterr()
    (row,) = [line.split() for line in out.splitlines()[1:2]]
    assert (row[:2], row[6:]) == (["GPT1T_4L", "16"], ["27", began.name])
    assert error.startswith(f"left out: {never}: a job began")


def made_record(folder, **more):
    names = ("started", "began", "ready", "group", "model")
    marks = {name: [1e9 + second] * 2 for second, name in enumerate(names)}
    # One of the two ranks is a quarter of a second later.
    marks["first_step"] = [1e9 + 5, 1e9 + 5.25]
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


@pytest.mark.parametrize("name", ["GPT1T_4L_z1/a.log", "big/x-nhosts4-ngpu16-1.log"])
def test_a_path_that_does_not_say_model_and_ranks(tmp_path, capsys, name):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(LOG.format(day="2023-11-02", start="183323", stop="18:33:50"))
    assert cli.main(["startup", str(path)]) == 2
    assert "_MODEL_z1_" in capsys.readouterr().err


def test_picture(study, tmp_path, capsys):
    assert command.main([*study, "--out", str(tmp_path / "new" / "x.png")]) == 0
    assert (tmp_path / "new" / "x.png").read_bytes()[1:4] == b"PNG"
    assert cli.main(["startup", *study, "--out", str(tmp_path / "x.nope")]) == 2
    assert "nope" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert cli.main(["startup", *study, "--out", str(tmp_path / "file" / "x.png")]) == 2


def test_records(study, tmp_path, capsys):
    run = made_record(tmp_path / "run")
    assert command.main([run]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[0:2] == ["fsdp_tp", "2"]
    assert out.splitlines()[1].endswith(f" 5.25  {run}")
    assert "rank 1 on b, 5.25 s" in out
    assert command.main([run, *study]) == 0
    assert "first step" not in capsys.readouterr().out


def test_wrong_flags(capsys):
    assert cli.main(["startup"]) == 2
    assert "RUN|LOG" in capsys.readouterr().err
    assert cli.main(["startup", "no/such.log"]) == 2
    assert "no/such.log" in capsys.readouterr().err
