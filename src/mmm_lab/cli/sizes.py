"""Sizes of memory, times and numbers of tokens on a command line: ``64GiB``, ``6:00``, ``20B``."""

from __future__ import annotations

import math
import re

from mmm.errors import ConfigError

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}


def parse_bytes(text: str, flag: str) -> float:
    """``64GiB``, ``80GB``, ``1.5TiB`` → bytes.

    Raises:
        ConfigError: no number, no such unit, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    units = {unit.lower(): size for unit, size in UNITS.items()}
    unit = match[2].lower() if match else ""
    if not number > 0 or not math.isfinite(number):
        raise ConfigError(f"{flag} {text}: write a number above 0 and a unit, such as 64GiB")
    if unit not in units:
        raise ConfigError(f"{flag} {text}: the unit is none of {', '.join(filter(None, UNITS))}; such as 64GiB")
    if unit in ("", "b") and number < 1e6:
        raise ConfigError(f"{flag} {text}: that is {number:g} bytes; give a unit, such as {text.strip('bB ')}GiB")
    return number * units[unit]


COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MOST_TOKENS = 1e18


def parse_tokens(text: str, flag: str) -> float:
    """``20B``, ``300M``, ``1.5T``, ``1e9`` → tokens. Raises ConfigError: no such number, or below 1."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(match[1]) * COUNTS[match[2].upper()] if match else math.nan
    if not 1 <= number <= MOST_TOKENS:
        raise ConfigError(f"{flag} {text}: write a number of tokens, such as 300M, 20B or 1.5T")
    return number


LONGEST = 400 * 86400  # s


def parse_time(text: str, flag: str) -> float:
    """``6h``, ``90m``, ``1d12h``, ``6:00`` and ``6:00:00`` (hours first), ``2-00:00:00`` (days) → seconds.

    Raises:
        ConfigError: it is none of these, such as a number without a unit, or not above 0.
    """
    clock = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d)(?::(\d\d))?", text)
    units = re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.lower())
    if not text or not (found := clock or units):
        raise ConfigError(f"{flag} {text}: write 6h, 90m, 1d12h, or HOURS:MINUTES, such as 6:00 (a day: 24:00)")
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not 0 < seconds <= LONGEST or (clock and (minutes > 59 or rest > 59)):
        raise ConfigError(f"{flag} {text}: it must be above 0, at most {LONGEST // 86400} days, and 6:00 is 6 hours")
    return float(seconds)


def clock_time(seconds: float) -> str:
    """Seconds as a scheduler takes them: ``06:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
