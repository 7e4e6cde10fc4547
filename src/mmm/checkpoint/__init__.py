"""A run's state on disk, by ``torch.distributed.checkpoint`` (DCP): save during training, verify, load on any mesh.

A checkpoint is a folder such as ``checkpoints/step-20`` in the run's folder. It gets this name last, when it is
complete; until then it is called ``step-20.partial``. The folder holds DCP's own files, which
``python -m torch.distributed.checkpoint.format_utils dcp_to_torch`` reads, and ``checkpoint.json`` (`Manifest`) with
everything that is not a tensor and with the size and checksum of every other file.
"""
