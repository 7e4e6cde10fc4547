"""`launch --retries`: whose fault a failure was; a bad host leaves, a spare one comes, a table says so at the end."""

import json
import re
from types import SimpleNamespace

import pytest

from mmm_launch.channel.failures import Failure
from mmm_launch.contract import Report
from mmm_launch.machines.find import BUILT_IN, EVERYWHERE, load
from mmm_launch.machines.machine import Machine, read
from mmm_launch.run.attempts import Attempts
from mmm_launch.run.control import Run
from mmm_launch.run.faults import look
from mmm_launch.spec.launch_spec import Value
from support.launcher import MPIEXEC

FAULTS = read(EVERYWHERE).faults
PORT = "The server socket has failed to listen on any local network address. port: 29500,"
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def attempts(spare=("hC",)):
    """Two ranks on each of hA and hB; hC is there for one of them."""
    counts, hosts = Value((2, 2), ""), Value(("hA", "hB"), "")
    machine = Value(Machine(""), "")
    return Attempts(SimpleNamespace(counts=counts, hosts=hosts, spare=spare, ranks=4, elastic=None, machine=machine), 2)


def ended(made, *failed, printed="", silent=()):
    """A run in which these failures came, and its exit code. Rank 3 on hB has ended with code 1 if there is none."""
    run = Run(SimpleNamespace(silent_hosts=silent), 4)
    run.output = SimpleNamespace(tail=printed.encode())
    # Only lines that were printed say more than an exit code.
    for failure in failed or [killed(3, 1)]:
        run.failed(failure)
    run.name_cause()
    return run, run.exit_code


def raised(rank, text, kind="traceback", code=1):
    return Failure.reported(Report(rank, kind, f"Traceback …\n{text}\n", code, 0.0), 1.0, f"h{'AABB'[rank]}")


def killed(rank, code):
    return Failure.ended(rank, 4711, code, 2.0, f"h{'AABB'[rank]}")


def lost(rank, reason="no answer for 6 s"):
    return Failure(rank, 1, 1.0, text=f"lost rank {rank}", lost=reason)


def hosts_after(made, run, code):
    """Hosts of the next attempt; "": there is none."""
    return " ".join(made.in_use()) if made.starts_again(run, code) else ""


# How an attempt failed → hosts of the next one. Rank 0 and 1 are on hA, 2 and 3 on hB.
FAILED = {
    "a traceback that names the device": ([raised(2, ECC)], {}, "hA hC"),
    "a rank of another host noticed it first": ([killed(0, 1)], {"printed": f"[rank3]:[E] {ECC}\n"}, "hA hC"),
    "NCCL's own line": ([], {"printed": "hA.site:7:9 [0] NCCL WARN uncorrectable NVLink error\n"}, "hB hC"),
    "a pattern with the name of the host": ([], {"printed": "x\nhA.hsn.site: GPU has fallen off the bus\n"}, "hB hC"),
    "what a rank survived, before it fails by itself": (
        [raised(0, "ValueError: 3")],
        {"printed": "CUDA out of memory\n"},
        "hA hB",
    ),
    "a time of day is no host": ([], {"printed": f"12:34:56 {ECC}\n"}, "hA hC"),
    "no end of the line": ([], {"printed": ECC}, "hA hC"),
    "SIGBUS": ([killed(1, -7)], {}, "hB hC"),
    "a host that is cut off": ([lost(2)], {}, "hA hC"),
    "a host that did not start": ([], {"silent": ("hA",)}, "hB hC"),
    "no host started": ([], {"silent": ("hA", "hB")}, "hA hB"),
    "both hosts, and one is spare": ([raised(0, ECC), raised(2, ECC)], {}, ""),
    "the program's error": ([raised(2, "ValueError: 3")], {}, "hA hB"),
    "killed by somebody": ([killed(1, -9)], {}, "hA hB"),
    "a port": ([raised(0, f"{PORT} code: -98, name: EADDRINUSE")], {}, "hA hB"),
    "saved": ([killed(0, 75)], {}, "hA hB"),
    "wrong arguments of a program that is not ours": ([killed(0, 2)], {}, ""),
    "out of memory": ([raised(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")], {}, ""),
    "the scheduler ends it": ([Failure(0, 143, 0.0, text="SIGTERM", final=True)], {}, ""),
}


@pytest.mark.parametrize(("failed", "also", "hosts"), FAILED.values(), ids=FAILED)
def test_whose_fault(failed, also, hosts):
    made = attempts()
    assert hosts_after(made, *ended(made, *failed, **also)) == hosts


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("the program's error", "exit code 1: starting again (--retries; 1 left); no host is known to be to blame"),
        ("a port", "exit code 1: starting again (--retries; 1 left)\n"),
        ("saved", "exit code 75: starting again (--retries; 1 left)\n"),
        ("SIGBUS", "exit code 135: starting again without hA (--retries; 1 left)\n"),
        (
            "out of memory",
            "the same would fail again: GPU memory full: torch.OutOfMemoryError: CUDA out of",
        ),
        ("both hosts, and one is spare", "room for world size 2 without hA, hB, and at least 4 is needed"),
    ],
)
def test_what_is_said_of_it(name, says, capsys):
    failed, also, _ = FAILED[name]
    made = attempts()
    made.starts_again(*ended(made, *failed, **also))
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "hosts"), [([raised(2, ECC)], ""), ([killed(1, -9)], "hA hB")])
def test_without_a_spare_host(failed, hosts, capsys):
    """The bad one would fail again; anything else may pass."""
    made = attempts(spare=())
    assert hosts_after(made, *ended(made, *failed)) == hosts
    table = re.findall(r"launch: 0 +1 +hB +GPU memory: .*ECC", capsys.readouterr().err)
    assert len(table) == (hosts == "")


def test_each_attempt_has_its_row(capsys):
    """A spare host may be bad, too; what the first attempt printed says nothing about the second."""
    made = attempts(spare=("hC", "hD"))
    assert hosts_after(made, *ended(made, raised(2, ECC))) == "hA hC"
    assert hosts_after(made, *ended(made, raised(3, ECC))) == "hA hD"
    assert hosts_after(made, *ended(made, raised(0, "ValueError: 3"))) == ""
    # The last three lines are the table; its columns are apart by two blanks at least.
    rows = [re.split(r"  +", line) for line in capsys.readouterr().err.splitlines()[-3:]]
    assert [row[:3] for row in rows] == [
        ["launch: 0", "1", "hB"],
        ["launch: 1", "1", "hC"],
        ["launch: 2", "1", "hA"],
    ]
    assert [row[3] for row in rows[:2]] == ["starting again without hB", "starting again without hC"]
    assert "ValueError: 3" in rows[2][3]


# Of each fault that comes with the package, a line as its source, or who met it, has it.
LINES = {
    "GPU memory": ECC,
    "NVLink": "CUDA error: uncorrectable NVLink error detected during the execution",
    "GPU lost": "Unable to determine the device handle for GPU 0000:05:00.0: GPU is lost.  Reboot the system",
    "Xid": "NVRM: Xid (PCI:0000:8a:00): 48, pid=55182, name=python, DBE (double bit error)",
    "bus error": "rank 1 (pid 4711) was killed by SIGBUS on nid001",
    "GPU busy": "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "port taken": f"{PORT} useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "GPU memory full": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "host memory full": "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup.",
    "shared memory full": "This might be caused by insufficient shared memory (shm).",
    "Slingshot's match entries": "cxip_ux_onload_cb():2659<warn> nid001056: RXC (0x3892:79) PtlTE 375:[Fatal] LE "
    "resources not recovered during flow control. FI_CXI_RX_MATCH_MODE=[hybrid|software] is required",
    "PALS' shepherd": "nid001.hsn.cm.aurora.alcf.anl.gov: shepherd died from signal 9",
    "GPU lost, on Aurora": "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
}


def test_each_pattern_has_a_source_and_fits_a_line():
    """A misspelled expression would never be noticed: a bad host is rare."""
    aurora = load({})["aurora"].faults
    faults = FAULTS | {name: aurora[name] for name in aurora if name not in FAULTS}
    for name, fault in {**faults, "GPU lost, on Aurora": aurora["GPU lost"]}.items():
        (finding,) = look({name: fault}, f"before\n{LINES[name]}\nafter", ["nid001"], "nid001")
        assert finding.text == f"{name}: {LINES[name]}"
    for path in (EVERYWHERE, *BUILT_IN.glob("*.json")):
        machine = json.loads(path.read_text())
        assert {*machine.get("faults", {})} <= {*machine.get("sources", {})}, path


BASH = """
echo "attempt $MMM_ATTEMPT rank $RANK port $MASTER_PORT on $(hostname)"
if [ "$MMM_ATTEMPT$RANK" = 01 ]; then echo "[rank1]: the cooler of device 3 has failed" >&2; exit 9; fi
"""


def test_a_program_that_is_not_ours(launcher):
    """Hosts of the list that -N leaves out are the spare ones, and the user's machine has a pattern of its own."""
    machine = {"name": "Mine", "match": {"MINE": "1"}, "faults": {"cooler": "host: cooler of device \\d"}}
    launcher.write("mine.json", json.dumps(machine))
    mpiexec = launcher.write("mpiexec", MPIEXEC)
    mpiexec.chmod(0o755)
    options = ["--scheduler", "none", "--hosts", "h0,h1,h2", "-N", "2", "-ppn", "1", "--mpiexec", str(mpiexec)]
    environment = {"MMM_LAUNCH_ADDRESS": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MINE": "1"}
    arguments = [*options, "--retries", "3", "--device", "cpu", "bash", "-c", BASH]
    done = launcher.run(*arguments, **environment, MMM_MACHINES=str(launcher.folder / "mine.json"))
    assert done.returncode == 0, done.stderr
    # attempt → port
    ports = {line.split()[1]: line.split()[5] for line in done.stdout.splitlines()}
    assert [*ports] == ["0", "1"]
    assert ports["0"] != ports["1"]
    assert re.search(
        r"launch: 0 +9 +h1 +starting again without h1 +cooler: \[rank1\]: the cooler of device 3", done.stderr
    )
