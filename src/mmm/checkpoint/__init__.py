"""A run's state on disk, by ``torch.distributed.checkpoint``: save while training goes on, verify, load on any mesh.

``checkpoints/step-20`` of a run's folder is complete, because it gets this name last: until then it is
``step-20.partial``. In it are DCP's own files, which ``python -m torch.distributed.checkpoint.format_utils
dcp_to_torch`` reads, and ``checkpoint.json`` (`Manifest`), which has everything that is not a tensor, and the size and
checksum of every other file.
"""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.checkpoint.manifest import Manifest as Manifest
    from mmm.checkpoint.manifest import complete as complete
    from mmm.checkpoint.manifest import read_manifest as read_manifest
    from mmm.checkpoint.manifest import steps_of as steps_of
    from mmm.checkpoint.saver import Saver as Saver
    from mmm.checkpoint.state import shapes_of as shapes_of

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.checkpoint.manifest": "Manifest complete read_manifest steps_of",
        "mmm.checkpoint.saver": "Saver",
        "mmm.checkpoint.state": "shapes_of",
    },
)
