"""Reads flags from a file, for ``--config FILE``: YAML, TOML or JSON, a value by the name of its flag.

The file may also be the record of a run.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mmm.errors import ConfigError
from mmm.outside import parse_json, read_file, short

# A run's record, which has the flags below "options".
RECORD = "config.json"
# Flags of a record that are the run's own: its name, where it wrote, and what it resumed from.
OWN = ("name", "outdir", "overwrite", "resume")
# What a run's record says of the file, which is read before there is a run: `config_file` with its path and flags, None
# without a file. Empty in a program that does not take ``--config``.
facts: dict[str, Any] = {}
# What an error says that a flag takes.
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


@dataclass(frozen=True)
class ConfigFile:
    """A file of flags, as it was read.

    Attributes:
        path: the file, absolute.
        flags: value by the name of its flag, of the flag's type. A value that is null in the file is left out.
    """

    path: Path
    flags: Mapping[str, Any]


def split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of ``--config`` in a command line, and the other arguments.

    Raises:
        ConfigError: the flag has no file, or is there twice.
    """
    paths: list[str] = []
    others: list[str] = []
    queue = list(argv)
    while queue:
        argument = queue.pop(0)
        flag, equals, value = argument.partition("=")
        if flag != "--config":
            others.append(argument)
            continue
        # "--config=FILE", or "--config" and then FILE.
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError("--config without a file: give one, such as --config sweep.yaml")
            value = queue.pop(0)
        paths.append(value)
    if len(paths) > 1:
        all_flags = " ".join(f"--config {path}" for path in paths)
        raise ConfigError(f"{all_flags}: give one file")
    if not paths:
        return None, others
    return Path(paths[0]), others


def read(
    path: Path,
    config: type,
    left_out: Collection[str] = (),
) -> ConfigFile:
    """Read the flags of a file.

    Args:
        path: a file, or the folder of a run.
        config: the program's class of flags, as the command line takes it.
        left_out: flags that have no effect in this program.

    Raises:
        ConfigError: the file cannot be read; or has a flag that the program has not, or a value that the flag cannot
            have.
    """
    path = path.expanduser().absolute()
    if path.is_dir():
        path /= RECORD
    content = _content(path)
    # A plain file of flags has no such key, because no flag has this name.
    is_record = isinstance(content.get("options"), dict)
    record_of = None
    if is_record:
        record_of = content.get("module")
        content = content["options"]
    hints = flag_hints(config)
    names = _names(hints)
    flags: dict[str, Any] = {}
    # Every key is looked at, also one without a value: a wrong name is a mistake in any case.
    for key, value in content.items():
        # As on the command line, "batch-size" is batch_size.
        name = names.get(str(key).replace("-", "_"))
        if is_record and key in OWN:
            continue
        if name in left_out:
            raise ConfigError(f"--config {path}: {key} has no effect in this program; leave it out")
        if name is None:
            hint = _hint(key, names, record_of)
            raise ConfigError(f"--config {path}: this program has no flag {short(key)}.{hint}")
        if name in flags:
            raise ConfigError(f"--config {path}: {key} is another name of a flag that is there as well; leave one out")
        if value is None:
            continue
        try:
            flags[name] = _of_type(value, hints[name])
        except ValueError as error:
            raise ConfigError(f"--config {path}: {key}: {short(value)} is not {error}") from None
    return ConfigFile(path, flags)


def _hint(
    key: object,
    names: Iterable[str],
    record_of: str | None,
) -> str:
    """What may help with a flag that the program does not have."""
    if record_of is not None:
        return f" The record is of a run of {short(record_of)}."
    near = get_close_matches(str(key), names, n=1)
    if near:
        return f" Did you mean {near[0]}?"
    return " --help lists its flags."


def flag_hints(config: type) -> dict[str, Any]:
    """The type of every flag of a config, by its name, with what tyro is told of it (its other names)."""
    hints: dict[str, Any] = {}
    flags = {field.name for field in fields(config)}
    for name, hint in get_type_hints(config, include_extras=True).items():
        # A class attribute has a type too.
        if name not in flags:
            continue
        if is_dataclass(hint) and isinstance(hint, type):
            hints.update(flag_hints(hint))
        else:
            hints[name] = hint
    return hints


def other_names(hint: Any) -> Iterator[str]:
    """Other names of a flag, such as ``tp`` of ``--tpsize``."""
    if get_origin(hint) is Annotated:
        for extra in hint.__metadata__:
            # Only tyro's argument has them, and they may be None.
            aliases = getattr(extra, "aliases", None) or ()
            for alias in aliases:
                yield alias.removeprefix("--")


def choices(hint: Any) -> list[str]:
    """The values that a flag is one of. Empty: it takes others."""
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    values: list[str] = []
    for kind in get_args(hint):
        values += choices(kind)
    return values


def _names(hints: Mapping[str, Any]) -> dict[str, str]:
    """The flag that each name in a file stands for."""
    names: dict[str, str] = {}
    for name, hint in hints.items():
        names[name] = name
        # `break_`, because `break` is a word of Python's.
        names[name.rstrip("_")] = name
        for other in other_names(hint):
            names[other] = name
    return names


def check_once(keys: Iterable[str]) -> None:
    """Raises ValueError for a key that is there twice."""
    counts = Counter(keys)
    for key, count in counts.items():
        if count > 1:
            raise ValueError(f"{short(key)} is there {count} times")


def _json(text: str) -> Any:
    # Of two equal keys, Python's reader would take the later one without a word.
    def one_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_once(key for key, _ in pairs)
        return dict(pairs)

    return parse_json(text, object, one_object)


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise ValueError("TOML needs Python 3.11; write it as YAML or JSON")
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    """The value of a YAML text. Raises ValueError: it is none, or a key is there twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain values only. A key that is there twice is refused: PyYAML itself takes the later one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            check_once(str(key.value) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None


# The end of a file's name → what reads its text.
READERS: dict[str, Callable[[str], Any]] = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}


def _content(path: Path) -> dict[str, Any]:
    """What a file holds. Raises ConfigError: it cannot be read, or has no flags."""
    reader = READERS.get(path.suffix)
    if reader is None:
        endings = ", ".join(READERS)
        raise ConfigError(f"--config {path}: it ends in none of {endings}")
    try:
        text = read_file(path).decode()
        content = reader(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: it cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: its lists are nested too deep") from None
    except ValueError as error:
        # An error of YAML's has several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: it cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: it has no flags; give each as a line, such as `lr: 0.001` in YAML")
    return content


def _of_type(value: Any, hint: Any) -> Any:
    """The value as its flag's type. Raises ValueError, with what the flag takes: ``a whole number``."""
    origin = get_origin(hint)
    if origin is Annotated:
        # Without what tyro is told.
        return _of_type(value, get_args(hint)[0])
    if origin in (Union, types.UnionType):
        wanted = []
        for kind in get_args(hint):
            # A flag that is null in a file is left out, so None is never its value.
            if kind is types.NoneType:
                continue
            try:
                return _of_type(value, kind)
            except ValueError as error:
                wanted.append(str(error))
        raise ValueError(" or ".join(wanted))
    # True is an int for Python, and equals 1.
    is_bool = isinstance(value, bool)
    if origin is Literal:
        if value not in get_args(hint) or is_bool:
            listed = ", ".join(map(str, get_args(hint)))
            raise ValueError(f"one of {listed}")
        return value
    if origin in (tuple, list):
        return _sequence(value, hint)
    if hint is float:
        return _number(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is bool and is_bool:
        return value
    if hint in (int, str) and isinstance(value, hint) and not is_bool:
        return value
    raise ValueError(KINDS.get(hint, "what a file can set; give this flag on the command line"))


def _number(value: Any) -> float:
    # 1e-3 is a text for PyYAML, which reads numbers by YAML 1.1.
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # A whole number of 400 digits has no float.
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    raise ValueError(KINDS[float])


def _sequence(value: Any, hint: Any) -> Any:
    """A list of a file as a tuple, or a list, of the types that the flag has. One value stands for a list of it."""
    if not isinstance(value, list):
        value = [value]
    sequence = get_origin(hint)
    kinds = get_args(hint)
    is_any_length = sequence is list or kinds[-1] is Ellipsis
    if not is_any_length and len(value) != len(kinds):
        raise ValueError(f"a list of {len(kinds)} values")
    items = [_of_type(item, kinds[0]) for item in value]
    return sequence(items)
