"""Offload: what the optimizer updates moves to the host's memory, and its state to a file on a disk.

    launch -n 2 python3 -m mmm.examples.offload

A step needs parameters and gradients on the device only while a layer computes, and the optimizer's state not at all.
This is where a rank's shards are (FSDP; AdamW keeps two elements of state for each parameter)::

                on the device                    in the host's memory             on a disk
      device    parameters, gradients, state
      host      a layer, while it is gathered    parameters, gradients, state
      disk      a layer, while it is gathered    parameters, gradients            state

host: this is FSDP's `CPUOffloadPolicy`. Gradients come down, the host makes the optimizer's step, parameters go up.

disk: the state is a memory-mapped file. A page of it is read when the step touches it, and the system writes it back
when it needs the memory: the page belongs to the file, not to the process. After each step the process lets go of the
pages.

Each way trains for the same 5 steps, from the same weights on the same samples. A table shows what the rank that holds
most has where. (On a CPU, device and host are one memory.) A trainer's flag for the host: ``mmm.trainer.lm --offload``.

Sources: Ren et al., "ZeRO-Offload", 2021; Rajbhandari et al., "ZeRO-Infinity", 2021 (which reads and writes ahead, by
asynchronous I/O); Linux, madvise(2).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from mmm.examples import _support as example
from mmm.examples._support.offload_report import bytes_by_place, report
from mmm.models.llama.model import Transformer
from mmm.parallel import cross_entropy, draw_weights
from mmm.run import options

WAYS = ("device", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class Config(example.PlainTextConfig):
    """Train a Transformer under FSDP without offload, with offload to the host, and to a disk; --max_iters steps (5
    unless given) each."""

    CHOICES: ClassVar = example.SMALL
    folder: Path = Path(tempfile.gettempdir())
    """Folder on a disk of the host, for the optimizer's state. The file has no name, and ends with the process."""
    model: example.Model = example.Model(preset="debug")
    run: options.RunFlags = options.RunFlags()


class StateOnDisk:
    """AdamW's state of some parameters, in a memory-mapped file in a folder.

    Attributes:
        state: what goes into `optimizer.state`: for each parameter its step and two moments, which are zero at first.
    """

    def __init__(self, folder: Path, parameters: list[DTensor]) -> None:
        shards = [parameter.to_local() for parameter in parameters]
        # Two moments for each element. An empty file cannot be mapped.
        size = sum(2 * shard.nbytes for shard in shards)
        size = max(size, 1)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserves the room on the disk now. Otherwise, on a full disk, a page that cannot be written would later
            # end the process by a signal.
            os.posix_fallocate(file.fileno(), 0, size)
            self.map = mmap.mmap(file.fileno(), size)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        start = 0
        for parameter, shard in zip(parameters, shards, strict=True):
            self.state[parameter] = {"step": torch.zeros(())}
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][name] = self._sharded(start, parameter, shard)
                start += shard.nbytes

    # Without gradients to_local gives the tensor itself, not a view of it.
    @torch.no_grad()
    def _sharded(self, start: int, parameter: DTensor, shard: Tensor) -> Tensor:
        """The bytes of the file from `start` on, as a tensor that is sharded as the parameter is."""
        moment = torch.zeros_like(parameter)
        assert isinstance(moment, DTensor)
        if shard.numel() > 0:
            flat = torch.frombuffer(
                self.map,
                dtype=shard.dtype,
                count=shard.numel(),
                offset=start,
            )
            # The DTensor's local tensor now lies in the file.
            moment.to_local().set_(flat.view(shard.shape))  # type: ignore[call-overload]
        return moment

    def let_go(self, *_: object) -> None:
        """Write the pages to the file, and free the memory that they take in this process."""
        self.map.flush()
        self.map.madvise(mmap.MADV_DONTNEED)


def make_optimizer(model: nn.Module, way: str, folder: Path, lr: float) -> torch.optim.AdamW:
    """AdamW. For the disk its state is put there, as zeros, before the first step."""
    # foreach=False updates one parameter at a time, so only the pages of one are in memory.
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    if way == "disk":
        parameters: list[DTensor] = [p for p in model.parameters() if isinstance(p, DTensor)]
        on_disk = StateOnDisk(folder, parameters)
        optimizer.state.update(on_disk.state)
        optimizer.register_step_post_hook(on_disk.let_go)
    return optimizer


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    way: str,
    policy: MixedPrecisionPolicy,
) -> None:
    """FSDP of every layer and the rest, in place. With offload, FSDP keeps the shards in the host's memory."""
    offload = OffloadPolicy()
    if way != "device":
        # Pinned memory is copied to a device faster, and asynchronously. A CPU has nothing to copy to.
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for unit in [*model.layers.values(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    example.sum_gradients(model)


def train_way(
    run: example.Run,
    mesh: DeviceMesh,
    job: example.Job,
    way: str,
) -> tuple[dict[str, int], list[float]]:
    """Train for a few steps from the initial weights. A collective of all ranks.

    Returns:
        The bytes at each place, on the rank with most, and the loss of each step.
    """
    config = run.config
    assert isinstance(config, Config)
    with torch.device("meta"):
        model = Transformer(job.sizes).to(run.precision.storage)
    draw_weights(model, run.device, config.run.seed)
    policy = MixedPrecisionPolicy(run.precision.compute, run.precision.storage, cast_forward_inputs=False)
    shard(model, mesh, way, policy)
    optimizer = make_optimizer(model, way, config.folder, config.optimizer.lr)
    losses = []
    run.state(model=model, optimizer=optimizer)
    for step in example.text_steps(run, job, place={"way": WAYS.index(way)}):
        loss = cross_entropy(model(step.batch.inputs), step.batch.targets, step.batch.count)
        step.log(loss)
        loss.backward()
        optimizer.step()
        # Counted before zero_grad, while the gradients still exist.
        places = bytes_by_place(way, optimizer, run.device)
        optimizer.zero_grad()
        losses.append(step.local_loss)
    return places, run.global_sums(torch.stack(losses))


def train(config: Config) -> bool:
    """Train every way, and log the table. Returns whether all ways have the same losses."""
    job = example.resolve_own(config, example.fit(), batch_size=2, max_iters=5)
    with example.start_run("offload", config, job) as run:
        mesh = init_device_mesh(run.device.type, (run.layout.dp,), mesh_dim_names=("dp_shard",))
        results = {way: train_way(run, mesh, job, way) for way in WAYS}
        return report(run, results)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
