"""What launch says when it is asked for what cannot be, before anything is started."""

import re
import socket

import pytest

from mmm_launch import main
from mmm_launch.spec.options import parse

# Options that cannot be, and what is said of them.
OPTIONS = [
    ("-ppn x", "-ppn/--ppn: x is not a whole number, at least 1"),
    ("-N 0", "-N/--nhosts: 0 is not a whole number"),
    ("-N 2", "-N 2: number of hosts listed: 1"),
    ("--site x", "launch itself starts ranks on this host"),
    ("--mpi hydra", "--mpi is for runs on"),
    ("--env A", "--env: A is not NAME=VALUE"),
    ("--env RANK=1", "RANK"),
    ("--timeout 0", "--timeout: 0 "),
    ("--retries -1", "--retries: -1 "),
    ("--hostfile no", "--hostfile"),
    ("--scheduler pbs", "not inside a pbs job"),
    ("--hosts a,,b", "'' is not a host name"),
    ("--cpu-bind list:0:0 -n 3", "lists of CPUs: 2"),
    ("--launcher-args '", "--launcher-args"),
    ("--elastic 8", "--elastic: 8 is not MIN:MAX"),
    ("--elastic 2:many", "--elastic: 2:many is not MIN:MAX"),
    ("--elastic 8:2", "--elastic: 8:2 is not MIN:MAX"),
    ("--elastic 0:2", "--elastic: 0:2 is not MIN:MAX"),
    ("--elastic 1:9999", "9999 ranks on a host"),
    ("--elastic 2:8 -n 4", "-n 4 --elastic 2:8"),
    ("--spare-hosts a", "--spare-hosts needs --retries N or --elastic MIN:MAX"),
    ("--elastic 2:8 --spare-hosts a", "--spare-hosts is for runs on named hosts"),
    (
        "--elastic 2:8 --hosts a,b --spare-hosts b --mpi hydra --mpiexec true",
        "--spare-hosts b: b is to have ranks from the beginning",
    ),
]
# Variables that launch sets for its ranks.
OURS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MMM_DEVICE", "OMP_NUM_THREADS")


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Runs `launch` on words in an empty folder: its exit code and what it says on stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('this was run')")
    for name in OURS:
        monkeypatch.delenv(name, raising=False)

    def run(line):
        code = main.main(line.split())
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no command"),
        ("-n 2", "no command"),
        ("-n 2 --", "no command"),
        ("-n 0 python3 train.py", "-n/--nproc: 0 "),
        ("-n -3 python3 train.py", "-n/--nproc: -3 "),
        ("-n four python3 train.py", "-n/--nproc: four "),
        ("-n python3 train.py", "python3"),
        ("--nproc=1.5 python3 train.py", "1.5"),
        ("-n 99999 python3 train.py", "from 1 to 4096"),
        ("-n 2 --nproc 3 python3 train.py", "--nproc: it is given twice"),
        ("--hosts a --hosts b python3 train.py", "--hosts: it is given twice"),
        ("--hostfile $NO_SUCH_FOLDER/hosts python3 train.py", "$NO_SUCH_FOLDER is not set"),
        ("--device gpu python3 train.py", "invalid choice: 'gpu' (choose from"),
        ("--nproc-per-node 4 python3 train.py", "--nproc-per-node"),
        ("-np 4 python3 train.py", "-n/--nproc: p "),
        ("--dryrun python3 train.py", "--dryrun. Did you mean --dry-run?"),
        ("--what python3 train.py", "CMD"),
        ("-n 2 -m train", "arguments: -m. launch's options come before CMD"),
        ("python3 trian.py", "trian.py"),
        ("python3 -m trian", "trian"),
        ("no-such-program", "PATH"),
        *((f"{options} --device cpu python3 train.py", says) for options, says in OPTIONS),
    ],
)
def test_refusals(say, line, says):
    code, err = say(line)
    assert code == 2
    assert err.startswith("launch: error: ")
    assert says in err
    assert "Traceback" not in err
    assert err.count("launch: error") == 1


def test_a_master_port_that_is_in_use_or_none(say, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        code, err = say("python3 train.py")
        assert code == 2
        assert f"127.0.0.1:{port}: Address already in use" in err
        assert "MASTER_PORT" in err

    for value in ("http", "0", "70000", "-1"):
        monkeypatch.setenv("MASTER_PORT", value)
        code, err = say("python3 train.py")
        assert code == 2
        assert f"MASTER_PORT={value} in the environment is not a port" in err


def test_options_after_the_command_are_the_commands():
    options = parse(["-n", "2", "python3", "t.py", "-n", "3", "--dry-run"])
    assert (options.nproc, options.dry_run) == (2, False)
    assert options.command == ["python3", "t.py", "-n", "3", "--dry-run"]
    options = parse(["-n4", "--device=cpu", "--", "-odd"])
    assert (options.nproc, options.device, options.command) == (4, "cpu", ["-odd"])
    assert parse(["--launcher-args=--oversubscribe -v", "true"]).launcher_args == ["--oversubscribe", "-v"]


def test_dry_run_says_everything_and_starts_nothing(say, capsys, monkeypatch):
    code = main.main(["-n", "3", "--device", "cpu", "--dry-run", "python3", "train.py", "--lr", "0.1"])
    out = capsys.readouterr().out
    assert code == 0
    for phrase in (
        "3, 3 a host   (-n)",
        "train.py --lr 0.1",
        "prefork: one process imports",
        "127.0.0.1:",
        "cpu   (--device)",
    ):
        assert phrase in out
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    main.main(["-n", "3", "--no-prefork", "--dry-run", "python3", "train.py"])
    out = capsys.readouterr().out
    assert "spawn: --no-prefork" in out
    assert re.search(r"OMP_NUM_THREADS +7   \(set in the environment\)", out)
