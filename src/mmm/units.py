"""Numbers as people read them: counts of things, bytes, seconds."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
TIMES = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def counted(number: float, noun: str, plural: str = "") -> str:
    """A number with its noun, as "1 rank", "2,000 ranks".

    Args:
        plural: of the noun, where that is not an s more.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,.15g} {plural or noun + 's'}"


def size(count: float, decimals: int | None = None) -> str:
    """Bytes, as "512 B", "1.5 MiB", "23.4 GiB".

    Args:
        decimals: of MiB and GiB alone. None: three digits, of the unit that suits.
    """
    if decimals is not None:
        unit, name = (GIB, "GiB") if count >= GIB else (MIB, "MiB")
        return f"{count / unit:,.{decimals}f} {name}"
    if count >= 100 * GIB:
        return f"{count / GIB:,.0f} GiB"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= 0.95 * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def duration(seconds: float, decimals: int = 0, short: bool = False) -> str:
    """Seconds, as "40 s", "12 min", "3.5 h", "2.1 days"; short "40s", "12m", "3.5h", "2.1d".

    Args:
        decimals: of seconds and minutes.
    """
    unit, name = next((each for each in TIMES if seconds >= each[0]), TIMES[-1])
    number = f"{seconds / unit:.{1 if name in ('days', 'h') else decimals}f}"
    return f"{number}{name[0]}" if short else f"{number} {name}"
