"""What a rank finds: its environment, arguments, path and module, the same forked and spawned."""

import json
import os

import pytest

from support.launcher import SPAWNED_IN_LONG

LOOK = """
import json, os, sys
import beside
json.dump({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
           "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(),
           "stdin": sys.stdin.read(), "group": os.getpgid(0)},
          open(os.environ["RANK"] + ".json", "w"))
"""
CHANGING = {
    "MMM_FAILURE_SOCKET",
    "MMM_PROGRAM",
    "MASTER_PORT",
    "MMM_LAUNCH_ID",
    "MMM_ATTEMPTS_OF",
    "MMM_LAUNCH_LINE",
    "MMM_LAUNCH_BEGAN",
    "MMM_LAUNCH_VERDICT",
}  # of the launch, not of its way


@pytest.fixture
def look(launcher):
    launcher.write("folder/look.py", LOOK)
    launcher.write("folder/__init__.py", "")
    launcher.write("folder/beside.py", "")
    launcher.write("beside.py", "")

    def run(*words, **variables):
        done = launcher.run(*words, **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads((launcher.folder / f"{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.mark.parametrize("command", [["python3", "folder/look.py"], ["python3", "-m", "folder.look"]])
def test_forked_and_spawned_ranks_find_the_same(look, launcher, command):
    forked = look("-n", "2", *command, "--lr", "a b")
    spawned = look("-n", "2", "--no-prefork", *command, "--lr", "a b")
    script = command[-1] == "folder/look.py"
    for rank, (one, other) in enumerate(zip(forked, spawned, strict=True)):
        for found in (one, other):
            environment = found["env"]
            assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
            assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
            assert found["argv"][1:] == ["--lr", "a b"]
            assert found["argv"][0] == ("folder/look.py" if script else str(launcher.folder / "folder/look.py"))
            assert found["path"] == str(launcher.folder / "folder" if script else launcher.folder)
            assert found["spec"] == (None if script else "folder.look")
            assert (found["name"], found["main"], found["stdin"]) == ("__main__", True, "")
            assert found["group"] != os.getpgid(0)
        assert {k: v for k, v in one["env"].items() if k not in CHANGING} == {
            k: v for k, v in other["env"].items() if k not in CHANGING
        }


def test_a_program_that_is_no_python(launcher):
    done = launcher.run("-n", "3", "sh", "-c", "echo $RANK of $WORLD_SIZE, $MMM_FAILURE_FD$MMM_LAUNCH_AGENT")
    assert done.returncode == 0
    assert {line[:6] for line in done.stdout.splitlines()} == {"0 of 3", "1 of 3", "2 of 3"}


def test_code_and_python_flags(launcher, how):
    done = launcher.run(
        *how,
        "-n",
        "1",
        "python3",
        "-O",
        "-X",
        "utf8",
        "-c",
        "import sys; print(sys.flags.optimize, sys._xoptions, sys.argv, __name__)",
        "a",
    )
    assert done.stdout == "1 {'utf8': True} ['-c', 'a'] __main__\n"


@SPAWNED_IN_LONG
def test_output_into_a_pipe_comes_by_the_line(launcher, how):
    launcher.write("t.py", "import os, time\nprint('early')\nopen('done', 'w')\ntime.sleep(30)")
    process = launcher.start(*how, "-n", "1", "python3", "t.py")
    launcher.wait_for("done")
    process.kill()
    assert process.communicate()[0] == "early\n"


@SPAWNED_IN_LONG
def test_lines_of_ranks_do_not_mix(launcher, how):
    """Each is one write, also where python was asked not to buffer: then `print` would write a line's end by itself."""
    launcher.write("t.py", "import sys\nfor s in sys.stdout, sys.stderr: print(s.line_buffering, s.write_through)")
    done = launcher.run(*how, "-n", "3", "python3", "t.py", PYTHONUNBUFFERED="1")
    assert done.stdout.splitlines() == ["True False"] * 6
