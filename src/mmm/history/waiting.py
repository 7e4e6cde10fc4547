"""How much of a run its ranks waited for each other: the ratio of communication to computation, as it was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmm.history.record.folder import OWN

if TYPE_CHECKING:
    import xarray


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


def waiting_text(ds: xarray.Dataset) -> str | None:
    """`communication_to_computation` of a record, in words; of more than `full_ranks` ranks by their medians."""
    if ds.sizes.get("rank", 1) < 2:
        return None
    for suffix in ("", "_median"):
        if f"dt{suffix}" in ds and f"{OWN}{suffix}" in ds:
            dt, own = (ds[f"{name}{suffix}"].values.reshape(ds.sizes["draw"], -1) for name in ("dt", OWN))
            ratio = communication_to_computation(dt, own)
            return None if ratio is None else f"{ratio:.3f} s for other ranks, for each second of computation"
    return None
