"""The ``mmm`` command: one small file a subcommand. Imports no torch until a subcommand needs it."""

LARGE = 1e9  # from here on a number is shown with an exponent


def whole(count: float) -> str:
    """Format a count, such as a step, in full: 1234567."""
    return f"{count:.15g}"


def decimal(value: float, digits: int) -> str:
    """Format a number with so many digits after the point. A very large or very small one has 3 digits in all."""
    # A number below this would show one digit or none.
    smallest = 10.0 ** (1 - digits)
    if value == 0 or smallest <= abs(value) < LARGE:
        return f"{value:,.{digits}f}"
    return f"{value:.3g}"
