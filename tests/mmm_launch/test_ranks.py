"""What a rank finds, the same forked and spawned: environment, arguments, path, module, threads, imports; what it
prints; what its side does without launch."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import support
from support.clock import PATIENCE, long
from support.launcher import SPAWNED_IN_LONG, START

LOOK = """
import json, os, sys
import beside
json.dump({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
           "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(),
           "stdin": sys.stdin.read(), "group": os.getpgid(0)},
          open(os.environ["RANK"] + ".json", "w"))
"""
# Variables of the launch, not of its way; names that begin so.
CHANGING = ("MMM_FAILURE_SOCKET", "MMM_PROGRAM", "MASTER_PORT", "MMM_LAUNCH_", "MMM_ATTEMPTS_OF")


@pytest.fixture
def look(launcher):
    launcher.write("folder/look.py", LOOK)
    launcher.write("folder/__init__.py", "")
    launcher.write("folder/beside.py", "")
    launcher.write("beside.py", "")

    def run(*argv, **variables):
        done = launcher.run(*argv, **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads((launcher.folder / f"{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.mark.parametrize("command", [["python3", "folder/look.py"], ["python3", "-m", "folder.look"]])
def test_forked_and_spawned_ranks_find_the_same(look, launcher, command):
    forked = look("-n", "2", *command, "--lr", "a b")
    spawned = look("-n", "2", "--no-prefork", *command, "--lr", "a b")
    script = command[-1] == "folder/look.py"
    for rank, (one, other) in enumerate(zip(forked, spawned, strict=True)):
        for output in (one, other):
            environment = output["env"]
            assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
            assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
            assert output["argv"][1:] == ["--lr", "a b"]
            assert output["argv"][0] == ("folder/look.py" if script else str(launcher.folder / "folder/look.py"))
            assert output["path"] == str(launcher.folder / "folder" if script else launcher.folder)
            assert output["spec"] == (None if script else "folder.look")
            assert (output["name"], output["main"], output["stdin"]) == ("__main__", True, "")
            assert output["group"] != os.getpgid(0)
        one, other = ({k: v for k, v in e["env"].items() if not k.startswith(CHANGING)} for e in (one, other))
        assert one == other


def test_a_program_that_is_no_python(launcher):
    done = launcher.run("-n", "3", "sh", "-c", "echo $RANK of $WORLD_SIZE, $MMM_FAILURE_FD$MMM_LAUNCH_AGENT")
    assert done.returncode == 0
    assert {line[:6] for line in done.stdout.splitlines()} == {"0 of 3", "1 of 3", "2 of 3"}


def test_code_and_python_flags(launcher, launch_options):
    code = "import sys; print(sys.flags.optimize, sys._xoptions, sys.argv, __name__)"
    done = launcher.run(*launch_options, "-n", "1", "python3", "-O", "-X", "utf8", "-c", code, "a")
    assert done.stdout == "1 {'utf8': True} ['-c', 'a'] __main__\n"


@SPAWNED_IN_LONG
def test_output_into_a_pipe_comes_by_the_line(launcher, launch_options):
    launcher.write("t.py", "import os, time\nprint('early')\nopen('done', 'w')\ntime.sleep(30)")
    process = launcher.start(*launch_options, "-n", "1", "python3", "t.py")
    launcher.wait_for("done")
    process.kill()
    assert process.communicate()[0] == "early\n"


@SPAWNED_IN_LONG
def test_lines_of_ranks_do_not_mix(launcher, launch_options):
    """Each is one write, also where python was asked not to buffer: then `print` would write a line's end by itself."""
    launcher.write("t.py", "import sys\nfor s in sys.stdout, sys.stderr: print(s.line_buffering, s.write_through)")
    done = launcher.run(*launch_options, "-n", "3", "python3", "t.py", PYTHONUNBUFFERED="1")
    assert done.stdout.splitlines() == ["True False"] * 6


COUNT = """
import os, torch
torch.ones(300, 300) @ torch.ones(300, 300)
open("threads-" + os.environ["RANK"], "w").write(f"{os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()} "
                                                 f"{len(os.sched_getaffinity(0))}")
"""
# The CPUs that this process may use.
CPUS = sorted(os.sched_getaffinity(0))
BIND = ["--cpu-bind", f"list:{CPUS[0]}:{CPUS[-1]}"]


@pytest.fixture
def threads(launcher):
    """OMP_NUM_THREADS, torch's threads and the CPUs of two ranks."""

    def run(*argv, **variables):
        launcher.write("t.py", COUNT)
        done = launcher.run(*argv, "-n", "2", "--device", "cpu", "python3", "t.py", timeout=PATIENCE, **variables)
        assert done.returncode == 0, done.stderr
        return [tuple(map(int, (launcher.folder / f"threads-{rank}").read_text().split())) for rank in (0, 1)]

    return run


# The ranks' processes are forked, here or on a host; or each imports torch itself, under what it has been told.
@pytest.fixture(params=["here", long("host"), long("spawn")])
def options(request, launcher):
    if request.param == "host":
        return launcher.on_hosts()
    return ["--no-prefork"] if request.param == "spawn" else []


def test_not_bound(threads, options):
    cpus_per_rank = max(1, len(CPUS) // 2)
    assert threads(*options) == [(cpus_per_rank, cpus_per_rank, len(CPUS))] * 2


def test_a_package_that_made_the_thread_pool_before_the_fork(launcher):
    launcher.write("site-packages/maker.py", "from support.thread_pool import make\nmake()\n")
    launcher.write("t.py", "import maker\nfrom support.thread_pool import ask_at_once\nask_at_once()\n")
    paths = launcher.folder / "site-packages", Path(support.__file__).parents[1]
    done = launcher.run("-n", "4", "python3", "t.py", timeout=PATIENCE, PYTHONPATH=os.pathsep.join(map(str, paths)))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    ("cpus", "variables", "expected"),
    [
        ([], {}, (1, 1, 1)),
        # What the user says counts.
        long([], {"OMP_NUM_THREADS": "2"}, (2, 2, 1)),
        long(["--env", "OMP_NUM_THREADS=2"], {}, (2, 2, 1)),
    ],
)
def test_bound_to_one_cpu_each(threads, options, cpus, variables, expected):
    assert threads(*options, *BIND, *cpus, **variables) == [expected] * 2


PRINTS = """
import logging, os, sys
from mmm.runtime.failure import run_main
def main():
    log = logging.getLogger()
    log.addHandler(logging.StreamHandler(sys.stdout))
    for number in range(3000):
        print(number)
        log.warning("%d", number)
    print("is lost", file=sys.stderr)
    open("done-" + os.environ["RANK"], "w").close()
    sys.exit(int(sys.argv[1]))
run_main(main)
"""


def piped(launcher, line):
    """The exit code of `line` before its pipe, and what is printed."""
    settings = {"cwd": launcher.folder, "env": launcher.environment(), "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], **settings, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirected", "says"),
    [
        (">&-", ""),
        ("--timeout 9 >&-", ""),
        ("--timeout 9 >/dev/full", "launch: what is printed cannot be written from here on: No space left on device\n"),
    ],
)
def test_stdout_that_takes_nothing(launcher, redirected, says):
    flags, _, where = redirected.rpartition(">")
    line = f"{shlex.join(START)} -n 1 --device cpu {flags} python3 -c 'print(1)' >{where}"
    assert piped(launcher, line) == (0, "", says)


@pytest.mark.parametrize("kind", ["", "--no-prefork", "--timeout 90", "host"])
@pytest.mark.parametrize(("redirected", "code"), [("", 0), ("2>&1", 7)])
def test_a_reader_that_has_seen_enough(launcher, kind, redirected, code):
    launcher.write("t.py", PRINTS)
    argv = launcher.on_hosts() if kind == "host" else kind.split()
    line = shlex.join([*START, *argv, "-n", "2", "--device", "cpu", "python3", "t.py", str(code)])
    output, out, err = piped(launcher, f"{line} {redirected} | head -1")
    # A failure ends the other.
    assert (launcher.folder / "done-0").exists() or (launcher.folder / "done-1").exists()
    assert (output, out.count("\n")) == (code, 1)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    if not code:
        for rank in range(2):
            assert (launcher.folder / f"done-{rank}").exists()


def test_a_program_without_launch(launcher):
    launcher.write(
        "t.py",
        "from mmm.runtime.failure import run_main\n"
        "def main():\n    for n in range(30000): print(n)\n    open('done', 'w').close()\nrun_main(main)",
    )
    assert piped(launcher, f"{sys.executable} t.py | head -1") == (0, "0\n", "")
    assert (launcher.folder / "done").exists()


LACKS = """
import os, sys
from mmm.errors import DataError
from mmm.runtime.failure import run_main
def main():
    raise DataError("no such file: x", on_every_rank="everywhere" in sys.argv)
run_main(main)
"""
# Variables by which torchrun, schedulers and MPIs tell a rank who it is.
RANKS = [
    lambda rank: {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "4"},
    lambda rank: {"PMI_RANK": rank, "PMI_SIZE": "4"},
    lambda rank: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "4"},
    lambda rank: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"},
]


def run(launcher, code, *argv, **variables):
    command = [sys.executable, "-c", code, *argv]
    env = launcher.environment(**variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}]
)  # a batch script's own
def test_a_process_that_is_alone_says_its_error_plainly(launcher, variables):
    done = run(launcher, LACKS, **variables)
    assert (done.returncode, done.stderr) == (2, "error: no such file: x\n")


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize("variables", RANKS)
def test_each_rank_says_its_own(launcher, variables, rank):
    """It may be the only one that has it: a file that one host lacks."""
    done = run(launcher, LACKS, **variables(rank))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: [rank {rank} on {socket.gethostname()}] no such file: x\n"


def test_what_all_ranks_have_rank_0_says(launcher):
    texts = [run(launcher, LACKS, "everywhere", **RANKS[0](rank)).stderr for rank in ("0", "3")]
    assert texts == ["error: no such file: x\n", ""]


def test_other_exceptions_stay_what_they_are(launcher):
    done = run(launcher, LACKS.replace("raise DataError(", "raise KeyError('no such file: x') or DataError("))
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'no such file: x'\n")


def test_launch_does_not_import_torch(launcher):
    done = run(
        launcher,
        "import sys, mmm_launch.main, mmm_launch.run.local, mmm_launch.program.preloads\n"
        "mmm_launch.main.main(['--dry-run', 'true'])\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))",
    )
    assert done.stdout.splitlines()[-1] == "[]"


IMPORTS = """
import os, sys
at_start = {name: name in sys.modules for name in ("numpy", "tool", "h5py", "rich")}
import numpy, tool
import json
json.dump({"parent": os.getppid(), "at_start": at_start}, open(os.environ["RANK"] + ".json", "w"))
"""


def found(launcher, ranks):
    return [json.loads((launcher.folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_installed_packages_are_there_before_the_target_and_its_own_modules_are_not(launcher):
    launcher.write("tool.py", "import h5py, os\nopen(f'tool-{os.getpid()}', 'w')\n")
    launcher.write("t.py", IMPORTS)
    assert launcher.run("-n", "2", "python3", "t.py").returncode == 0
    one, other = found(launcher, 2)
    assert one["parent"] == other["parent"]
    assert one["at_start"] == {"numpy": True, "tool": False, "h5py": True, "rich": False}
    # The two ranks
    assert len([name for name in os.listdir(launcher.folder) if name.startswith("tool-")]) == 2


def test_spawned_ranks_start_without(launcher):
    launcher.write("tool.py", "")
    launcher.write("t.py", IMPORTS)
    assert launcher.run("-n", "2", "--no-prefork", "python3", "t.py").returncode == 0
    assert found(launcher, 2)[0]["at_start"] == {"numpy": False, "tool": False, "h5py": False, "rich": False}


def installed(launcher, name, text):
    """A package that counts as installed."""
    launcher.write(f"site-packages/{name}.py", text)
    return {"PYTHONPATH": str(launcher.folder / "site-packages")}


def test_a_package_that_fails_to_import_fails_in_the_target_as_ever(launcher):
    tries = "import os, sys\nsys.halfway = getattr(sys, 'halfway', 0) + 1\nraise OSError(f'try {sys.halfway}')\n"
    path = installed(launcher, "halfway", tries)
    launcher.write("t.py", "import numpy\ntry:\n    import halfway\nexcept OSError as e:\n    print(e)\n")
    done = launcher.run("-n", "2", "python3", "t.py", **path)
    assert (done.returncode, done.stdout) == (0, "try 1\ntry 1\n"), done.stderr
    launcher.write("t.py", "import halfway")
    done = launcher.run("-n", "2", "python3", "t.py", **path)
    assert done.returncode == 1
    assert done.stderr.count("OSError: try 1") == 1
    assert done.stderr.count("Traceback") == 1


def test_a_package_that_must_not_be_imported_before_a_fork(launcher):
    path = installed(launcher, "cupy", "import os\nprint('parent', os.getpid() == int(os.environ.get('X', 0)))")
    installed(launcher, "wraps", "import cupy\nopened = True")
    launcher.write("t.py", "import wraps, os, sys\nprint(wraps.opened)")
    done = launcher.run("-n", "2", "python3", "t.py", **path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 2


LAZY = """
import sys

class Lazy:
    def __getattr__(self, name):
        import late
        raise AttributeError(name)

sys.modules["lazy"] = Lazy()
sys.modules["blocked"] = None
"""


def test_the_end_of_a_rank_imports_nothing(launcher):
    launcher.write("late.py", "print('imported')")
    done = launcher.run("-n", "1", "python3", "-c", LAZY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_package_that_has_opened_a_device_is_left_to_the_ranks(launcher):
    opens = "import os, sys\nsys.modules['__main__'].OPEN_FILES = 'open'\nloaded = os.getpid()\n"
    path = installed(launcher, "opens", opens)
    launcher.write("t.py", "import os, opens\nprint(opens.loaded == os.getpid())\n")
    (launcher.folder / "open").mkdir()
    (launcher.folder / "open" / "7").symlink_to("/dev/kfd")
    done = launcher.run("-n", "2", "python3", "t.py", **path)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


@pytest.mark.long
def test_four_ranks_of_torch_from_one_import(launcher):
    launcher.write(
        "t.py",
        """
import os, sys
ready = "torch" in sys.modules and "torch._dynamo" in sys.modules
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
total = torch.ones(()) * dist.get_rank()
dist.all_reduce(total)
weight = torch.ones(64, 64, requires_grad=True)
(weight @ weight).sum().backward()                     # OpenMP, MKL and autograd's threads work after a fork
print(ready, int(total), os.getppid(), torch.get_num_threads(), flush=True)
dist.destroy_process_group()
""",
    )
    done = launcher.run("-n", "4", "--device", "cpu", "python3", "t.py", timeout=PATIENCE, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    # one parent
    assert len(set(lines)) == 1
    assert lines[0].startswith("True 6 ")
    assert lines[0].endswith(" 2")


# Slurm's srun, as far as launch needs it: a task of a job with four GPUs on the host. It gets as many of them as the
# job's variables say that a task gets, and all without these.
SRUN = f"""#!{sys.executable}
import os, sys
per_task = os.environ.get("SLURM_GPUS_PER_TASK", "4")
if "SLURM_NTASKS_PER_GPU" in os.environ or "gres/gpu" in os.environ.get("SLURM_TRES_PER_TASK", ""): per_task = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(per_task))))
os.environ |= {{"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}}
command = sys.argv[sys.argv.index(sys.executable):]
os.execv(command[0], command)
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, {"SLURM_NTASKS_PER_GPU": "1"}],
    ids=["no", "gpus-per-task", "ntasks-per-gpu"],
)
def test_ranks_of_a_slurm_job_see_all_gpus_of_its_host(launcher, variables):
    """Each of them had one GPU a task: then all ranks of a host saw only that one, which is the agent's."""
    launcher.write("srun", SRUN).chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": socket.gethostname(), "SLURM_NTASKS": "4"}
    print_gpus = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    path = f"{launcher.folder}{os.pathsep}{os.environ['PATH']}"
    done = launcher.run("--device", "cpu", "python3", "-c", print_gpus, **job, **variables, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sees 0,1,2,3") == 4
