"""`launch --elastic`: again, on the ranks and hosts that are left."""

import os
import re
import signal
import sys
import time

import pytest

from support.clock import PATIENCE

# Each rank leaves a line in `ranks`, and its pid in `pid-RANK`; what the test has written for an attempt happens when
# all ranks have.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
rank, world, attempt = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MMM_ATTEMPT"))
host = os.environ.get("SLURMD_NODENAME", "")
with open("ranks", "a") as file:
    file.write(f"{attempt} {world} {rank} {os.environ['LOCAL_RANK']} {os.getppid()} {host}\\n")
Path(f"pid-{rank}").write_text(str(os.getpid()))
Path(f"there-{attempt}-{rank}").touch()
while not all(os.path.exists(f"there-{attempt}-{other}") for other in range(int(world))): time.sleep(0.01)
"""
SAVES = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
KILLED = "if (attempt, rank) == ('0', '1'): time.sleep(0.3); os.kill(os.getpid(), 9)\n"
WAITS = "time.sleep(90 if attempt == '0' else 0)\n"
FOREVER = "[time.sleep(0.05) for _ in range(1800)]"
# One agent a host, as an MPI's: where one is killed by a signal, or a host is down, it ends the others.
MPIEXEC = """#!{python}
import json, os, socket, subprocess, sys, time
words = sys.argv[1:]
if words == ["--version"]: sys.exit(print("HYDRA build details:"))
hosts = words[words.index("-hosts") + 1].split(",")
if os.path.exists("taken"):  # somebody else listens where rank 0 was to
    other = socket.create_server(("", json.loads(os.environ["MMM_CLUSTER"])["port"]), reuse_port=True)
    other.set_inheritable(True)
command, agents = words[words.index(sys.executable):], []
for rank, host in enumerate(hosts):
    if os.path.exists("down-" + host): continue
    place = {{"PMI_RANK": str(rank), "PMI_SIZE": str(len(hosts)), "SLURMD_NODENAME": host}}
    agents.append(subprocess.Popen(command, env=os.environ | place, close_fds=False))
    open("agent-" + host, "w").write(str(agents[-1].pid))
if len(agents) < len(hosts): time.sleep(1.0)
while len(agents) == len(hosts) and None in [agent.poll() for agent in agents]:
    if any((agent.poll() or 0) < 0 for agent in agents): break
    time.sleep(0.02)
# Launch has to hear first of the one that was killed: it then ends the others, however late on a busy machine.
until = time.monotonic() + 20
while len(agents) == len(hosts) and None in [agent.poll() for agent in agents] and time.monotonic() < until:
    time.sleep(0.02)
for agent in agents: agent.kill()
sys.exit(max([abs(agent.wait()) for agent in agents] + [len(agents) < len(hosts)]))
"""


@pytest.fixture
def elastic(launcher):
    """Starts `launch --elastic` on `before`, PROGRAM and `more`."""

    def start(bounds, more, *argv, before=SAVES, **variables):
        launcher.write("t.py", before + PROGRAM + more)
        return launcher.start("--elastic", bounds, "--device", "cpu", *argv, "python3", "t.py", **variables)

    return start


def ended(process):
    """Exit code and what launch has said."""
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


def attempts(launcher):
    """Of each attempt, its ranks: number of ranks, rank, local rank, parent, host; sorted."""
    lines_of = {}
    for line in (launcher.folder / "ranks").read_text().splitlines():
        attempt, *fields = line.split(" ")
        lines_of.setdefault(int(attempt), []).append(fields)
    return [sorted(lines_of[attempt], key=lambda fields: int(fields[1])) for attempt in sorted(lines_of)]


def sizes(launcher):
    """Ranks of each attempt."""
    made = attempts(launcher)
    assert all(ranks[0][0] == str(len(ranks)) for ranks in made)
    return [len(ranks) for ranks in made]


def test_the_ranks_that_are_left_go_on(launcher, elastic):
    code, err = ended(elastic("2:4", KILLED + WAITS))
    assert (code, sizes(launcher)) == (0, [4, 3]), err
    killed, on = err.splitlines()
    assert "was killed by SIGKILL" in killed
    assert on == "launch: exit code 137: continuing with world size 3 (--elastic)"
    assert [ranks[1:3] for ranks in attempts(launcher)[1]] == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert launcher.gone(within=1.0)


@pytest.mark.parametrize(("refused", "then"), [pytest.param("3", [4, 2], marks=pytest.mark.long), ("23", [4, 1])])
def test_the_next_number_that_the_layout_takes(launcher, elastic, refused, then):
    check = (
        "import os\nfrom mmm.errors import LayoutError\nworld = os.environ['WORLD_SIZE']\n"
        f"if world in '{refused}': raise LayoutError(world + ' do not divide')\n"
    )
    process = elastic("1:4", KILLED + WAITS, before=check)
    code, err = ended(process)
    assert (code, sizes(launcher)) == (0, then), err
    for count in refused:
        assert f"error: {count} do not divide\nlaunch: world size {count} does not fit: continuing with" in err


def test_a_layout_that_does_not_fit_at_first_is_the_users(launcher, elastic):
    refuses = "from mmm.errors import LayoutError\nraise LayoutError('4 do not divide')\n"
    code, err = ended(elastic("1:4", refuses))
    assert (code, err, sizes(launcher)) == (2, "error: 4 do not divide\n", [4])


def test_another_mistake_of_the_user_ends_the_run(launcher, elastic):
    fails = "from mmm.errors import DataError\nif attempt == '1': raise DataError('no data')\n"
    code, err = ended(elastic("1:4", fails + KILLED + WAITS))
    assert (code, err.splitlines()[-1], sizes(launcher)) == (2, "error: no data", [4, 3])


@pytest.mark.long
def test_fewer_than_the_least(launcher, elastic):
    code, err = ended(elastic("2:2", KILLED + WAITS))
    assert (code, sizes(launcher)) == (137, [2])
    assert err.splitlines()[-1].startswith("launch: there is room for world size 1, and at least 2 is needed")
    assert launcher.gone(within=1.0)


def test_a_mistake_of_the_program_ends_in_so_many_attempts(launcher, elastic):
    code, err = ended(elastic("2:4", "if rank == '1': raise OSError('no file')\n" + FOREVER))
    assert (code, sizes(launcher)) == (1, [4, 3, 2])
    assert err.count("OSError: no file") == 3


@pytest.mark.long
def test_no_more_retries(launcher, elastic):
    code, err = ended(elastic("1:4", "if rank == '1': os.kill(os.getpid(), 9)\n" + FOREVER, "--retries", "1"))
    assert (code, sizes(launcher)) == (137, [4, 3])
    assert "continuing with world size 3 (--elastic) (--retries; 0 left)" in err


def test_signals_end_it_for_good(launcher, elastic):
    process = elastic("1:2", KILLED + FOREVER)
    launcher.wait_for("ranks")
    while len(attempts(launcher)) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert (code, err.splitlines()[-1]) == (143, "launch: SIGTERM: ending 1 rank")
    assert launcher.gone(within=1.0)


def test_a_fork_server_that_is_killed(launcher, elastic):
    process = elastic("2:2", WAITS)
    launcher.wait_for("pid-0", "pid-1")
    os.kill(int(attempts(launcher)[0][0][3]), signal.SIGKILL)
    code, err = ended(process)
    assert (code, sizes(launcher)) == (0, [2, 2]), err


@pytest.fixture
def hosts(launcher, elastic):
    """Starts `launch --elastic` on hosts that are all this one, two ranks on each."""
    mpiexec = launcher.write("mpiexec", MPIEXEC.format(python=sys.executable))
    mpiexec.chmod(0o755)

    def start(names, bounds, more, *argv):
        options = ["--scheduler", "none", "--hosts", names, "-ppn", "2", "--mpiexec", str(mpiexec)]
        addresses = {"MMM_LAUNCH_ADDRESS": "127.0.0.1", "MASTER_ADDR": "127.0.0.1"}
        return elastic(bounds, more, *options, *argv, **addresses)

    return start


def kill_host(launcher, name):
    """Once all ranks are there, kill the agent of a host: its ranks end with it, and it stays down."""
    launcher.wait_for(*(f"pid-{rank}" for rank in range(4)))
    launcher.write(f"down-{name}", "")
    os.kill(int((launcher.folder / f"agent-{name}").read_text()), signal.SIGKILL)


def on(ranks):
    return [fields[4] for fields in ranks]


def test_a_host_that_is_lost(launcher, hosts):
    process = hosts("hA,hB", "2:4", WAITS)
    kill_host(launcher, "hB")
    code, err = ended(process)
    assert (code, [on(ranks) for ranks in attempts(launcher)]) == (0, [["hA", "hA", "hB", "hB"], ["hA", "hA"]]), err
    assert "launch: lost ranks 2, 3 on hB" in err


@pytest.mark.long
def test_a_spare_host(launcher, hosts):
    process = hosts("hA,hB", "3:4", WAITS, "--spare-hosts", "hC")
    kill_host(launcher, "hA")
    code, err = ended(process)
    assert (code, [on(ranks) for ranks in attempts(launcher)[1:]]) == (0, [["hB", "hB", "hC", "hC"]]), err


def test_a_port_that_somebody_has_taken(launcher, hosts):
    """Rank 0's host says which is free, for the first attempt and for the next."""
    launcher.write("taken", "")
    process = hosts("hA,hB", "2:4", "print(os.environ['MASTER_PORT'], flush=True)\n" + WAITS)
    kill_host(launcher, "hB")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, sizes(launcher)) == (0, [4, 2]), err
    ports = set(out.split())
    # attempts
    assert len(ports) == 2
    assert err.split("127.0.0.1:")[1].split()[0] not in ports


@pytest.mark.long
def test_a_host_that_does_not_start_again(launcher, hosts):
    """It was not to blame for the failure, and is down when the next attempt begins."""
    process = hosts("hA,hB", "1:4", "if (attempt, rank) == ('0', '0'): time.sleep(0.5); sys.exit(3)\n" + WAITS)
    launcher.wait_for("there-0-0")
    launcher.write("down-hB", "")
    code, err = ended(process)
    assert (code, on(attempts(launcher)[1])) == (0, ["hA"]), err
    assert "nothing was heard from hB" in err


def test_a_dry_run_says_it(launcher):
    done = launcher.run("--elastic", "2:4", "--device", "cpu", "--dry-run", "python3", "-c", "pass")
    assert done.returncode == 0
    assert re.search(r"elastic +2:4 ranks", done.stdout)
