"""A run's state on disk, by ``torch.distributed.checkpoint`` (DCP): save during training, verify, load on any mesh.

A checkpoint is a folder such as ``checkpoints/step-20`` in the run's folder. It gets this name last, when it is
complete; until then it is called ``step-20.partial``. The folder holds DCP's own files, which
``python -m torch.distributed.checkpoint.format_utils dcp_to_torch`` reads, and ``checkpoint.json`` (`Manifest`) with
everything that is not a tensor and with the size and checksum of every other file::

    step-20/
      __0_0.distcp, …    of each rank, what it has of the tensors
      .metadata          DCP's index: name → shape, dtype, and which file has which part
      tokenizer.json     of a language model
      checkpoint.json    the manifest

A name in the index is (object, name of the parameter), and for what an optimizer keeps (object, name, what it is).

To load, from the outside in: `mmm.run.origin` chooses the checkpoint and reads its manifest (`manifest.read_manifest`);
`mmm.run.state.State.load` compares objects; `storage.metadata_on_all` has rank 0 read the index for all; and
`tensors.read_tensors` reads each rank's part, wherever the ranks that saved had put it.
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
