"""Advisories claim what was run, and nothing else; the command prints those that concern what is installed."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from mmm_verify import audit
from mmm_verify.command import main

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "advisories"


@pytest.mark.parametrize(
    ("version", "is_wrong"),
    [
        ("1.2.0", True),
        ("1.2.0+cu128", True),
        # Between two wrong ones. 1.10 is after 1.9.
        ("1.9.1", True),
        ("1.10.0", True),
        # Before the first wrong one, between a wrong and a right one, and in a gap with a right one in it.
        ("1.1.9", False),
        ("1.10.1", False),
        ("1.11.0", False),
        ("1.5.0", True),
        ("2.0.0", False),
        # A nightly build may have the cure.
        ("1.9.0.dev20250101", False),
    ],
)
def test_only_what_was_run_is_claimed(version, is_wrong):
    entry = {"wrong": ["1.10.0", "1.2.0"], "right": ["1.11.0"]}
    assert audit.is_wrong(version, entry) == is_wrong


def test_a_right_version_between_two_wrong_ones_ends_the_claim():
    entry = {"wrong": ["1.0", "1.4"], "right": ["1.2"]}
    assert [audit.is_wrong(version, entry) for version in ("1.0", "1.1", "1.2", "1.3", "1.4")] == [1, 0, 0, 0, 1]


def test_each_entry_has_both_versions_and_programs_that_exist():
    """An entry of which one side was not run would accuse a version by hearsay."""
    keys = {"id", "package", "wrong", "right", "when", "says", "remedy", "threads"}
    keys |= {"program", "control", "control_is", "needs"}
    for entry in audit.advisories():
        assert entry.keys() == keys
        assert entry["wrong"]
        assert entry["right"]
        for line in (entry["program"], entry["control"]):
            module = re.split(r"[:.]", line.removeprefix("--program "))[0]
            assert len((PROGRAMS / f"{module}.py").read_text().splitlines()) <= 60


def test_the_command(monkeypatch, capsys):
    installed = {"torch": "2.8.0+cpu"}

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["audit"]) == 1
    printed = capsys.readouterr().out
    assert "torch-full-tensor-uneven" in printed
    assert "deepspeed-" not in printed
    installed["torch"] = "2.13.0"
    assert main(["audit"]) == 0
    assert "torch 2.13.0: advisories that apply: none" in capsys.readouterr().out
