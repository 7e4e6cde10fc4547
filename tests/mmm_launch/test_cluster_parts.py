"""Binding, clocks, options, and what the hosts of a run are told."""

import os
import signal
import socket

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.host import agent
from mmm_launch.program.target import Target
from mmm_launch.run import backend
from mmm_launch.spec import binding, host_spec, hosts
from mmm_launch.spec import plan as planning
from mmm_launch.spec.options import LaunchOptions
from support.clock import PATIENCE, stretched
from support.launcher import SPAWNED_IN_LONG

WAITS = "open('ready-' + os.environ['RANK'], 'w')\n[time.sleep(0.05) for _ in range(600)]"


@pytest.fixture
def two_threads(tmp_path):
    """8 CPUs: cores 0-3 on two packages, CPU n and n + 4 are threads of one core."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def test_binding_gives_whole_cores(two_threads):
    assert binding.split("cores", 2, range(8), two_threads) == ["0,4,1,5", "2,6,3,7"]
    assert binding.split("cores", 3, range(8), two_threads) == ["0,4", "1,5", "2,6"]
    assert binding.split("list:0-1:4,6", 2, range(8), two_threads) == ["0-1", "4,6"]
    assert binding.split("none", 2, range(8), two_threads) == [None, None]


@pytest.mark.parametrize(
    ("bind", "ranks_here", "says"),
    [
        ("cores", 5, "this host: 5"),
        ("list:0:1", 3, "CPUs"),
        ("list:0:9", 2, "CPUs 9"),
        ("depth", 1, "knows none, cores"),
    ],
)
def test_binding_that_cannot_be(two_threads, bind, ranks_here, says):
    with pytest.raises(LaunchError, match=says):
        binding.split(bind, ranks_here, range(8), two_threads)


def test_a_rank_is_bound(launcher, launch_options):
    cpu = min(os.sched_getaffinity(0))
    launcher.write("t.py", "import os; print(os.sched_getaffinity(0), os.environ.get('MMM_CPUS'), os.environ['A'])")
    done = launcher.run(*launch_options, "-n", "1", "--cpu-bind", f"list:{cpu}", "--env", "A=b=c", "python3", "t.py")
    assert done.stdout == f"{{{cpu}}} None b=c\n"


def test_a_record_names_variables_and_tells_no_values(launcher):
    launcher.write("t.py", "import os\nprint(os.environ['MMM_LAUNCH_LINE'], os.environ['T'] == 's3cret')")
    argv = ("-n", "1", "--device", "cpu", "--env", "T=s3cret", "--env=U=s3cret=", "python3", "t.py", "--env", "x=1")
    done = launcher.run(*argv)
    assert done.stdout == "launch -n 1 --device cpu --env 'T=…' '--env=U=…' python3 t.py --env x=1 True\n"
    assert "s3cret" not in launcher.run("--dry-run", *argv).stdout


@SPAWNED_IN_LONG
def test_a_signal_for_the_program_is_passed_on(launcher, launch_options):
    handles = "import os, signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: os._exit(0))\n"
    process = launcher.begin(handles + WAITS, *launch_options)
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


@pytest.mark.long
def test_a_run_that_prints_nothing(launcher):
    launcher.write(
        "t.py",
        "import time\nfrom mmm.runtime.failure import first_failure\n"
        "for _ in range(4): time.sleep(0.4); print('x', flush=True)\n"
        "try: [time.sleep(0.05) for _ in range(6000)]\nfinally: open('told', 'w').write(str(first_failure()))\n",
    )
    seconds = f"{stretched(3):.0f}"
    done = launcher.run("-n", "3", "--timeout", seconds, "python3", "t.py", clocks={"GRACE": 80.0})
    assert (done.returncode, done.stdout) == (124, "x\n" * 12)
    assert done.stderr == f"launch: no output from any rank for {seconds} s (--timeout): ending 3 ranks\n"
    assert (launcher.folder / "told").read_text() == f"no output from any rank for {seconds} s (--timeout)"


def test_no_retry_after_a_signal_that_was_passed_on(launcher):
    """It came before the job's end, and the ranks have saved."""
    handles = "import os, signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
    process = launcher.begin(handles + WAITS, "--retries", "2", ranks=1)
    process.send_signal(signal.SIGUSR1)
    assert "starting again" not in process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 75


def test_retries(launcher):
    launcher.write("t.py", "import os, sys\nn = os.environ['MMM_ATTEMPT']\nprint(n)\nsys.exit(n != '1')")
    done = launcher.run("-n", "1", "--retries", "3", "python3", "t.py")
    assert (done.returncode, done.stdout) == (0, "0\n1\n")
    assert "launch: exit code 1: starting again (--retries; 2 left)" in done.stderr
    again = launcher.run("-n", "1", "--retries", "1", "python3", "-c", "import sys; sys.exit(7)")
    assert again.returncode == 7


def test_no_retry_after_a_users_error_or_a_signal(launcher):
    launcher.write("t.py", "from mmm.errors import ConfigError\nraise ConfigError('wrong')")
    done = launcher.run("-n", "1", "--retries", "2", "python3", "t.py")
    assert (done.returncode, done.stderr) == (2, "error: wrong\n")
    process = launcher.begin("import os, time\n" + WAITS, "--retries", "2", ranks=1)
    process.send_signal(signal.SIGTERM)
    assert "starting again" not in process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143


def host(place, name):
    return backend.Host(None, name, place, 31000 + place)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ab", [[0, 1], [2]]),
        # The launcher backend has an order of its own.
        ("ba", [[0], [1, 2]]),
        # Hosts were named by their addresses.
        ("xy", [[0, 1], [2]]),
    ],
)
def test_ranks_of_a_host_follow_each_other(monkeypatch, names, expected):
    told = []
    monkeypatch.setattr(backend.Backend, "tell", lambda self, host, message: told.append(message["go"]))
    spec = planning.plan(
        Target("module", "x"),
        LaunchOptions(hosts="a:2,b:1", scheduler="none"),
        environ={"MASTER_ADDR": "127.0.0.1"},
        version="HYDRA",
        build="cpu",
    )
    made = backend.Backend(spec)
    made.hosts_by_place = {place: host(place, name) for place, name in enumerate(names)}
    made.begin()
    assert [made.hosts_by_place[place].ranks for place in range(2)] == expected
    for command, ranks in zip(told, expected, strict=True):
        made_of_it = host_spec.make(Target("module", "x"), command, build="cpu")
        assert [rank["RANK"] for rank in made_of_it.ranks] == [str(rank) for rank in ranks]
        assert [rank["LOCAL_RANK"] for rank in made_of_it.ranks] == ["0", "1"][: len(ranks)]
        assert made_of_it.shared["LOCAL_WORLD_SIZE"] == str(len(ranks))
        # As rank 0's host says.
        assert made_of_it.shared["MASTER_PORT"] == "31000"


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("pals", {"PALS_RANKID": "5", "PMI_RANK": "4"}, 5),
        ("hydra", {"PMI_RANK": "1", "SLURM_PROCID": "0"}, 1),
        ("srun", {"SLURM_PROCID": "3", "PMI_RANK": "0"}, 3),
        ("openmpi", {"OMPI_COMM_WORLD_RANK": "2", "RANK": "9"}, 2),
    ],
)
def test_a_place_is_what_its_own_launcher_backend_says(monkeypatch, launcher, environ, expected):
    monkeypatch.setattr(os, "environ", environ)
    assert agent.own_place(launcher) == expected

    if launcher == "openmpi":
        with pytest.raises(LaunchError, match="PMI_RANK"):
            # Which says nothing.
            agent.own_place("hydra")


def test_is_here():
    own = socket.gethostname()
    assert hosts.is_here(own)
    assert hosts.is_here(f"{own.partition('.')[0]}.example.org")
    assert hosts.is_here("localhost")
    # As PBS names it on Sunspot.
    assert hosts.is_here(f"{own.partition('.')[0]}-hsn0.hsn.cm.example.org")
    assert not hosts.is_here("another-host")
    assert hosts.host_key("n-hsn12.example.org") == "n"
    assert hosts.host_key("rack-hsn0-n1") == "rack-hsn0-n1"


def test_a_script_has_its_whole_path_and_pythons_builtins(launcher, tmp_path):
    launcher.write("t.py", "import os\nos.chdir('/')\nprint(__builtins__.len([0]), os.path.exists(__file__))")
    for options in ([], ["--no-prefork"]):
        assert launcher.run(*options, "-n", "1", "python3", "t.py").stdout == "1 True\n"
