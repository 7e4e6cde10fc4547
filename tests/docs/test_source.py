"""Pages that say where something is in the code: the files and functions that they name exist."""

import ast
import re

import pytest

from support.pages import DOCS, ROOT, prose

PAGE = DOCS / "source.md"
# - [`mmm/parallel/clip.py`](../src/mmm/parallel/clip.py): `local_norms`, `Step.check`
ENTRY = re.compile(r"^- \[`(?P<shown>[^`]+)`\]\((?P<link>[^)]+)\):(?P<rest>(?:.|\n(?!\n|- ))*)", re.MULTILINE)
# A heading that asks where something is.
QUESTION = re.compile(r"^### (?P<text>.+\?)$", re.MULTILINE)
N_QUESTIONS = 12


def entries(text):
    """Each entry of a page: the file, as shown and as linked, and the names that it lists."""
    names = []
    for entry in ENTRY.finditer(text):
        names.append((entry["shown"], entry["link"], re.findall(r"`([^`]+)`", entry["rest"])))
    return names


def names_in(source):
    """The names that a file defines: of functions, classes, and their methods."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


def missing(text, folder):
    """What a page names and the code does not have."""
    wrong = []
    for shown, link, names in entries(text):
        file = folder / link
        if not file.is_file() or not str(file.resolve()).endswith(shown):
            wrong.append(shown)
            continue
        known = names_in(file.read_text(encoding="utf-8"))
        wrong += [f"{shown}: {name}" for name in names if name not in known]
    return wrong


def answers():
    """The part of the page that has the questions."""
    return PAGE.read_text(encoding="utf-8").partition("## Twelve questions\n")[2].partition("\n## ")[0]


def test_the_answers_name_what_exists():
    assert missing(answers(), DOCS) == []


def test_each_question_has_an_answer_and_files():
    _, *parts = QUESTION.split(answers())
    assert len(parts) == 2 * N_QUESTIONS
    for question, answer in zip(parts[::2], parts[1::2], strict=True):
        assert any(names for _, _, names in entries(answer)), question
        # An answer, and not only its list.
        assert len(prose(answer.partition("\n- ")[0]).split()) > 25, question


def test_what_is_gone_is_seen():
    sample = "- [`docs/test_source.py`](test_source.py): `names_in`,\n  `{}`\n"
    folder = ROOT / "tests/docs"
    assert entries(sample.format("missing"))[0][2] == ["names_in", "missing"]
    assert missing(sample.format("missing"), folder) == []
    assert missing(sample.format("gone"), folder) == ["docs/test_source.py: gone"]
    assert missing("- [`docs/gone.py`](gone.py): `f`\n", folder) == ["docs/gone.py"]


@pytest.mark.parametrize("name", ["Rank.is_main", "fork_ranks"])
def test_methods_and_functions_are_found(name):
    assert name in names_in((ROOT / "src/mmm_verify/ranks/ranks.py").read_text(encoding="utf-8"))
