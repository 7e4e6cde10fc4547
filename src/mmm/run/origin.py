"""The checkpoint that a run resumes from: where it is, and whether it is whole, of the same run, and has steps left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.checkpoint.manifest import LaterVersionError, Manifest, broken_file, read_manifest, steps_of
from mmm.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from mmm.run.run import Run

# The folder of checkpoints, in a run's own.
CHECKPOINTS = "checkpoints"
# Version of the order of packed documents. Checkpoints without it have another one, in which documents were packed in
# groups.
ORDER_OF_PACKED = 2


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run resumes from.

    Attributes:
        path: folder of the checkpoint.
        manifest: its manifest.
        rows: number of rows of the record that stay.
        auto: whether `--resume auto` has chosen it. A run with no step left then ends, and is not refused.
    """

    path: Path
    manifest: Manifest
    rows: int
    auto: bool = False


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint at a path: the path itself, or the newest of a run's folder, or of its folder of checkpoints.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if path.name.startswith("step-"):
        return [path]
    for folder in (path, path / CHECKPOINTS):
        newest_first = steps_of(folder)
        if newest_first:
            return newest_first[:1]
    raise CheckpointError(
        f"--resume {path}: no checkpoint is there; give auto, a run's folder, or one of its checkpoints/step-N"
    )


def identity_of(run: Run) -> dict[str, Any]:
    """What has to be the same for a resumed run to continue the same curve, as JSON has it. The layout may differ."""
    identity = {"program": run.name, "--dtype": run.precision.name, "--seed": run.seed}
    job = run.job
    # Only a trainer's job has sizes; a program with its own model has none.
    if getattr(job, "sizes", None) is not None:
        data = job.describe_data() or {}
        documents = data.get("documents", ())
        for name, value in asdict(job.sizes).items():
            # A text names a kernel, such as that of attention: another one may compute the same curve.
            if not isinstance(value, str):
                identity[name] = value
        identity |= {
            "sample": list(job.sample.shape[1:]),
            "global_batch_size": job.global_batch_size,
            "data": data.get("dataset"),
            "data's sha256": data.get("sha256"),
            "--optimizer": job.optimizer,
            # A text of three numbers, as in checkpoints of when cp and tp had lanes as well.
            "--exact": None if job.techniques.exact is None else f"{job.techniques.exact}.1.1",
        }
        lora = getattr(job, "lora", None)
        if lora is not None:
            identity |= {"--lora": lora.rank, "--lora_alpha": lora.alpha, "--lora_targets": list(lora.targets)}
            # The small matrices are trained next to these weights, and name them when they are exported.
            if job.weights is not None:
                identity["--init_from"] = job.metadata.base or str(job.weights.path.absolute())
        identity |= {f"--{name}": True for name in documents}
        if "pack" in documents:
            identity["order of packed samples"] = ORDER_OF_PACKED
    return json.loads(json.dumps(identity))


def choose_origin(
    run: Run,
    identity: Mapping[str, Any],
    candidates: list[Path],
    auto: bool,
    keeps_record: bool,
) -> Origin | None:
    """The first checkpoint that is whole; None if there are no candidates. A collective.

    Args:
        identity: what has to be the same in the checkpoint, as `identity_of` returns it.
        candidates: the checkpoints, the best first.
        auto: whether the next one is taken if one is damaged.
        keeps_record: whether the rows that are already in the folder stay.

    Raises:
        CheckpointError: none is whole; or the one that was named is not; or it is of another run. On every rank.
    """
    problems: list[str] = []
    for path in candidates:
        manifest, problem = _check_files(run, path)
        if problem is None:
            rows = manifest.state.get("rows", 0) if keeps_record else 0
            origin = Origin(path, manifest, rows, auto)
            _check_origin(origin, identity)
            return origin
        if not auto or isinstance(problem, CheckpointError):
            raise CheckpointError(str(problem), on_every_rank=True)
        problems.append(problem)
        run.note(f"{problem}: the checkpoint before it is taken")
    if problems:
        raise CheckpointError(f"no checkpoint is whole: {problems[0]}", on_every_rank=True)
    return None


def _check_files(run: Run, path: Path) -> tuple[Any, Any]:
    """A checkpoint's manifest, and what is wrong with it or None. A collective: every rank checks some of its files."""
    read = _try_read(path) if run.rank.is_main else None
    manifest, problem = run.comm.broadcast(read)
    if manifest is not None:
        # Of W ranks, each checks every W-th file.
        names = sorted(manifest.files)[run.rank.rank :: run.rank.world_size]
        own_files = {name: manifest.files[name] for name in names}
        by_rank = run.comm.gather(broken_file(path, own_files))
        first = next(filter(None, by_rank), None)
        problem = run.comm.broadcast(first)
    return manifest, problem


def _try_read(path: Path) -> tuple[Manifest | None, str | CheckpointError | None]:
    try:
        return read_manifest(path), None
    except LaterVersionError as error:
        # This is refused also with `auto`: an older checkpoint would lose what a later mmm has done.
        return None, CheckpointError(str(error))
    except CheckpointError as error:
        return None, str(error)


def _check_origin(origin: Origin, identity: Mapping[str, Any]) -> None:
    wrong = origin.manifest.differences(identity)
    if wrong:
        raise CheckpointError(f"{origin.path} is of another run: {'; '.join(wrong)}", on_every_rank=True)
    if type(origin.rows) is not int or origin.rows < 0:
        raise CheckpointError(f"{origin.path} is damaged: what a run resumes with is not what mmm has written")


def check_steps_left(origin: Origin, steps: int) -> None:
    """Raises CheckpointError if a run of so many steps has none left to make."""
    done = origin.manifest.step
    # A script that is started again and again with `auto` ends well once it is finished.
    if done > steps or (done == steps and not origin.auto):
        raise CheckpointError(
            f"{origin.path} is of step {done}, and the run has {steps}: no step is left; give it more",
            on_every_rank=True,
        )


def check_goes_on(origin: Origin, steps: int, samples: int) -> None:
    """Check a loop that resumes from a checkpoint.

    Args:
        steps: number of steps of the loop.
        samples: number of samples in its global batch.

    Raises:
        CheckpointError: no step is left, or the global batch had another size.
    """
    check_steps_left(origin, steps)
    before = origin.manifest.state.get("samples")
    if before != samples:
        raise CheckpointError(
            f"{origin.path} cannot be resumed by this program: its global batch has {before} samples, and this one "
            f"{samples}",
            on_every_rank=True,
        )


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Inside, an error that comes from an unexpected value in a checkpoint becomes a CheckpointError."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        text = f"what a run resumes with is not what mmm has written ({type(error).__name__}: {error})"
        raise CheckpointError(f"{path} is damaged: {text}") from error
