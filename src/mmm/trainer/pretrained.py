"""A model that starts from weights on disk: ``--init_from``, and what `mmm sample` shares with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.tokenizer import tokenizer_of
from mmm.errors import CheckpointError, ConfigError
from mmm.layout import Layout, Techniques
from mmm.models.experts import has_experts
from mmm.models.rope import RopeScaling
from mmm.models.transformer import PRESETS, Transformer, TransformerConfig
from mmm.models.weights import Init
from mmm.parallel import build_mesh, partition_model
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.runtime.ranks import Rank
from mmm.trainer.run.core import Run
from mmm.trainer.run.resume import ResumableRecord
from mmm.trainer.text import ModelOptions
from mmm.trainer.transformer_options import Preset, TransformerOptions
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import Weights

# Sizes that the weights decide. The others (epsilon, rotary positions) change no shape.
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "n_experts", "tie_word_embeddings")


def config_of(weights: Weights) -> TransformerConfig:
    """The sizes of a model on disk.

    Raises:
        CheckpointError: they do not go together.
    """
    try:
        scaling = RopeScaling.of(weights.sizes.get("rope_scaling"))
    except ValueError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    config = TransformerConfig(**{**weights.sizes, "rope_scaling": scaling})
    if wrong := config.problems():
        raise CheckpointError(f"{weights.path}: {wrong[0]}")
    return config


def tokenizer_on_disk(metadata: ModelMetadata) -> Tokenizer | None:
    """The tokenizer of a model on disk, if it has one."""
    return None if metadata.tokenizer is None else tokenizer_of(Path(metadata.tokenizer[0]), metadata.tokenizer[1])


def evaluation_model(
    config: TransformerConfig, layout: Layout, precision: Precision, device: torch.device, timeout: float
) -> ParallelModel:
    """A model to load weights into, for forward alone. A collective.

    Raises:
        UserError: it does not go onto the layout.
    """
    with torch.device("meta"):
        model = without_draws(Transformer(config))
        inputs = torch.zeros(layout.pp, 2 * layout.cp * layout.tp, dtype=torch.int64)
    plan, techniques = transformer_plan(config), Techniques()
    partition = partition_model(model, plan, layout, techniques, inputs)
    mesh = build_mesh(layout, device.type, timeout, experts=has_experts(model))
    if layout.dp * layout.cp == 1:  # nothing for FSDP to shard: it would copy each unit, for each token
        mesh = replace(mesh, no_data_parallel=True)
        precision = replace(precision, storage=precision.compute)
    parallel = ParallelModel(model, plan, mesh, precision, techniques, partition, device=device, seed=0)
    parallel.train(False)
    return parallel


def without_draws(model: Transformer) -> Transformer:
    """The model, whose weights start as zeros: others are loaded over them."""
    model.init_rule = lambda name: Init("constant", 0.0)  # type: ignore[method-assign]
    return model


@torch.no_grad()
def load_weights(rank: Rank, model: ParallelModel, weights: Weights) -> None:
    """Load this rank's part of each tensor, in place. A collective: every rank checks some of the files.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing or of another shape; on every rank.
    """
    error: CheckpointError | None = None
    try:
        if problem := weights.check(rank.rank, rank.world_size):
            raise CheckpointError(problem)
        for name, tensor in [*model.named_parameters(), *model.saved_buffers().items()]:
            box, entry = local_box(tensor.detach()), weights.entries.get(name)
            if entry is None or entry.shape != box.full:
                there = "no such tensor" if entry is None else f"it as {'×'.join(map(str, entry.shape))}"
                own = "×".join(map(str, box.full))
                raise CheckpointError(f"{weights.path} has {there}: {name}, which is {own} in the model")
            to_local(tensor.detach()).copy_(weights.read(name, box.start, box.length))
    except CheckpointError as found:
        error = found
    if wrong := broadcast_object(next(filter(None, gather_objects(rank, error and str(error))), None)):
        raise CheckpointError(wrong, on_every_rank=True)
    model.gather_updated()


@dataclass(frozen=True, kw_only=True)
class PretrainedOptions(ModelOptions):
    """Where a model's sizes and first weights come from."""

    preset: Preset | None = None  # type: ignore[assignment]
    """Sizes to start from; the flags below change single ones. Default: small, or those of --init_from."""
    init_from: Path | None = None
    """Start from these weights, in place of drawn ones: a folder of safetensors and config.json, a GGUF file, a
    checkpoint of `mmm import`, or a run's folder. Sizes are theirs, and so is the tokenizer where nothing else says."""

    def weights(self) -> Weights | None:
        """The weights to start from, opened once.

        Raises:
            CheckpointError: there are none.
        """
        if self.init_from is None:
            return None
        if (opened := vars(self).get("_weights")) is None:
            opened = open_weights(self.init_from.expanduser())
            object.__setattr__(self, "_weights", opened)  # no field: no flag, and no part of the record
        return opened

    def base_config(self) -> TransformerConfig:
        weights = self.weights()
        if weights is None:
            return PRESETS[self.preset or TransformerOptions.preset]
        if self.preset is not None:
            raise ConfigError(
                f"--preset {self.preset} and --init_from {self.init_from} contradict each other: sizes are those of "
                "the weights; leave one out"
            )
        return config_of(weights)

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """As `ModelOptions.model_config`; a ConfigError also where a flag says other sizes than the weights have."""
        config = super().model_config(default_vocab if self.init_from is None else None)
        if self.init_from is not None:
            own = self.base_config()
            for name in SHAPES:
                if getattr(config, name) != getattr(own, name):
                    there, asked = getattr(own, name), getattr(config, name)
                    raise ConfigError(f"--init_from {self.init_from} has {name} {there}, and the flags say {asked}")
        return config

    def default_tokenizer(self) -> Tokenizer | None:
        weights = self.weights()
        return None if weights is None else tokenizer_on_disk(weights.metadata)

    def text_ends(self, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that begin a text, and those that end one: as the weights have them, but for a text of another
        tokenizer than theirs, whose tokens mean something else.

        Args:
            tokenizer: of the text; None where nobody knows.
        """
        weights = self.weights()
        if weights is None:
            return (), ()
        if tokenizer is not None and (own := weights.metadata.tokenizer) is not None and own[1] != tokenizer.content:
            return (), ()
        return weights.metadata.bos, weights.metadata.eos


def start_from(run: Run, model: ParallelModel, weights: Weights | None) -> None:
    """Load the weights that a run starts from, unless it goes on from a checkpoint. A collective."""
    record = run.hook(ResumableRecord)
    if weights is None or (record is not None and record.origin is not None):
        return
    load_weights(run.rank, model, weights)
    for text in (f"weights of {weights.path}", *weights.metadata.notes):
        run.note(text)
    run.describe(init_from={"path": weights.path, "sizes": asdict(config_of(weights))})
