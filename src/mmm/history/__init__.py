"""Keeps a run's rows on disk, reads them again, and plots them.

>>> outdir = prepare(None, "fsdp_tp")                        # rank 0, before any process group
>>> with History(outdir, ranks=[{"rank": 0, "host": "x1"}]) as history:
...     history.update({"iter": 0, "loss": 10.78, "dt": 0.4})
>>> load(outdir).loss                                        # also while it runs, and after a kill

Importing this package imports neither torch, xarray, matplotlib nor plotext. `load` and the plots import what they need
when they are called.
"""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.history.plots.draw import plot_summary as plot_summary
    from mmm.history.plots.terminal import terminal_plot as terminal_plot
    from mmm.history.record.folder import prepare as prepare
    from mmm.history.record.folder import versions as versions
    from mmm.history.record.folder import write_config as write_config
    from mmm.history.record.history import History as History
    from mmm.history.record.rank_history import RankHistory as RankHistory
    from mmm.history.record.reader import finalize as finalize
    from mmm.history.record.reader import load as load
    from mmm.history.record.reader import state as state

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.history.record.history": "History",
        "mmm.history.plots.draw": "plot_summary",
        "mmm.history.record.rank_history": "RankHistory",
        "mmm.history.record.reader": "finalize load state",
        "mmm.history.record.folder": "prepare versions write_config",
        "mmm.history.plots.terminal": "terminal_plot",
    },
)
