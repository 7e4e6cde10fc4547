"""The flags of a program, one by one: their names and types, and the values of what somebody has given.

On the command line and in a file a flag has arguments: texts, as they stand there. Here the flag's type makes a value
of them, so that the same arguments mean the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from mmm.errors import ConfigError
from mmm.outside import expanded, short
from mmm.run.options import flags_of, groups_of

# These arguments take a flag's value away, if it may have none. JSON's is `null`.
NONE = (["None"], ["null"])
# This word is a tuple without values.
EMPTY = ["[]"]
SWITCH = {"true": True, "false": False}


def path_of(word: str) -> Path:
    """A word as a path. Raises ConfigError, as `expanded`, or ValueError."""
    # "" would be the current folder. YAML's word for none is ~, and a shell leaves none.
    if word in ("", "~"):
        raise ValueError
    return expanded(word)


# Type → what stands for a value, in --help and in messages, and what makes it of a word.
KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("INT", int),
    float: ("FLOAT", float),
    str: ("STR", str),
    Path: ("PATH", path_of),
}


@dataclass(frozen=True)
class Flag:
    """A flag of a program.

    Attributes:
        names: what it is called, without dashes: ``tpsize``, ``tp``; of a switch also ``no_plots``.
        takes: what stands for its values in ``--help``, and in messages.
        make: makes a value of a word. Raises KeyError or ValueError.
        count: number of arguments; 0: any number.
        optional: whether it may have no value.
    """

    names: list[str]
    takes: str
    make: Callable[[str], Any]
    count: int = 1
    optional: bool = False

    def value(self, arguments: list[str]) -> Any:
        """The value that arguments stand for. Raises KeyError or ValueError."""
        if self.optional and arguments in NONE:
            return None
        if self.count == 1:
            (word,) = arguments
            return self.make(word)
        if arguments == EMPTY:
            arguments = []
        if self.count not in (0, len(arguments)):
            raise ValueError
        return tuple(map(self.make, arguments))


def flags(config: Any) -> dict[str, Flag]:
    """Every flag of a program's config, by its field."""
    choices = getattr(config, "CHOICES", {})
    hints = {}
    for group in groups_of(config).values():
        # Python 3.10 refuses a ClassVar without a type, and takes such a Final.
        hints.update(get_type_hints(type(group), localns={"ClassVar": Final}, include_extras=True))
    return {field: _flag(field, hints[field], choices.get(field, ())) for field in flags_of(config)}


def _flag(field: str, hint: Any, choices: Iterable[Any]) -> Flag:
    """The flag of a field, by its type and, if it has others than those of its type, its choices."""
    # `break_`, because `break` is a word of Python's.
    names = [field.rstrip("_")]
    if get_origin(hint) is Annotated:
        hint, *others = get_args(hint)
        names += others
    optional = NoneType in get_args(hint)
    if optional:
        hint = get_args(hint)[0]
    count = 1
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        hint = kinds[0]
        count = 0 if Ellipsis in kinds else len(kinds)
    if get_origin(hint) is Literal:
        choices = choices or get_args(hint)
    by_word = {str(choice): choice for choice in choices}
    if hint is bool:
        names.append(f"no_{names[0]}")
        by_word = SWITCH
    if by_word:
        takes, make = f"{{{','.join(by_word)}}}", by_word.__getitem__
    else:
        takes, make = KINDS[hint]
    takes = " ".join([takes] * count) if count else f"[{takes} ...]"
    return Flag(names, takes, make, count, optional)


def read(pairs: Iterable[tuple[str, list[str]]], known: Mapping[str, Flag], prefix: str) -> dict[str, Any]:
    """The values of flags that were given, by their fields.

    Args:
        pairs: the name of each flag, as somebody wrote it, and its arguments.
        known: the program's flags.
        prefix: what stands before a flag's name in a message: ``--``, or the file.

    Raises:
        ConfigError: the program does not have the flag, it is given twice, or does not take these arguments.
    """
    fields = {name: field for field, flag in known.items() for name in flag.names}
    values: dict[str, Any] = {}
    for key, arguments in pairs:
        name = key.replace("-", "_")
        if name not in fields:
            # A file has names without dashes.
            dashes = "--" if prefix == "--" else ""
            near = "".join(f" Did you mean {dashes}{other}?" for other in get_close_matches(name, fields, n=1))
            raise ConfigError(f"{prefix}{key}: this program has no such flag.{near or ' --help lists them.'}")
        field = fields[name]
        flag = known[field]
        if field in values and flag.count:
            raise ConfigError(f"{prefix}{key}: this flag is there twice; leave one out")
        # A switch: --plots is --plots true, and --no_plots is --plots false.
        if name == f"no_{flag.names[0]}":
            arguments = [*arguments, "false"]
        elif f"no_{flag.names[0]}" in flag.names:
            arguments = arguments or ["true"]
        try:
            value = flag.value(arguments)
        # Of a path.
        except ConfigError as error:
            raise ConfigError(f"{prefix}{key} {error}") from None
        except (KeyError, ValueError):
            shown = short(" ".join(arguments)) if arguments else "without a value"
            raise ConfigError(f"{prefix}{key} {shown}: it takes {flag.takes}") from None
        # Of a flag that takes any number of values all count.
        values[field] = values[field] + value if field in values else value
    return values
