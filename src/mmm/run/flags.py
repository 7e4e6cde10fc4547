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
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mmm.errors import ConfigError
from mmm.outside import expanded, short
from mmm.run.options import flags_of, groups_of

# What is raised by a word of which no value can be made.
WRONG = (AttributeError, KeyError, TypeError, ValueError)
# These arguments take a flag's value away, if it may have none. JSON's is `null`.
NONE = (["None"], ["null"])
# This word is a list without values.
EMPTY = ["[]"]
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def switch(word: str) -> bool:
    """A word as true or false. Raises one of `WRONG`."""
    return SWITCH[word.lower()]


# Type → what stands for a value in --help, what a message calls it, and what makes it of a word.
KINDS: dict[Any, tuple[str, str, Callable[[str], Any]]] = {
    int: ("INT", "a whole number", int),
    float: ("FLOAT", "a number", float),
    # Not `str`: a number of a TOML file is no text, because 1_0 would become 10.
    str: ("STR", "a text", "".join),
    Path: ("PATH", "a path", expanded),
    bool: ("", "true or false", switch),
}


@dataclass(frozen=True)
class Flag:
    """A flag of a program.

    Attributes:
        names: what it is called, without dashes: ``tpsize``, ``tp``; of a switch also ``no_plots``.
        metavar: what stands for its value in ``--help``.
        takes: what a message calls its value.
        make: makes a value of a word. Raises one of `WRONG`.
        count: number of arguments; 0: any number.
        sequence: tuple or list, if its value is one.
        optional: whether it may have no value.
    """

    names: list[str]
    metavar: str
    takes: str
    make: Callable[[str], Any]
    count: int
    sequence: type | None
    optional: bool

    def usage(self) -> str:
        """How to give it: ``--tpsize, --tp INT``."""
        names = ", ".join(f"--{name}" for name in self.names)
        values = f"[{self.metavar} ...]"
        if self.count:
            values = " ".join([self.metavar] * self.count)
        if self.make is switch:
            values = ""
        return f"{names} {values}".rstrip()

    def value(self, arguments: list[str]) -> Any:
        """The value that arguments stand for. Raises one of `WRONG`."""
        if self.optional and arguments in NONE:
            return None
        if self.sequence and arguments == EMPTY:
            arguments = []
        # A switch needs no word, but --offload takes `host`: there is no other place.
        if self.make is switch and arguments in ([], [self.metavar]):
            arguments = ["true"]
        if self.count not in (0, len(arguments)):
            raise ValueError
        values = [self.make(word) for word in arguments]
        if self.sequence:
            return self.sequence(values)
        return values[0]


def flags(config: Any) -> dict[str, Flag]:
    """Every flag of a program's config, by its field."""
    choices = getattr(config, "CHOICES", {})
    known = {}
    hints = {}
    for group in groups_of(config).values():
        hints.update(get_type_hints(type(group), include_extras=True))
    for field in flags_of(config):
        known[field] = _flag(field, hints[field], choices.get(field, ()))
    return known


def _flag(field: str, hint: Any, choices: Iterable[Any]) -> Flag:
    """The flag of a field, by its type and, if it has others than those of its type, its choices."""
    texts: list[str] = []
    if get_origin(hint) is Annotated:
        hint, *texts = get_args(hint)
    optional = NoneType in get_args(hint)
    if optional:
        hint = get_args(hint)[0]
    kinds = get_args(hint)
    sequence = get_origin(hint)
    count = 1
    if sequence in (tuple, list):
        hint = kinds[0]
        count = len(kinds)
        if sequence is list or Ellipsis in kinds:
            count = 0
    else:
        sequence = None
    if get_origin(hint) is Literal:
        choices = choices or get_args(hint)
    by_word = {str(choice): choice for choice in choices}
    if by_word:
        listed = ",".join(by_word)
        metavar, takes, make = f"{{{listed}}}", f"one of {', '.join(by_word)}", by_word.__getitem__
    else:
        # A field of another type is not for a user to set.
        metavar, takes, make = KINDS.get(hint, ("", "no value from a user", by_word.__getitem__))
    if count > 1:
        takes = f"{count} values, each {takes}"
    # `break_`, because `break` is a word of Python's.
    names = [field.rstrip("_")]
    for text in texts:
        if text.startswith("--"):
            names.append(text.removeprefix("--"))
        else:
            metavar = text
    if hint is bool:
        names.append(f"no_{names[0]}")
    return Flag(names, metavar, takes, make, count, sequence, optional)


def read(
    pairs: Iterable[tuple[str, list[str]]],
    known: Mapping[str, Flag],
    prefix: str,
    advice: str = "",
) -> dict[str, Any]:
    """The values of flags that were given, by their fields.

    Args:
        pairs: the name of each flag, as somebody wrote it, and its arguments.
        known: the program's flags.
        prefix: what stands before a flag's name in a message: ``--``, or the file.
        advice: what may help with a flag that the program does not have.

    Raises:
        ConfigError: the program does not have the flag, it is given twice, or does not take these arguments.
    """
    fields = {name: field for field, flag in known.items() for name in flag.names}
    arguments_of: dict[str, list[str]] = {}
    for key, arguments in pairs:
        name = key.replace("-", "_")
        field = fields.get(name)
        if field is None:
            for near in get_close_matches(name, fields, n=1):
                advice = advice or f" Did you mean {near}?"
            raise ConfigError(f"{prefix}{key}: this program has no such flag.{advice or ' --help lists them.'}")
        # As a path it would be the current folder.
        if "" in arguments:
            raise ConfigError(f"{prefix}{key} '': the value is empty; give one, or leave {key} out")
        if field in arguments_of and known[field].count:
            raise ConfigError(f"{prefix}{key}: this flag is there twice; leave one out")
        # --no_plots is --plots false.
        if name == f"no_{known[field].names[0]}":
            arguments = [*arguments, "false"]
        arguments_of.setdefault(field, []).extend(arguments)
    values = {}
    for field, arguments in arguments_of.items():
        flag = known[field]
        try:
            values[field] = flag.value(arguments)
        # Of a path.
        except ConfigError as error:
            raise ConfigError(f"{prefix}{flag.names[0]} {error}") from None
        except WRONG:
            shown = short(" ".join(map(str, arguments))) if arguments else "without a value"
            raise ConfigError(f"{prefix}{flag.names[0]} {shown}: it takes {flag.takes}") from None
    return values
