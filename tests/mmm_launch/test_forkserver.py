"""One process imports, and forks the ranks; the target runs in the ranks alone."""

import json
import os

from support.clock import PATIENCE

LOOK = """
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
    launcher.write("t.py", LOOK)
    assert launcher.run("-n", "2", "python3", "t.py").returncode == 0
    one, other = found(launcher, 2)
    assert one["parent"] == other["parent"]
    assert one["at_start"] == {"numpy": True, "tool": False, "h5py": True, "rich": False}
    assert len([name for name in os.listdir(launcher.folder) if name.startswith("tool-")]) == 2  # the two ranks


def test_spawned_ranks_start_without(launcher):
    launcher.write("tool.py", "")
    launcher.write("t.py", LOOK)
    assert launcher.run("-n", "2", "--no-prefork", "python3", "t.py").returncode == 0
    assert found(launcher, 2)[0]["at_start"] == {"numpy": False, "tool": False, "h5py": False, "rich": False}


def installed(launcher, name, text):
    """A package that counts as installed."""
    launcher.write(f"site-packages/{name}.py", text)
    return {"PYTHONPATH": str(launcher.folder / "site-packages")}


def test_a_package_that_fails_to_import_fails_in_the_target_as_ever(launcher):
    path = installed(
        launcher,
        "halfway",
        "import os, sys\nsys.halfway = getattr(sys, 'halfway', 0) + 1\nraise OSError(f'try {sys.halfway}')\n",
    )
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
    launcher.write("t.py", LAZY)
    done = launcher.run("-n", "1", "python3", "t.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_package_that_has_opened_a_device_is_left_to_the_ranks(launcher):
    path = installed(
        launcher,
        "opens",
        "import os, sys\nsys.modules['__main__'].OPEN_FILES = 'open'\nloaded = os.getpid()\n",
    )
    launcher.write("t.py", "import os, opens\nprint(opens.loaded == os.getpid())\n")
    (launcher.folder / "open").mkdir()
    (launcher.folder / "open" / "7").symlink_to("/dev/kfd")
    done = launcher.run("-n", "2", "python3", "t.py", **path)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


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
    assert len(set(lines)) == 1  # one parent
    assert lines[0].startswith("True 6 ")
    assert lines[0].endswith(" 2")
