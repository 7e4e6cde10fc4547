"""Is a parallel program the same as the model on one device? For anyone's model, and anyone's way to parallelize it.

``verify`` runs a model on one process, and what a function has made of it on the ranks of a mesh, in float64, and says
where the two part: weights, batches, loss, gradients, the step. None of this package's layers has to be in either.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.verify.run import verify
    from mmm.verify.subject import Subject
    from mmm.verify.verdict import Finding, Verdict

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.verify.verdict": "Finding Verdict",
        "mmm.verify.subject": "Subject",
        "mmm.verify.run": "verify",
    },
)
