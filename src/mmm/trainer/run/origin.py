"""The checkpoint that a run goes on from: whether it is whole, of this run, and has steps left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmm.checkpoint.manifest import LaterVersionError, Manifest, broken_file, read_manifest
from mmm.errors import CheckpointError, UserError
from mmm.runtime.device import Precision
from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.trainer.config.run import BaseOptions
from mmm.trainer.job import Job
from mmm.trainer.run.core import Run


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from. rows: of the record that stay. auto: as of `RunFolder`; with no step
    left, the run's end is made again."""

    path: Path
    manifest: Manifest
    rows: int
    auto: bool = False


# Checkpoints without it are of another order: documents were packed in groups.
ORDER_OF_PACKED = 2


def identity_of(module: str, resolved: Job | None, seed: int, precision: Precision) -> dict[str, Any]:
    """What has to be equal for a run to go on as the same curve, as JSON has it: not the layout.

    Args:
        resolved: None of a program with a loop of its own, which compares the rest itself.
    """
    if resolved is None:
        return {"program": module, "--dtype": precision.name, "--seed": seed}
    data = resolved.describe_data() or {}
    sizes = {name: value for name, value in asdict(resolved.sizes).items() if not isinstance(value, str)}
    identity = {
        "program": module,
        **sizes,
        "sample": list(resolved.sample.shape[1:]),
        "global_batch_size": resolved.global_batch_size,
        "data": data.get("dataset"),
        "data's sha256": data.get("sha256"),
        "--dtype": precision.name,
        "--optimizer": resolved.optimizer,
        "--seed": seed,
        **{f"--{name}": True for name in data.get("documents", ())},
    }
    if "pack" in data.get("documents", ()):
        identity["order of packed samples"] = ORDER_OF_PACKED
    return json.loads(json.dumps(identity))


def check_files(run: Run, path: Path) -> tuple[Any, Any]:
    """A checkpoint's manifest, and what is wrong with it. Every rank checks some of its files. A collective."""
    manifest, problem = broadcast_object(_try_read(path) if run.rank.is_main else None)
    if manifest is not None:
        names = sorted(manifest.files)[run.rank.rank :: run.rank.world_size]
        broken = gather_objects(run.rank, broken_file(path, {name: manifest.files[name] for name in names}))
        problem = broadcast_object(next(filter(None, broken), None))
    return manifest, problem


def check_origin(origin: Origin, identity: Mapping[str, Any]) -> None:
    path, manifest = origin.path, origin.manifest
    if wrong := manifest.differences(identity):
        raise CheckpointError(f"{path} is of another run: {'; '.join(wrong)}", on_every_rank=True)
    if type(origin.rows) is not int or origin.rows < 0:
        raise CheckpointError(f"{path} is damaged: what a run goes on with is not what mmm has written")


def check_steps_left(origin: Origin, options: BaseOptions, steps: int) -> None:
    """Raises CheckpointError where a run of so many steps has none to make, and names the checkpoint."""
    done = origin.manifest.step
    if done > steps or (done == steps and not origin.auto):
        flags = [name for name in ("max_iters", "epochs") if hasattr(options, name)]
        limits = [f"--{name}" for name in flags if getattr(options, name) is not None]
        more = "by " + (" and ".join(limits) or "--max_iters") if flags else "to train_steps"
        raise CheckpointError(
            f"{origin.path} is of step {done}, and the run has {steps}: no step is left; give more {more}",
            on_every_rank=True,
        )


@contextmanager
def damage(origin: Origin) -> Iterator[None]:
    """What is not as it was written is a CheckpointError."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        text = f"what a run goes on with is not what mmm has written ({type(error).__name__}: {error})"
        raise CheckpointError(f"{origin.path} is damaged: {text}") from error


def _try_read(path: Path) -> tuple[Manifest | None, str | CheckpointError | None]:
    try:
        return read_manifest(path), None
    except LaterVersionError as error:  # an older checkpoint would lose what a later mmm has done
        return None, CheckpointError(str(error))
    except CheckpointError as error:
        return None, str(error)
