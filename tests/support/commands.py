"""Is a command line right? It is taken apart by the programs' own parsers, and nothing of it is done."""

import argparse
import importlib
import importlib.util
import re
import shlex
import sys

from mmm.run import config_file
from mmm.run.command_line import parse
from mmm_lab.cli.main import SUBCOMMANDS
from mmm_lab.cli.main import main as mmm
from mmm_launch.spec.options import parse as launch
from support.pages import ROOT, blocks

STARTERS = ("mpiexec", "srun", "torchrun", "apptainer")
# A block's line that is a command of ours, maybe after a prompt, and variables that are set for it alone.
OURS = re.compile(rf"(?:\$ )?(?:\w+=\S+ )*((?:launch|mmm|make|python3? -m|{'|'.join(STARTERS)}) [^: ].*)")
# Words that stand for others.
SYNOPSIS = re.compile(r"(?<!\S)(?:\[[-A-Z]|[A-Z_]{2,}(?!\S)|<\w+>)")


class Parsed(Exception):
    """A command line is right; nothing is done about it."""


def check_command(line, monkeypatch):
    """AssertionError, SystemExit with a code, or the program's own error: a program or a flag that is not there."""
    parse_args = argparse.ArgumentParser.parse_args
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def and_no_more(self, args=None, namespace=None):
        parsed = parse_args(self, args, namespace)
        if self.prog == "launch":
            # What it starts is to be checked too.
            return parsed
        raise Parsed

    def and_a_trainers(self, args=None, namespace=None):
        parsed, rest = parse_known_args(self, args, namespace)
        if self.prog == "mmm draw":
            _check_module(parsed.subject if parsed.subject.startswith("mmm.") else "mmm.trainer.lm", rest, patch)
            raise Parsed
        if self.prog == "mmm rerun":
            # The rest are flags of a program that only the record names.
            raise Parsed
        if self.prog == "mmm verify" and not self.add_help:
            # What follows --program FILE: the rest is the script's.
            raise Parsed
        return parsed, rest

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", and_no_more)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", and_a_trainers)
        # As if installed.
        patch.setattr("mmm.history.record.trackers.find_spec", lambda package: package)
        _check(shlex.split(line), patch)


def parse_alone(call):
    try:
        code = call()
    except Parsed:
        return
    raise AssertionError(f"nothing is parsed, or wrongly: exit code {code}")


def _check(argv, patch):
    program = argv[0]
    rest = argv[1:]
    if program == "launch":
        command = launch(rest).command
        # Else the page has `…` there.
        if command:
            _check(command, patch)
    elif program in STARTERS:
        if "-m" in rest:
            _check_python(rest[rest.index("-m") :], patch)
    elif program in ("python3", "python"):
        _check_python(rest, patch)
    elif program == "mmm":
        assert rest[0] in SUBCOMMANDS
        parse_alone(lambda: mmm(rest))
        # And then a program.
        if "--" in rest:
            _check(rest[rest.index("--") + 1 :], patch)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    else:  # a name in Python
        assert not rest
        module, _, name = program.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def _check_python(argv, patch):
    if argv[0] != "-m":
        assert not argv[0].startswith("benchmarks/") or (ROOT / argv[0]).is_file()
        return
    module = argv[1]
    flags = argv[2:]
    if module in ("mmm_lab.cli.main", "mmm_launch"):
        _check(["mmm" if module == "mmm_lab.cli.main" else "launch", *flags], patch)
    elif module == "mmm.examples":
        _check(["mmm", "examples", *flags], patch)
    elif module.startswith(("mmm.", "mmm_lab.")):
        _check_module(module, flags, patch)
    else:  # one that runs another
        assert importlib.util.find_spec(module) is not None
        if "-m" in flags:
            _check_python(flags[flags.index("-m") :], patch)


def _check_module(module, flags, patch):
    main_module = importlib.import_module("mmm_lab.parity.__main__" if module == "mmm_lab.parity" else module)
    patch.setattr(sys, "argv", [module, *flags])
    # Pages name files that are not here.
    patch.setattr(config_file, "use", lambda *_: {})
    config = main_module.Options if module == "mmm_lab.parity" else main_module.Config
    try:
        parse(config)
    except SystemExit as leaving:
        if "--help" not in flags or leaving.code:
            raise


def commands_in(text):
    """The commands of ours in a page's blocks, without comments, pipes and `…`; no synopsis, and no output."""
    commands = []
    for block in blocks(text):
        if block.language in ("", "bash", "sh", "console"):
            lines = re.sub(r" *\\\n *", " ", block.text).splitlines()
            if block.language == "console":
                lines = [line for line in lines if line.startswith("$ ")]
            lines = [re.sub(r"\s+#\s.*|\s+…(?!\S)", "", line) for line in lines]
            commands += [
                match[1]
                for line in lines
                for command in line.split(" && ")
                if (match := OURS.fullmatch(command.strip()))
            ]
    lines = [re.split(r"\s+(?:[|>&]|2>)", line)[0] for line in commands]
    # A script's variable for a rate.
    lines = [re.sub(r"--lr \$\w+", "--lr 1", line) for line in lines]
    # Others, such as that of a folder, have any value.
    lines = [re.sub(r"\$\w+", "x", line) for line in lines]
    return list(dict.fromkeys(line for line in lines if not SYNOPSIS.search(line)))
