"""Is a parallel program the same as the model on one device? For anyone's model, and anyone's way to parallelize it.

``verify`` runs a model on one process, and what a function has made of it on the ranks of a mesh, in float64, and says
where the two first differ: weights, batch, loss, gradients, optimizer step. It needs only PyTorch, and neither program
needs a layer of another library.

Importing this package does not import torch: each name below is imported when it is first used.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmm_verify.adapter import Adapter
    from mmm_verify.program.resume import verify_resume
    from mmm_verify.program.run import verify_program
    from mmm_verify.run import verify
    from mmm_verify.subject import Subject
    from mmm_verify.verdict import Finding, Verdict

__version__ = "0.1.0"

# Name → the module of this package that defines it.
MODULES = {
    "Adapter": "adapter",
    "verify": "run",
    "verify_program": "program.run",
    "verify_resume": "program.resume",
    "Subject": "subject",
    "Finding": "verdict",
    "Verdict": "verdict",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(MODULES)
