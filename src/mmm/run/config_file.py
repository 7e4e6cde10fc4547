"""Reads flags from a file, for ``--config FILE``: YAML or JSON, a value by the name of its flag.

A value is the text that stands in the file, read as on the command line (`mmm.run.flags`). The file may also be the
record of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError
from mmm.outside import read_file, short
from mmm.run.flags import EMPTY, Flag, read

# A run's record. Only a record has all of these keys.
RECORD = "config.json"
KEYS = {"module", "options", "command", "versions"}
# Flags of a record that are the run's own: its name, where it wrote, and what it resumed from.
OWN = ("name", "outdir", "overwrite", "resume")
# What a run's record says of the file, which is read before there is a run: `config_file` with its path and flags, None
# without a file. Empty in a program that `parse` has not read the flags of.
facts: dict[str, Any] = {}


def use(path: Path, known: Mapping[str, Flag]) -> dict[str, Any]:
    """Read the flags of a file, and note them in `facts`.

    Args:
        path: a file, or the folder of a run.
        known: the program's flags.

    Returns:
        Their values, by their fields.

    Raises:
        ConfigError: the file cannot be read; or has a flag that the program has not, or a value that the flag cannot
            have.
    """
    path = path.absolute()
    if path.is_dir():
        path /= RECORD
    try:
        content = _content(path)
        if content.keys() >= KEYS:
            content = {key: value for key, value in content["options"].items() if key not in OWN}
        arguments = {key: _arguments(key, value) for key, value in content.items()}
    except (OSError, RecursionError, ValueError) as error:
        # An error of YAML's has several lines.
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    flags = read(arguments.items(), known, f"--config {path}: ")
    facts["config_file"] = {"path": path, "flags": flags}
    return flags


def _arguments(key: str, value: Any) -> list[str]:
    """The arguments of a flag. Raises ValueError: its value is no text, number, true, false, null, or list of these."""
    arguments = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, (dict, list)):
            raise ValueError(f"{key}: {short(item)} is not a value of a flag; if it is a text, put it in quotes")
        # true, false and null of JSON are no texts. Its numbers are: those that stand there.
        arguments.append(item if isinstance(item, str) else json.dumps(item))
    return arguments or EMPTY


def _content(path: Path) -> dict[str, Any]:
    """The values of a file, by their keys: numbers as the texts that stand there. Raises OSError or ValueError."""
    text = read_file(path).decode()
    if path.suffix == ".json":
        content = json.loads(text, object_pairs_hook=by_key, parse_int=str, parse_float=str, parse_constant=str)
    else:
        content = _yaml(text)
    if not isinstance(content, dict):
        raise ValueError("it has no flags; give each as a line of YAML, such as `lr: 0.001`")
    return content


def by_key(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values by their keys. Raises ValueError for a key that is there twice: libraries take the later one."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{short(key)} is there twice")
        content[key] = value
    return content


def _yaml(text: str) -> Any:
    """The value of a YAML text. Raises ValueError."""
    import yaml

    class Loader(yaml.BaseLoader):
        """Values stay texts. PyYAML's other readers follow YAML 1.1, where 010 is 8, and 1:30 is 90."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            return by_key((str(key.value), self.construct_object(value)) for key, value in node.value)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None
