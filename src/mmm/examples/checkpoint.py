"""A checkpoint that goes anywhere: saved on one mesh, in shards, and loaded on another.

    launch -n 4 --device cpu python3 -m mmm.examples.checkpoint

What a step needs is tensors: parameters, and what the optimizer keeps of each. They are saved by their names in the
full model. FSDP has sharded them, so each is a DTensor, which knows its full shape and which rows are local.
``torch.distributed.checkpoint`` (DCP) writes one file per rank without sending any tensor, and notes in ``.metadata``
where each row is::

    mesh (4)                    folder                   mesh (2 × 2): two replicas, each sharded over two ranks

    rank 0  rows   0– 63 ──►  __0_0.distcp ──┬────────►  ranks 0, 2   rows   0–127
    rank 1  rows  64–127 ──►  __1_0.distcp ──┘
    rank 2  rows 128–191 ──►  __2_0.distcp ──┬────────►  ranks 1, 3   rows 128–255
    rank 3  rows 192–255 ──►  __3_0.distcp ──┘
                              .metadata

To load, a rank offers its own tensors, and DCP fills each from the files that have its rows. So it works on any mesh.

Here a model is saved in the middle of its training, and trains on. A second model, on the other mesh, loads the
checkpoint and trains on as well. Their losses are the same. The trainers do this by flags, --checkpoint_every and
--resume (docs/checkpoints.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmm.comparison import relative_error, worst
from mmm.errors import ConfigError
from mmm.examples import _support as example
from mmm.examples._support.mistakes import TOLERANCE
from mmm.models.llama.model import Transformer
from mmm.parallel import cross_entropy, draw_weights

# The log follows the rows of this tensor.
SHOWN = "output.weight"


@dataclass(frozen=True, kw_only=True)
class Config(example.PlainTextConfig):
    """Save a small Transformer in the middle of its training, and continue there and on another mesh."""

    CHOICES: ClassVar = {**example.SMALL, "dtype": ("auto", "fp32", "fp64")}
    model: example.Model = example.Model(preset="debug")


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP in place. On a mesh of one axis all ranks share one replica; on one of two axes each row has a replica."""
    for unit in (*model.layers.values(), model):
        fully_shard(unit, mesh=mesh)
    example.sum_gradients(model)


def state_of(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collect all that a step needs, as DCP takes it: tensors in dictionaries.

    The batches are a function of the step's number, so they need not be saved.
    """
    moments = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            moments[name] = optimizer.state[parameter]
    return {"model": model.state_dict(), "optimizer": moments}


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Let AdamW make the tensors of its state, so that DCP has something to fill.

    It makes them in its first step. A step with learning rate 0 and gradients of 0 changes no parameter.
    """
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        group["lr"] = rate
        optimizer.zero_grad()


def train(config: Config) -> None:
    job = example.resolve_own(config, example.fit(), batch_size=8, max_iters=20)
    if job.steps < 2:
        raise ConfigError(f"--max_iters {job.steps}: there is nothing to save before the first step; use at least 2")
    with example.start_run("checkpoint", config, job) as run:

        def build(sizes: tuple[int, ...], seed: int) -> tuple[Transformer, torch.optim.Optimizer]:
            """A model and its optimizer on a mesh of (shard,) or (replica, shard) ranks."""
            with torch.device("meta"):
                model = Transformer(job.sizes).to(run.precision.storage)
            axes = ("replica", "shard")[-len(sizes) :]
            shard(model, init_device_mesh(run.device.type, sizes, mesh_dim_names=axes))
            draw_weights(model, run.device, seed)
            return model, config.optimizer.make(model.parameters())

        ranks = run.rank.world_size
        model, optimizer = build((ranks,), config.run.seed)
        other = None
        difference = 0.0
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            batch = step.batch
            if step.index == job.steps // 2:
                # Rank 0 has made the run's folder, and tells the others where it is.
                folder = [None if run.outdir is None else str(run.outdir / "checkpoint")]
                dist.broadcast_object_list(folder)
                # A collective: each rank writes its own shards.
                dcp.save(state_of(model, optimizer), checkpoint_id=folder[0])
                run.log.info("saved: %s", saved_rows(str(folder[0])))

                # Another mesh, and other weights, so that nothing is right by chance.
                replicas = 2 if ranks % 2 == 0 else 1
                other, other_optimizer = build((replicas, ranks // replicas), config.run.seed + 1)
                make_moments(other_optimizer)
                # In place: the tensors of `other` now hold what was saved.
                dcp.load(state_of(other, other_optimizer), checkpoint_id=folder[0])
                rows = len(model.state_dict()[SHOWN].to_local())
                other_rows = len(other.state_dict()[SHOWN].to_local())
                run.log.info(
                    "loaded: rank 0 had %d rows of %s, and has %d on the other mesh",
                    rows,
                    SHOWN,
                    other_rows,
                )
            loss = cross_entropy(model(batch.inputs), batch.targets, batch.count)
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if other is not None:
                other_loss = cross_entropy(other(batch.inputs), batch.targets, batch.count)
                other_loss.backward()
                other_optimizer.step()
                other_optimizer.zero_grad()
                elsewhere = run.global_sum(other_loss)
                step.row["loss_elsewhere"] = elsewhere
                difference = worst((difference, relative_error(elsewhere, run.global_sum(loss))))

        run.log.info("from there on the losses of the two differ by %.1e at most", difference)
        run.describe(losses_differ=difference)
        limit = TOLERANCE[run.precision.name]
        # Not `difference > limit`, which NaN would pass.
        if not difference <= limit:
            raise RuntimeError(f"on the other mesh the losses differ by {difference:.1e}, more than {limit:.0e}")


def saved_rows(folder: str) -> str:
    """Say which rows of a tensor are in which file, as the checkpoint's own metadata have it."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    name = f"model.{SHOWN}"
    # Offset of a shard in the full tensor → the file that has it.
    files = {}
    for index, storage in metadata.storage_data.items():
        if index.fqn == name:
            files[tuple(index.offset)] = storage.relative_path
    texts = {}
    for chunk in metadata.state_dict_metadata[name].chunks:  # type: ignore[union-attr]
        first = chunk.offsets[0]
        count = chunk.sizes[0]
        # A rank may have no rows at all.
        if count:
            texts[first] = f"{first}-{first + count - 1} in {files[tuple(chunk.offsets)]}"
    return f"{SHOWN} rows {', '.join(texts[first] for first in sorted(texts))}"


if __name__ == "__main__":
    example.main(train, Config, __doc__)
