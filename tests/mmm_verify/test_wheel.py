"""The README of the wheel, and the GitHub Action beside it: what they show is run here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.clock import PATIENCE, long
from support.console import check_page
from support.pages import ROOT, blocks

README = ROOT / "packages/verify/README.md"
ACTION = ROOT / "packages/verify/action.yml"
# Stands for the command that the wheel installs.
SHIM = f"""#!/bin/sh
PYTHONPATH={ROOT / "src"} exec {sys.executable} -m mmm_verify "$@"
"""


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`mmm-verify` on the PATH, as the wheel would install it."""
    program(tmp_path / "bin/mmm-verify", SHIM)
    program(tmp_path / "bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def files_of_the_readme(folder):
    for block in blocks(README.read_text()):
        if block.language == "python":
            name = re.match(r"# (\w+\.py)\n", block.text)[1]
            (folder / name).write_text(block.text)


@pytest.mark.long
def test_the_readme_shows_what_its_commands_print(tmp_path, command):
    assert not check_page(README, tmp_path)


@pytest.mark.long
def test_its_test_passes(tmp_path):
    files_of_the_readme(tmp_path)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mmm_verify.testing.plugin"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_ADDOPTS": ""}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": PATIENCE}
    run = subprocess.run([*line, "test_mlp.py"], **options)
    assert "3 passed" in run.stdout, run.stdout


@pytest.mark.long
def test_a_reader_that_ends_early(tmp_path, command):
    files_of_the_readme(tmp_path)
    line = ["mmm-verify", *MLP.values(), "--parallelize", "mlp:parallelize"]
    line.insert(2, "--batch")
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE) == 2


def action():
    return yaml.safe_load(ACTION.read_text())


def step(name):
    (only,) = [job_step for job_step in action()["runs"]["steps"] if job_step.get("name") == name]
    return only


def run_step(name, folder, **inputs):
    """Run a step's script as GitHub does, with these inputs. Returns its exit code, and what it printed."""
    values = {key: value["default"] for key, value in action()["inputs"].items() if "default" in value} | inputs
    files = {}
    for variable in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        files[variable] = str(folder / variable)
        Path(files[variable]).touch()
    own = {}
    for variable, text in step(name)["env"].items():
        own[variable] = re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], text)
    env = {**os.environ, **files, **own, "RUNNER_TEMP": str(folder), "GITHUB_ACTION_PATH": str(ACTION.parent)}
    (folder / "step.sh").write_text(step(name)["run"])
    line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "step.sh")]
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": PATIENCE}
    run = subprocess.run(line, **options)
    return run.returncode, run.stdout + run.stderr


# The inputs of the action for the model of the page.
MLP = {"module": "mlp:make_model", "batch": "mlp:make_batch"}
TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
n_samples = 8 // dist.get_world_size()
for step in range(4):
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    own = slice(dist.get_rank() * n_samples, (dist.get_rank() + 1) * n_samples)
    optimizer.zero_grad()
    loss = (model(x[own]) - y[own]).square().mean()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("inputs", "code", "result", "says"),
    [
        long({"parallelize": "mlp:parallelize", "mesh": "dp1 dp2"}, 0, "same", "same: dp1"),
        (
            {"parallelize": "mlp:forgets_a_layer", "dtype": "float32"},
            1,
            "not the same",
            "2.weight on rank 0: each dp rank kept its own value",
        ),
        long({"parallelize": "mlp:$(touch run)"}, 2, "not comparable", "mlp has no $(touch run)"),
        long({"arguments": "--optimizer 'mlp:no such' --mesh dp2"}, 2, "not comparable", "mlp has no no such"),
    ],
)
def test_the_action_verifies(tmp_path, command, inputs, code, result, says):
    files_of_the_readme(tmp_path)
    done, printed = run_step("Verify", tmp_path, **MLP, **inputs)
    assert done == code, printed
    assert says in printed
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"result={result}\n"
    assert says in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_action_verifies_a_script(tmp_path, command):
    (tmp_path / "train.py").write_text(TRAIN)
    done, printed = run_step("Verify", tmp_path, program="train.py --lr 0.1", ranks="1,2")
    assert done == 0, printed
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == "result=same\n"


def test_the_action_installs_the_cpu_s_torch_and_this_house(tmp_path, monkeypatch):
    """Pip is another program here: what it is asked for is looked at."""
    program(tmp_path / "bin/python", f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for torch in ("", "2.13.0"):
        assert run_step("Install PyTorch and mmm-verify", tmp_path, torch=torch)[0] == 0
    newest, house, fixed, _ = (tmp_path / "asked").read_text().splitlines()
    assert newest == "-m pip install torch --index-url https://download.pytorch.org/whl/cpu"
    assert house == f"-m pip install {ROOT / 'packages/verify'}"
    assert "torch==2.13.0" in fixed


@pytest.mark.parametrize("page", [README, ROOT / "docs/verify-project.md"], ids=["README", "docs"])
def test_workflows_use_the_inputs_that_there_are(page):
    inputs = action()["inputs"]
    used = 0
    for block in blocks(page.read_text()):
        if block.language != "yaml":
            continue
        for job in yaml.safe_load(block.text)["jobs"].values():
            for job_step in job["steps"]:
                if "/packages/verify@" in job_step.get("uses", ""):
                    used += 1
                    assert set(job_step["with"]) <= set(inputs)
                    assert {"module", "program"} & set(job_step["with"])
    assert used
