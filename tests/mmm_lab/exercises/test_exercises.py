"""Each exercise: the file that one begins with is told so, wrong answers are told apart, the right one passes."""

import re
import time
from pathlib import Path

import pytest

from mmm_lab.cli.main import main
from mmm_lab.exercises import NAMES
from mmm_lab.exercises.check import check_file, exercise, file_of
from support.clock import stretched
from support.pages import DOCS

PAGE = (DOCS / "answers.md").read_text(encoding="utf-8")
# The answers of the page, by exercise.
RIGHT = dict(re.findall(r"^## `(\w+)`$.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
# What the check says, and a program; or what it says, a piece of the right answer, and what takes its place.
WRONG = {
    "all_reduce": [
        ("each dp rank kept its own|partial over dp|1/2", "def all_reduce(x, group):\n    return x"),
        (
            "send and receive alone",
            "import torch.distributed as dist\ndef all_reduce(x, group):\n    dist.all_reduce(x)\n    return x",
        ),
        (
            "on rank 1",
            """
import torch
import torch.distributed as dist
def all_reduce(x, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank:
        dist.send(x, group=group, group_dst=0)
        return x
    total = x.clone()
    for other in range(1, size):
        came = torch.empty_like(x)
        dist.recv(came, group=group, group_src=other)
        total = total + came
    return total
""",
        ),
    ],
    "column_row": [
        (r"gradient of blocks\.1\.norm.*\n.*partial over tp", "enter(x, group)", "x"),
        (
            r"output of blocks\.(0|1\.norm)",
            "leave(F.linear(hidden, w2), group) + b2",
            "leave(F.linear(hidden, w2, b2), group)",
        ),
        (r"output of blocks\.(0|1\.norm)", "leave(F.linear(hidden, w2), group)", "F.linear(hidden, w2)"),
    ],
    "sequence_norms": [
        ("partial over tp", "def sync_gradients(model, group):\n    pass"),
        (
            "1/2",
            "dist.all_reduce(parameter.grad, group=group)",
            "dist.all_reduce(parameter.grad.div_(dist.get_world_size(group)), group=group)",
        ),
    ],
    "fsdp_sum": [
        (
            "first difference: the loss|the loss on rank",
            "import torch.nn.functional as F\n"
            "def local_loss(logits, targets, group):\n    return F.cross_entropy(logits, targets)",
        ),
        (r"every gradient\n.*1/2", " * dist.get_world_size(group)", ""),
    ],
    "zero2": [
        ("first difference: inlet.weight", "own /= size", "pass"),
        ("first difference: second step", "momentum.mul_(0.9).add_(own)", "momentum.copy_(own)"),
        (
            "inlet.weight on rank 1",
            "return all_gather(part, group)",
            "parameters.chunk(size)[rank].copy_(part)\n    return parameters",
        ),
    ],
    "microbatches": [
        ("the loss", ', reduction="sum") / count', ")"),
        (
            "12 samples at once: a micro-batch has 3",
            "import torch.nn.functional as F\ndef accumulate(model, inputs, targets, microbatches):\n"
            "    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())\n"
            "    loss.backward()\n    return loss.detach()",
        ),
        (
            "before the backward of the micro-batch before it",
            "def accumulate(model, inputs, targets, microbatches):\n"
            "    logits = [model(x) for x in inputs.chunk(microbatches)]\n    return logits[0].sum()",
        ),
    ],
    "ring_attention": [
        (
            "by itself|output of",
            "import torch.nn.functional as F\ndef attention(q, k, v, group):\n"
            "    return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        ),
        ("output of", "theirs > mine", "theirs < 0"),
    ],
    "expert_all_to_all": [
        ("output of|the loss", "torch.empty_like(back).index_copy(0, order, back)", "back"),
        ("output of|the loss", "def route(tokens, expert_of, expert, group):\n    return expert(tokens)"),
    ],
    "two_d": [
        (
            "it should have",
            '        fully_shard(block, mesh=mesh["dp"])\n    fully_shard(model, mesh=mesh["dp"])\n',
            "",
        ),
        ("each dp rank kept its own", '    fully_shard(model, mesh=mesh["dp"])\n', ""),
    ],
    "resume": [
        (
            "step 3: .*the weights are not those of the checkpoint",
            "def load(model, optimizer, folder):\n    pass",
        ),
        (
            "step 4: .*what the optimizer has to remember",
            "import torch.distributed.checkpoint as dcp\ndef load(model, optimizer, folder):\n"
            "    state = model.state_dict()\n    dcp.load({'model': state}, checkpoint_id=folder)\n"
            "    model.load_state_dict(state)",
        ),
        (
            "load fails",
            "import torch\ndef load(model, optimizer, folder):\n    model.load_state_dict(torch.load(folder))",
        ),
        (
            "step 4: .*lr",
            'set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])',
            "",
        ),
    ],
}


def wrong_answer(name, n):
    """A wrong program, and what the check has to say of it."""
    says, *code = WRONG[name][n]
    if len(code) == 1:
        return code[0], says
    before, after = code
    assert RIGHT[name].count(before) == 1, before
    return RIGHT[name].replace(before, after), says


# Every wrong answer of every exercise.
CASES = [(name, n) for name in NAMES for n in range(len(WRONG[name]))]


def write(folder, name, code):
    path = folder / f"{name}.py"
    path.write_text(f'EXERCISE = "{name}"\n{code}')
    return path


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])])
def test_the_file_to_begin_with(name, tmp_path):
    path = tmp_path / "mmm" / "mine.py"
    path.parent.mkdir()
    path.write_text(file_of(name))
    result = check_file(path)
    assert not result.right
    assert result.text == f"nothing is written yet: write {exercise(name).FUNCTION}"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_s_answer_is_right(name, tmp_path):
    began = time.monotonic()
    result = check_file(write(tmp_path, name, RIGHT[name]))
    assert result.right, result.text
    # 20 on a machine that does nothing else
    assert time.monotonic() - began < stretched(60)


@pytest.mark.long
@pytest.mark.parametrize(("name", "n"), CASES)
def test_wrong(name, n, tmp_path):
    code, says = wrong_answer(name, n)
    result = check_file(write(tmp_path, name, code))
    assert not result.right
    assert re.search(says, result.text), result.text


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["exercise"]) == 0
    listed = capsys.readouterr().out
    for name in NAMES:
        assert name in listed
    assert main(["exercise", "start", "two_d"]) == 0
    assert main(["exercise", "check", "two_d.py"]) == 1
    assert "not yet" in capsys.readouterr().out
    assert main(["exercise", "check", str(write(tmp_path, "microbatches", RIGHT["microbatches"]))]) == 0
    assert capsys.readouterr().out.endswith("right\n")
    for wrong, says in (
        (["start", "two_d"], "two_d.py cannot be written: File exists"),
        (["start", "three_d"], "there is no such exercise"),
        (["check", "nowhere.py"], "cannot be read"),
    ):
        assert main(["exercise", *wrong]) == 2
        assert says in capsys.readouterr().err
    for code, says in (
        ("x = 1", "does not say which exercise it is"),
        ('EXERCISE = "two_d"\nx = (', "cannot be imported: SyntaxError"),
        ('EXERCISE = "two_d"\n', "has no function shard"),
    ):
        (tmp_path / "bad.py").write_text(code)
        assert main(["exercise", "check", "bad.py"]) == 2
        assert says in capsys.readouterr().err


def test_what_the_page_shows(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "exercises.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"\$ mmm exercise check column_row.py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    begun = file_of("column_row")
    (tmp_path / "column_row.py").write_text(begun[: begun.index("def mlp")] + code)
    assert main(["exercise", "check", "column_row.py"]) == 1
    assert plain(capsys.readouterr().out) == plain(shown)


def plain(text):
    """Without what rounding decides."""
    return re.sub(r"\d(\.\d+)?e[+-]\d+", "…", text).strip()
