"""A run's state on disk, by ``torch.distributed.checkpoint``: save while training goes on, verify, load on any mesh.

``checkpoints/step-20`` of a run's folder is complete, because it gets this name last: until then it is
``step-20.partial``. In it are DCP's own files, which ``python -m torch.distributed.checkpoint.format_utils
dcp_to_torch`` reads, and ``checkpoint.json`` (`Manifest`), which has everything that is not a tensor, and the size and
checksum of every other file.
"""

from mmm.checkpoint.manifest import Manifest, complete, read_manifest, steps_of
from mmm.checkpoint.saver import Saver
from mmm.checkpoint.state import load_tensors, shapes_of, training_state

__all__ = [
    "Manifest",
    "Saver",
    "complete",
    "load_tensors",
    "read_manifest",
    "shapes_of",
    "steps_of",
    "training_state",
]
