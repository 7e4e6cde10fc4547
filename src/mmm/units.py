"""Numbers as people read them: counts of things, bytes, seconds."""

from __future__ import annotations

# Bytes.
KIB = 2**10
MIB = 2**20
GIB = 2**30
# Seconds of each unit of time, the longest first.
TIMES = {
    "days": 86400.0,
    "h": 3600.0,
    "min": 60.0,
    "s": 1.0,
}


def counted(count: float, noun: str, plural: str = "") -> str:
    """A count with its noun, such as "1 rank", "2,000 ranks".

    Args:
        count: number of things.
        noun: the noun for one thing.
        plural: the noun for several, if it does not only add an s.
    """
    if count == 1:
        return f"1 {noun}"
    if not plural:
        plural = f"{noun}s"
    # 15 digits: a whole number that is a float shows no fraction, and no exponent.
    return f"{count:,.15g} {plural}"


def size(count: float, decimals: int | None = None) -> str:
    """Bytes, such as "512 B", "1.5 MiB", "23.4 GiB".

    Args:
        count: number of bytes.
        decimals: digits after the point, in MiB or GiB. None: three digits, in the unit that suits.
    """
    if decimals is not None:
        if count >= GIB:
            return f"{count / GIB:,.{decimals}f} GiB"
        return f"{count / MIB:,.{decimals}f} MiB"
    if count >= 100 * GIB:
        return f"{count / GIB:,.0f} GiB"
    for name, unit in {"GiB": GIB, "MiB": MIB, "KiB": KIB}.items():
        # 0.95 MiB reads better than 973 KiB.
        if count >= 0.95 * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def duration(seconds: float, decimals: int = 0, short: bool = False) -> str:
    """A time, such as "40 s", "12 min", "3.5 h", "2.1 days"; if short, "40s", "12m", "3.5h", "2.1d".

    Args:
        seconds: the time in seconds.
        decimals: digits after the point, for seconds and minutes.
        short: whether the unit is one letter.
    """
    # The longest unit that the time reaches.
    unit = "s"
    for name, length in TIMES.items():
        if seconds >= length:
            unit = name
            break
    if unit in ("days", "h"):
        decimals = 1
    value = f"{seconds / TIMES[unit]:.{decimals}f}"
    if short:
        return f"{value}{unit[0]}"
    return f"{value} {unit}"
