"""mmm (multi-model modeling): parallel training on PyTorch ``DeviceMesh``, on small, readable, runnable programs.

Importing this package runs nothing, reads no environment and imports no torch.
"""

__version__ = "0.1.0"
