"""Types of flags: sizes of memory, times and numbers of tokens, as ``64GiB``, ``6:00``, ``20B``.

Each raises ArgumentTypeError, whose text argparse shows behind the flag.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError

UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
LEAST_BYTES = 1e6
COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MOST_TOKENS = 1e18
LONGEST = 400 * 86400  # s
# A day's clock: days-hours:minutes:seconds, of which only hours and minutes are needed.
CLOCK = re.compile(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d)(?::(\d\d))?")
WITH_UNITS = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")


def _value_and_unit(text: str) -> tuple[float, str]:
    """Split ``1.5T`` into 1.5 and "t". The value is NaN where there is no number."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\d+)?\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None:
        return math.nan, ""
    return float(match[1] + (match[2] or "")), match[3]


def parse_bytes(text: str) -> float:
    """``64GiB``, ``80GB``, ``1.5TiB`` → bytes.

    Raises:
        ArgumentTypeError: no number, no such unit, or less than a megabyte without one.
    """
    value, unit = _value_and_unit(text)
    sizes = {"": 1, "b": 1}
    for name, size in UNITS.items():
        sizes[name.lower()] = size
    n_bytes = value * sizes.get(unit, math.nan)
    # Nobody means a device of 64 bytes: the unit is missing.
    least = LEAST_BYTES if unit in ("", "b") else 1
    # Written so that NaN is refused.
    if not least <= n_bytes < math.inf:
        raise ArgumentTypeError(f"{text}: give a unit behind the number, one of {', '.join(UNITS)}, such as 64GiB")
    return n_bytes


def parse_tokens(text: str) -> float:
    """``20B``, ``300M``, ``1.5T``, ``1e9`` → tokens. Raises ArgumentTypeError: no such number, or below 1."""
    value, unit = _value_and_unit(text)
    tokens = value * COUNTS.get(unit.upper(), math.nan)
    # Written so that NaN is refused.
    if not 1 <= tokens <= MOST_TOKENS:
        raise ArgumentTypeError(f"{text}: write a number of tokens, such as 300M, 20B or 1.5T")
    return tokens


def parse_time(text: str) -> float:
    """``6h``, ``90m``, ``1d12h``, ``6:00`` and ``6:00:00`` (hours first), ``2-00:00:00`` (days) → seconds.

    Raises:
        ArgumentTypeError: it is none of these, such as a number without a unit, or not above 0.
    """
    clock = CLOCK.fullmatch(text)
    match = clock or WITH_UNITS.fullmatch(text.lower())
    if match is None or not text:
        raise ArgumentTypeError(f"{text}: write 6h, 90m, 1d12h, or HOURS:MINUTES, such as 6:00 (a day: 24:00)")
    days, hours, minutes, rest = (int(digits or 0) for digits in match.groups())
    seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    # 90m is fine, 0:90 is not.
    wrong_clock = clock is not None and (minutes > 59 or rest > 59)
    if wrong_clock or not 0 < seconds <= LONGEST:
        raise ArgumentTypeError(f"{text}: it must be above 0, at most {LONGEST // 86400} days, and 6:00 is 6 hours")
    return float(seconds)


def job_time(text: str) -> float:
    """Returns the seconds of a job, which is a minute at least. Raises ArgumentTypeError."""
    seconds = parse_time(text)
    if seconds < 60:
        raise ArgumentTypeError(f"{text}: schedulers count in minutes; give at least 1m")
    return seconds


def clock_time(seconds: float) -> str:
    """Format seconds as a scheduler takes them: ``06:00:00``."""
    all_minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(all_minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}"
