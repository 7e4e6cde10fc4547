"""Sizes of memory on a command line: ``64GiB``."""

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
