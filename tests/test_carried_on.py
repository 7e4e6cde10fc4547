"""The files for those who carry the project on agree with it, and with one another: CONTRIBUTING.md, AGENTS.md, the
workflow of GitHub beside `.ci/run`, pre-commit's hooks beside `make lint`, CITATION.cff."""

import os
import re
from pathlib import Path

import pytest
import yaml

import mmm
from support.pages import ROOT, prose

TARGET = re.compile(r"^make (\S+)$", re.MULTILINE)
PATH = re.compile(r"`((?:src|tests|docs|packages|\.ci|\.github)/[^`\s]+)`")
# What CI runs.
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def rules_of(makefile):
    """The commands of each rule of a Makefile, by target."""
    rules = {}
    for rule in re.finditer(r"^([\w-]+):[^=\n]*\n((?:\t.*\n)+)", makefile, re.MULTILINE):
        rules[rule[1]] = [line.strip() for line in rule[2].splitlines()]
    return rules


def targets_of(workflow):
    """The targets that a workflow makes: those of its steps, with a matrix's values put in."""
    targets = []
    for job in workflow["jobs"].values():
        values = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for value in values:
            for step in job["steps"]:
                targets += TARGET.findall(step.get("run", "").replace("${{ matrix.target }}", value))
    return targets


def test_the_workflow_makes_what_ci_makes():
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    targets = TARGET.findall(read(".ci/run"))
    assert len(targets) >= 6
    assert sorted(targets_of(workflow)) == sorted(targets)
    assert set(targets) <= rules_of(read("Makefile")).keys()


def test_a_target_that_one_of_them_lacks_is_seen():
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    workflow["jobs"]["make"]["strategy"]["matrix"]["target"].remove("docs")
    assert sorted(targets_of(workflow)) != sorted(TARGET.findall(read(".ci/run")))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_form_of_one(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML reads the key "on" as a truth value.
    assert workflow.keys() == {"name", True, "permissions", "concurrency", "jobs"}
    assert workflow[True].keys() <= {"push", "pull_request", "workflow_dispatch", "schedule"}
    # Nothing that a change brings along can write to the repository.
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.keys() <= {"name", "runs-on", "timeout-minutes", "container", "strategy", "env", "steps"}
        for step in job["steps"]:
            assert step.keys() <= {"name", "uses", "with", "env", "run"}
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
            for line in step.get("run", "").splitlines():
                if not line.startswith("make "):
                    assert os.access(ROOT / line, os.X_OK), line


def test_pre_commit_runs_the_linters_of_make_lint():
    (repo,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repo["repo"] == "local"
    versions = dict(re.findall(r"^([\w-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    hooks = []
    for hook in repo["hooks"]:
        hooks.append(hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude"))
        for requirement in hook.get("additional_dependencies", []):
            package, _, version = requirement.partition("==")
            assert versions[package] == version, requirement
    # $(BIN)/ruff format --check . → ruff format
    linters = [re.sub(r"^\$\(BIN\)/| --check| \.$", "", line) for line in rules_of(read("Makefile"))["lint"]]
    assert sorted(hooks) == sorted(linters)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == mmm.__version__
    assert citation["license"] == "MIT"


def gone(page):
    """The files that a page names and the repository does not have. Words in capitals stand for names."""
    text = read(page)
    # A block of commands names files as well.
    named = [*PATH.findall(text), *re.findall(r"(?<=\s)tests/[\w/]+\.py", text)]
    assert named
    return [name for name in named if not re.search(r"[A-Z]{3,}", name) and not any(Path(ROOT).glob(name.rstrip("/")))]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "AGENTS.md"])
def test_a_page_names_files_that_exist(page):
    assert gone(page) == []


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", read("CONTRIBUTING.md")))))
def test_targets_that_the_page_names(target):
    assert target in rules_of(read("Makefile")) or target == "install"


def test_names_in_files_that_the_page_names():
    """`PRESETS`, `_ABOUT`, `Techniques`, …: what a row of a table tells to edit is in the file of that row."""
    rows = [line.split("|")[1:-1] for line in read("CONTRIBUTING.md").splitlines() if line.startswith("| `src/")]
    assert len(rows) > 15
    for row in rows:
        file = row[0]
        claim = row[1]
        for path in re.findall(r"`(src/[^`]+\.py)`", file):
            if re.search(r"[A-Z]{4,}", path):
                continue
            source = read(path)
            for name in re.findall(r"`(_?[A-Z][A-Za-z_]+)(?:\.(\w+))?`", claim):
                for piece in filter(None, name):
                    if piece != "NAME":
                        assert re.search(rf"\b{piece}\b", source), (path, piece)


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_issue_templates_have_their_head(name):
    head = read(f".github/ISSUE_TEMPLATE/{name}.md").split("---\n")[1]
    assert {"name", "about"} <= yaml.safe_load(head).keys()
    assert "SECURITY.md" in prose(read(".github/ISSUE_TEMPLATE/bug_report.md"))
