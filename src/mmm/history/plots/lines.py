"""What the curves of a picture have in common."""

import numpy as np

MOST_POINTS = 1000  # a line of more is thinned: a page has no more pixels


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def thin(x: np.ndarray, y: np.ndarray, keep: np.ufunc | None = None) -> tuple[np.ndarray, np.ndarray]:
    """At most `MOST_POINTS` points: every k-th, or of each k the one that `keep` (np.fmax, np.fmin) selects."""
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.arange(0, len(x), -(-len(x) // MOST_POINTS))
    return x[starts], y[starts] if keep is None else keep.reduceat(y, starts)
