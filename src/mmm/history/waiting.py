"""How much of a run its ranks waited for each other: the ratio of communication to computation, as it was measured."""

from __future__ import annotations

import numpy as np


def communication_to_computation(dt: np.ndarray, own: np.ndarray) -> float | None:
    """Seconds in which ranks waited for others, for each second in which they did not; over all ranks, and all rows but
    the first, which starts what is slow to start.

    What a rank waits for is communication that nothing hides and ranks that are slower; what computation hides is not
    in it. None where it is not known (`mmm.runtime.clock.timed_waits`).

    Args:
        dt: seconds of a step, (rows, ranks). own: ``dt_own`` of the same steps.
    """
    both = np.isfinite(dt) & np.isfinite(own)
    both[:1] &= len(dt) == 1
    computed = own[both].sum()
    return float((dt[both] - own[both]).sum() / computed) if computed > 0 else None
