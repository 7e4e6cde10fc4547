"""The parts of pages that are made from the code when the site is built: a function each, to Markdown."""

import contextlib
import importlib
import inspect
import io
import os
import typing
from dataclasses import fields, is_dataclass
from types import NoneType

import planner_data as planner_page

from mmm.history.record import dataset
from mmm.run.command_line import texts_of
from mmm_lab.cli.main import SUBCOMMANDS
from mmm_lab.cli.main import main as mmm
from mmm_launch.main import main as launch

PROGRAMS = ("lm", "vit", "cnn")
# The packages whose names are for programs of one's own.
PUBLIC = (
    "mmm.parallel",
    "mmm.trainer",
    "mmm.history",
    "mmm.checkpoint",
    "mmm.data",
    "mmm_verify",
    "mmm_verify.testing",
)
WIDTH = "100"  # of --help, in characters


def commands():
    """`mmm`, each of its subcommands and `launch`, as --help has them."""
    lines = ["| command | |", "| --- | --- |"]
    lines += [f"| [`mmm {name}`](#mmm-{name}) | {about} |" for name, about in SUBCOMMANDS.items()]
    lines += ["| [`launch`](#launch) | start a program on many ranks |"]
    for name in SUBCOMMANDS:
        lines += [f"\n## mmm {name}\n", f"```text\n{help_of(mmm, [name, '--help'])}\n```"]
    return "\n".join([*lines, "\n## launch\n", f"```text\n{help_of(launch, ['--help'])}\n```"])


def help_of(main, argv):
    """What a command prints."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(argv)
    os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    text = out.getvalue().rstrip()
    if not text:
        raise ValueError(f"{argv}: nothing is printed")
    return text


def flags():
    """Each trainer's flags, a table a group."""
    parts = []
    for program in PROGRAMS:
        config = importlib.import_module(f"mmm.trainer.{program}").Config
        parts += [f"## mmm.trainer.{program}\n", f"{inspect.getdoc(config)}\n"]
        for group in fields(config):
            value = getattr(config(), group.name)
            if is_dataclass(value):
                parts += [f"### {program}: {group.name}\n", f"{inspect.getdoc(value)}\n", group_table(value, config)]
    return "\n".join(parts)


def group_table(group, config):
    """The flags of a group that a program has, given with its defaults."""
    about = texts_of(type(group))
    types = typing.get_type_hints(type(group))
    lines = ["| flag | type | default | what it does |", "| --- | --- | --- | --- |"]
    for field in fields(group):
        if field.name in config.LEFT_OUT:
            continue
        value = getattr(group, field.name)
        default = "" if value is None else f"`{value}`"
        text = " ".join(about.get(field.name, "").split()).replace("|", "\\|").replace("<", "&lt;")
        if field.name in config.UNLISTED:
            text += " (`--help` does not list it.)"
        lines.append(f"| `--{field.name.rstrip('_')}` | {type_text(types[field.name])} | {default} | {text} |")
    return "\n".join(lines) + "\n"


def type_text(kind):
    """A type, as who types a flag needs it."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) in (tuple, list):
        return f"{type_text(typing.get_args(kind)[0])} …"
    if len(inner := [each for each in typing.get_args(kind) if each is not NoneType]) > 0:
        return ", ".join(type_text(each) for each in inner)
    return "switch" if kind is bool else kind.__name__


def columns():
    """The columns that a row may have."""
    lines = ["| column | what it is | unit |", "| --- | --- | --- |"]
    for name in dataset._ABOUT:
        about = dataset.about(name)
        lines.append(f"| `{name}` | {about['long_name']} | {about.get('units', '')} |")
    return "\n".join(lines)


def planner_data():
    """The models and machines that the planner's page counts with."""
    return f"<script>\n{planner_page.script()}</script>"


def api():
    """Each public package's names, which mkdocstrings then fills in from their docstrings."""
    parts = []
    for name in PUBLIC:
        package = importlib.import_module(name)
        parts += [f"## {name}\n", f"{inspect.getdoc(package)}\n"]
        names = getattr(package, "__all__", None) or dir(package)
        parts += [f"::: {name}.{each}\n" for each in names]
    return "\n".join(parts)
