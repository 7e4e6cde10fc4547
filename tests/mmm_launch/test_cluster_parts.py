"""Binding, clocks, options, and what the hosts of a run are told."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mmm_launch import main
from mmm_launch.errors import LaunchError
from mmm_launch.host import agent
from mmm_launch.program.target import Target
from mmm_launch.run import backend, stacks
from mmm_launch.spec import binding, host_spec, hosts, walltime
from mmm_launch.spec.hosts import Job
from mmm_launch.spec.launch_spec import LaunchSpec, Value
from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG


def test_cpu_lists():
    assert binding.cpu_list("0-3,8") == [0, 1, 2, 3, 8]
    assert binding.as_text([8, 3, 2, 1, 0]) == "0-3,8"


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
    assert binding.split("cores", 2, range(8), two_threads) == ["0-1,4-5", "2-3,6-7"]
    assert binding.split("cores", 3, range(8), two_threads) == ["0,4", "1,5", "2,6"]
    assert binding.split("list:0-1:4,6", 2, range(8), two_threads) == ["0-1", "4,6"]
    assert binding.split("none", 2, range(8), two_threads) == [None, None]


@pytest.mark.parametrize(
    ("bind", "ranks_here", "says"),
    [
        ("cores", 5, "5 ranks"),
        ("list:0:1", 3, "CPUs"),
        ("list:0:9", 2, "CPUs 9"),
        ("depth", 1, "knows none, cores"),
    ],
)
def test_binding_that_cannot_be(two_threads, bind, ranks_here, says):
    with pytest.raises(LaunchError, match=says):
        binding.split(bind, ranks_here, range(8), two_threads)


def test_a_rank_is_bound(launcher, how):
    cpu = min(os.sched_getaffinity(0))
    launcher.write("t.py", "import os; print(os.sched_getaffinity(0), os.environ.get('MMM_CPUS'), os.environ['A'])")
    done = launcher.run(*how, "-n", "1", "--cpu-bind", f"list:{cpu}", "--env", "A=b=c", "python3", "t.py")
    assert done.stdout == f"{{{cpu}}} None b=c\n"


def test_a_record_names_variables_and_tells_no_values(launcher):
    launcher.write("t.py", "import os\nprint(os.environ['MMM_LAUNCH_LINE'], os.environ['T'] == 's3cret')")
    words = ("-n", "1", "--device", "cpu", "--env", "T=s3cret", "--env=U=s3cret=", "python3", "t.py", "--env", "x=1")
    done = launcher.run(*words)
    assert done.stdout == "launch -n 1 --device=cpu '--env=T=…' '--env=U=…' python3 t.py --env x=1 True\n"
    assert "s3cret" not in launcher.run("--dry-run", *words).stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-ppn x", "-ppn x: it has to be a whole number, at least 1"),
        ("-N 0", "-N 0: it has to be a whole number"),
        ("-N 2", "-N 2: ranks on this host alone"),
        ("-n 2 -ppn 3", "on one host they are the same"),
        ("--site x", "ranks on this host alone are started by launch itself"),
        ("--mpi hydra", "--mpi hydra: ranks on"),
        ("--env A", "--env A: write NAME=VALUE"),
        ("--env RANK=1", "RANK"),
        ("--timeout 0", "--timeout 0"),
        ("--retries -1", "--retries -1"),
        ("--signal USR1", "--signal USR1: write NAME@SECONDS"),
        ("--signal USR1@60", "when this job ends is not known"),
        ("--walltime 60", "--signal"),
        ("--hostfile no", "--hostfile"),
        ("--signal USR1@60 --walltime soon", "--walltime soon: write"),
        ("--scheduler pbs", "not inside a job of it"),
        ("--hosts a,,b", "'' is not a host name"),
        ("--cpu-bind list:0:0 -n 3", "CPUs for 2 ranks"),
        ("--launcher-args '", "No closing quotation"),
    ],
)
def test_options_that_cannot_be(tmp_path, monkeypatch, capsys, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('this was run')")
    assert main.main([*options.split(), "--device", "cpu", "python3", "train.py"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("launch: error: ") == 1


def test_walltimes():
    assert [walltime.seconds(text) for text in ("90", "1:30", "1:00:00", "2-00:00:01")] == [90, 90, 3600, 172801]
    assert walltime.read_signal("SIGUSR1@60") == (signal.SIGUSR1, 60)
    assert walltime.limits(None, "TERM@30", None, Job(end_time=1000.0)).signal_at == 970


def test_when_slurm_says_the_job_ends():
    """Slurm 22.05 has no SLURM_JOB_END_TIME: it is asked."""
    left = walltime.ask(Job("slurm", "7"), lambda command: "1:00:00\n" if command[0] == "squeue" else "")
    assert abs(left - time.time() - 3600) < 5
    assert walltime.ask(Job("slurm", "7"), lambda _: "INVALID") is None


def test_when_pbs_says_the_job_ends():
    answer = '{"Jobs": {"7.x": {"stime": "Thu Jan  1 10:00:00 1998", "Resource_List": {"walltime": "01:00:00"}}}}'
    end = walltime.ask(Job("pbs", "7"), lambda _: answer)
    assert time.strftime("%H:%M", time.localtime(end)) == "11:00"
    assert walltime.ask(Job("pbs", "7"), lambda _: "") is None
    assert walltime.ask(Job(), lambda _: "") is None


@pytest.mark.long
def test_the_signal_before_the_end_reaches_the_ranks(launcher):
    launcher.write(
        "t.py",
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n[time.sleep(0.05) for _ in range(600)]",
    )
    done = launcher.run("-n", "2", "--walltime", "9", "--signal", "USR1@4", "python3", "t.py")
    assert done.returncode == 5
    assert "launch: 4 s before the job's end: SIGUSR1 to 2 ranks\n" in done.stderr


@pytest.mark.parametrize("on_hosts", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_signal_before_the_end_leaves_the_ranks_their_time(launcher, on_hosts):
    """SIGTERM too, which ends them where launch itself is told to end: after a second they would be killed."""
    launcher.write(
        "t.py",
        "import signal, sys, time\nasked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "while not asked: time.sleep(0.05)\n"
        "time.sleep(1.8)\nprint('saved', flush=True)\n",
    )
    options = launcher.on_hosts() if on_hosts else []
    words = ["-n", "2", "--device", "cpu", "--walltime", "6", "--signal", "TERM@3", "python3", "t.py"]
    done = launcher.run(*options, *words)
    assert (done.returncode, done.stdout) == (0, "saved\n" * 2), done.stderr


@SPAWNED_IN_LONG
def test_a_signal_for_the_program_is_passed_on(launcher, how):
    launcher.write(
        "t.py",
        "import os, signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: os._exit(0))\n"
        "open('ready-' + os.environ['RANK'], 'w')\n[time.sleep(0.05) for _ in range(600)]",
    )
    process = launcher.start(*how, "-n", "2", "python3", "t.py")
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


@pytest.mark.long
def test_a_run_that_prints_nothing(launcher):
    launcher.write(
        "t.py",
        """
import os, time
for _ in range(4): time.sleep(0.4); print('x', flush=True)
if os.environ["RANK"] == "1":
    time.sleep(30)
time.sleep(30)
""",
    )
    done = launcher.run("-n", "3", "--timeout", "3", "python3", "t.py")
    assert (done.returncode, done.stdout) == (124, "x\n" * 12)
    host, script = socket.gethostname(), launcher.folder / "t.py"
    assert done.stderr == (
        "launch: no output from any rank for 3 s (--timeout): ending 3 ranks\n"
        f'launch: rank 1 on {host} is not where the others are, but at:\n  File "{script}", line 5 in <module>\n'
        f'launch: the other 2, such as rank 0 on {host}, are at:\n  File "{script}", line 6 in <module>\n'
    )


def test_which_ranks_hang():
    wait = ('File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce', 'File "/me/t.py", line 3 in step')
    data = ('File "/me/data.py", line 7 in load', 'File "/me/t.py", line 2 in step')
    names = {rank: f"h{rank}" for rank in range(4)}
    text = stacks.explain({0: wait, 1: data, 2: data, 3: data}, names)  # few wait, but those are not to blame
    assert text.startswith("launch: rank 1 on h1, rank 2 on h2, rank 3 on h3 are not where the others are")
    assert "the other 1, such as rank 0 on h0, are at:\n  File" in text
    other = (wait[0], 'File "/me/t.py", line 4 in step')
    assert stacks.explain({0: wait, 1: wait, 2: other}, names).startswith("launch: rank 2 on h2 is not where")
    assert stacks.explain({0: wait, 1: wait}, names).startswith("launch: all 2 ranks are at the same place:\n")
    assert stacks.explain({}, names) == ""
    assert stacks.read('Stack (most recent call first):\n  File "a", line 1 in f\nx\n') == ('File "a", line 1 in f',)


def test_retries(launcher):
    launcher.write("t.py", "import os, sys\nn = os.environ['MMM_ATTEMPT']\nprint(n)\nsys.exit(n != '1')")
    done = launcher.run("-n", "1", "--retries", "3", "python3", "t.py")
    assert (done.returncode, done.stdout) == (0, "0\n1\n")
    assert "launch: exit code 1: starting again (--retries; 3 left)" in done.stderr
    again = launcher.run("-n", "1", "--retries", "1", "python3", "-c", "import sys; sys.exit(7)")
    assert again.returncode == 7


def test_no_retry_after_a_users_error_or_a_signal(launcher):
    launcher.write("t.py", "from mmm.errors import ConfigError\nraise ConfigError('wrong')")
    done = launcher.run("-n", "1", "--retries", "2", "python3", "t.py")
    assert (done.returncode, done.stderr) == (2, "error: wrong\n")
    launcher.write("t.py", "import time\nopen('ready', 'w')\n[time.sleep(0.05) for _ in range(600)]")
    process = launcher.start("-n", "1", "--retries", "2", "python3", "t.py")
    launcher.wait_for("ready")
    process.send_signal(signal.SIGTERM)
    assert "starting again" not in process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143


def host(place, name):
    return backend.Host(None, name, place, 1000 + place)


def spec(is_wish=False):
    return LaunchSpec(
        target=Target("module", "x"),
        launcher=Value("hydra", ""),
        job=Job(),
        hosts=Value(("a", "b"), ""),
        counts=Value((2, 1), ""),
        device=Value("cpu", ""),
        shared={"WORLD_SIZE": Value("3", ""), "MASTER_PORT": Value("20000", "", is_wish)},
        threads=Value(None, ""),
        prefork=True,
        bind=Value(None, ""),
        notes=(),
        stage=None,
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ab", [[0, 1], [2]]),
        ("ba", [[0], [1, 2]]),  # the launcher backend has an order of its own
        ("xy", [[0, 1], [2]]),  # hosts were named by their addresses
    ],
)
def test_ranks_of_a_host_follow_each_other(monkeypatch, names, expected):
    told = []
    monkeypatch.setattr(backend.Backend, "tell", lambda self, host, message: told.append(message["go"]))
    made = backend.Backend(spec(is_wish=True))
    made.hosts_by_place = {place: host(place, name) for place, name in enumerate(names)}
    made.begin()
    assert [made.hosts_by_place[place].ranks for place in range(2)] == expected
    for command, ranks in zip(told, expected, strict=True):
        made_of_it = host_spec.make(Target("module", "x"), command, build="cpu")
        assert [rank["RANK"] for rank in made_of_it.ranks] == [str(rank) for rank in ranks]
        assert [rank["LOCAL_RANK"] for rank in made_of_it.ranks] == ["0", "1"][: len(ranks)]
        assert made_of_it.shared["LOCAL_WORLD_SIZE"] == str(len(ranks))
        assert made_of_it.shared["MASTER_PORT"] == "1000"  # as rank 0's host says


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


def test_a_launcher_backend_that_says_nothing(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_RANK": "1"})
    with pytest.raises(LaunchError, match="PMI_RANK"):
        agent.own_place("hydra")


def test_is_here():
    own = socket.gethostname()
    assert hosts.is_here(own)
    assert hosts.is_here(f"{own.partition('.')[0]}.example.org")
    assert hosts.is_here("localhost")
    assert hosts.is_here(f"{own.partition('.')[0]}-hsn0.hsn.cm.example.org")  # as PBS names it on Sunspot
    assert not hosts.is_here("another-host")
    assert hosts.host_key("n-hsn12.example.org") == "n"
    assert hosts.host_key("rack-hsn0-n1") == "rack-hsn0-n1"


def test_a_script_has_its_whole_path_and_pythons_builtins(launcher, tmp_path):
    launcher.write("t.py", "import os\nos.chdir('/')\nprint(__builtins__.len([0]), os.path.exists(__file__))")
    for how in ([], ["--no-prefork"]):
        assert launcher.run(*how, "-n", "1", "python3", "t.py").stdout == "1 True\n"


@pytest.mark.parametrize(
    ("redirected", "code", "says"),
    [
        (">&-", 0, ""),
        ("--timeout 9 >&-", 0, ""),
        ("> /dev/full", 0, "what is printed cannot be written from here on: No space left on device\n"),
        ("--timeout 9 > /dev/full", 0, "what is printed cannot be written from here on: No space left on device\n"),
    ],
)
def test_stdout_that_takes_nothing(launcher, redirected, code, says):
    flags, _, where = redirected.rpartition(">")
    line = f"{sys.executable} -m mmm_launch -n 1 --device cpu {flags} python3 -c 'print(1)' >{where}"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=launcher.folder,
        env=launcher.environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_a_value_that_begins_with_a_dash():
    assert main.split(["--launcher-args", "--oversubscribe", "-n", "2", "true"]) == (
        ["--launcher-args=--oversubscribe", "-n", "2"],
        ["true"],
    )
