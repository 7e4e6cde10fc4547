"""What the programs that train a Transformer on text have in common: flags, and everything decided before the ranks
meet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro

from mmm.data import Batch, RandomTokens, Tokens
from mmm.data.text.sources import Sources, open_sources
from mmm.data.text.tokenizer import Tokenizer
from mmm.errors import ConfigError, DataError, LayoutError
from mmm.layout import batch_sizes
from mmm.models.rope import RopeScaling
from mmm.models.transformer import PRESETS, Transformer, TransformerConfig
from mmm.outside import parse_json
from mmm.parallel.plans.transformer import check_transformer, transformer_plan
from mmm.runtime.ranks import whoami
from mmm.trainer.options import EXPERTS, Need, RunOptions
from mmm.trainer.resolve import Resolved, ResolvedPlan, resolve_plan
from mmm.trainer.run import Run

Preset = Literal[
    "debug",
    "small",
    "reference",
    "medium",
    "shakespeare",
    "shakespeare-cpu",
    "gpt2",
    "llama-1b",
    "llama2-7b",
    "llama-8b",
    "llama-70b",
]


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """Flags of a Transformer's sizes: a preset, and what differs from it."""

    preset: Preset = "small"
    """Sizes to start from; the flags below change single ones."""
    n_layers: int | None = None
    dim: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    ffn_dim: int | None = None
    vocab_size: int | None = None
    TIES: ClassVar = False  # whether the program keeps tied weights one

    def base_config(self) -> TransformerConfig:
        """The sizes that flags change."""
        return PRESETS[self.preset]

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """The sizes asked for.

        Args:
            default_vocab: vocabulary of the data, where ``--vocab_size`` is not given; None for the preset's.
        """
        changed = {f.name: getattr(self, f.name) for f in fields(TransformerOptions) if f.name != "preset"}
        changed = {name: value for name, value in changed.items() if value is not None}
        if default_vocab is not None:
            changed.setdefault("vocab_size", default_vocab)
        preset = self.base_config()
        if "dim" in changed and "ffn_dim" not in changed:
            changed["ffn_dim"] = None  # follows dim
        if preset.tie_word_embeddings and not self.TIES:
            why = "has one weight for embedding and output, which this program does not keep one"
            raise ConfigError(f"--preset {self.preset} {why}: use mmm.trainer.lm, or another preset")
        return replace(preset, **changed)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(TransformerOptions):
    """Flags of a Transformer that may have routed experts."""

    NEEDS: ClassVar[dict[str, Need]] = {"top_k": EXPERTS, "expert_dim": EXPERTS, "balance_rate": EXPERTS}
    n_experts: int = 0
    """Experts in each layer; 0: one feed-forward network instead."""
    top_k: int | None = None
    """Experts that each token goes through. Default: 2, or the only one."""
    expert_dim: int | None = None
    """Width of one expert. Default: that of the preset's feed-forward layer."""
    balance_rate: float | None = None
    """How far a step moves the bias of an expert that had more, or less, than the mean load; 0: never. Default: 0.01;
    runs of many thousand steps take less: 0.001."""

    def balance(self) -> float:
        """`balance_rate`, or what stands for it."""
        return 0.01 if self.balance_rate is None else self.balance_rate

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """As `TransformerOptions.model_config`.

        Raises:
            ConfigError: a number of experts, or a rate, below 0.
        """
        if self.n_experts < 0:
            raise ConfigError(f"--n_experts {self.n_experts}: it must not be negative")
        if not 0 <= self.balance() < math.inf:
            raise ConfigError(f"--balance_rate {self.balance_rate}: it must be a number from 0 on, and finite")
        dense = super().model_config(default_vocab)
        if not self.n_experts:
            return dense
        top_k = min(2, self.n_experts) if self.top_k is None else self.top_k
        return replace(dense, n_experts=self.n_experts, top_k=top_k, expert_dim=self.expert_dim)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ExpertOptions):
    """Flags of whatever else a Transformer may have, for a program that takes any of them."""

    TIES = True
    tie_word_embeddings: Annotated[bool, tyro.conf.arg(aliases=["--tie_embeddings"])] = False
    """The output matrix is the embedding's, also where the preset has two."""
    norm_eps: float | None = None
    """Added to the mean square that a norm divides by."""
    rope_theta: float | None = None
    """Base of the wavelengths of rotary positions."""
    rope_scaling: str | None = None
    """Scaling of rotary frequencies, as JSON with the names of Hugging Face's config.json: {"rope_type": "linear",
    "factor": 2.0}, or llama3 with all its numbers; {} for none where the preset has one."""

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """As `ExpertOptions.model_config`; a ConfigError also for a scaling that is none."""
        changed: dict[str, Any] = {name: getattr(self, name) for name in ("norm_eps", "rope_theta")}
        changed = {name: value for name, value in changed.items() if value is not None}
        if self.tie_word_embeddings:
            changed["tie_word_embeddings"] = True
        if self.rope_scaling is not None:
            try:
                changed["rope_scaling"] = RopeScaling.of(parse_json(self.rope_scaling))
            except ValueError as error:
                raise ConfigError(f"--rope_scaling {self.rope_scaling}: {error}") from None
        return replace(super().model_config(default_vocab), **changed)


@dataclass(frozen=True)
class TextData:
    """Tokens to train on, tokens to validate on, and what the record says of them.

    Attributes:
        bytes_per_token: of the text to validate on; None where nobody knows. tokenizer: None where nobody knows.
    """

    train: Tokens
    validation: Tokens
    about: dict[str, object]
    bytes_per_token: float | None = None
    tokenizer: Tokenizer | None = None

    def describe(self) -> dict[str, object]:
        return self.about

    def check(self, global_batch_size: int) -> int:
        """Steps of an epoch.

        Raises:
            DataError: there is less text than one global batch, to train on or to validate on.
        """
        steps = self.train.steps_per_epoch(global_batch_size)
        try:
            self.validation.steps_per_epoch(global_batch_size)
        except DataError as error:
            raise DataError(f"the text's last tenth, for validation: {error}") from None
        return steps


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Flags of where tokens come from."""

    dataset: Literal["text", "shakespeare", "random"] = "text"
    """text: the Python standard library's source, byte by byte (or --text). shakespeare: 1.1 MB of plays, downloaded
    once a host. random: uniform tokens, to time."""
    text: tuple[Path, ...] = ()
    """What to train on instead: files of text; or a folder of `mmm tokens`, nanoGPT's or llm.c's .bin, Megatron's .idx
    and .bin. A mixture: each with a weight, as A:0.7 B:0.3."""
    tokenizer: Path | None = None
    """bytes, chars, a Hugging Face tokenizer.json or a SentencePiece .model. Default: that of a folder of `mmm tokens`,
    else bytes."""
    seq_length: int = 128
    """Tokens a sample."""

    def sources(self) -> Sources:
        """Where the tokens come from, opened once. Raises ConfigError, DataError: as of `load`."""
        if (opened := vars(self).get("_sources")) is None:
            if self.text and self.dataset != "text":
                raise ConfigError(f"--text and --dataset {self.dataset} contradict each other: leave one out")
            text = self.text
            if self.dataset == "shakespeare":
                from mmm.data.text.shakespeare import shakespeare  # with it comes the downloader

                text = (shakespeare(whoami()),)
            opened = open_sources(text, None if self.tokenizer is None else str(self.tokenizer), self.default_tokenizer)
            object.__setattr__(self, "_sources", opened)  # no field: no flag, and no part of the record
        return opened

    def default_tokenizer(self) -> Tokenizer | None:
        """Of texts, where no flag and no file of tokens says; None for bytes."""
        return None

    def default_vocab(self) -> int | None:
        """Vocabulary of the data; None for random tokens, or files of tokens that do not say: the model's."""
        return None if self.dataset == "random" else self.sources().vocab_size

    def documents(self) -> dict[str, bool]:
        """What `Sources.tokens` does with documents."""
        return {}

    def load(self, vocab_size: int, seed: int) -> TextData:
        """The tokens.

        Raises:
            ConfigError, DataError: flags that contradict each other; a text that cannot be used.
        """
        if self.dataset == "random":
            for flag, value in {"text": self.text, "tokenizer": self.tokenizer, **self.documents()}.items():
                if value:
                    raise ConfigError(f"--{flag} and --dataset random contradict each other: leave one out")
            train, validation = (RandomTokens(vocab_size, self.seq_length, each) for each in (seed, seed + 1))
            source = f"uniform random tokens below {vocab_size}"
            return TextData(train, validation, {"dataset": "random", "source": source})
        sources = self.sources()
        if vocab_size < (needed := sources.vocab_size or 0):
            what = f"text has {needed} different bytes" if sources.is_bytes else f"the tokenizer has {needed} tokens"
            raise ConfigError(f"--vocab_size {vocab_size}: {what}; use at least {needed}")
        tokens = sources.tokens(self.seq_length, seed, vocab_size, **self.documents())
        about: dict[str, object] = {"dataset": self.dataset, **sources.describe()}
        if given := [name for name, value in self.documents().items() if value]:
            about["documents"] = given
        return TextData(*tokens, about, sources.bytes_per_token, sources.tokenizer)


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(TextOptions):
    """Flags of what to do with a text's documents."""

    pack: bool = False
    """Fill sequences with whole documents; one that is longer than a sequence is split. For folders of `mmm tokens`,
    and Megatron's .idx and .bin."""
    document_mask: bool = False
    """Neither attention nor positions cross the ends of documents."""

    def documents(self) -> dict[str, bool]:
        return {"pack": self.pack, "document_mask": self.document_mask}


@dataclass(frozen=True, kw_only=True)
class TextProgramOptions(TransformerOptions, TextOptions, RunOptions):
    """Flags of a program that trains a Transformer on text."""


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """How often to evaluate on the validation text, and on how much of it."""

    eval_every: int = 50
    """Steps between two validations, one more at the end; 0: at the end alone."""
    eval_batches: int = 4
    """Global batches in a validation."""

    def validates(self, step: int, steps: int) -> bool:
        """Whether to after this step."""
        return step == steps - 1 or (self.eval_every > 0 and (step + 1) % self.eval_every == 0)

    def check_validation(self) -> None:
        """Raises ConfigError for a number that is too small."""
        if self.eval_every < 0:
            raise ConfigError(f"--eval_every {self.eval_every}: it must not be negative")
        if self.eval_batches < 1:
            raise ConfigError(f"--eval_batches {self.eval_batches}: it must be at least 1")


def resolve(options: TextProgramOptions) -> ResolvedPlan:
    """`resolve_own`, and how `mmm.parallel` parallelizes the model."""
    own = resolve_own(options)
    return resolve_plan(own, transformer_plan(own.sizes), options.seq_length // (own.layout.cp * own.layout.tp))


def resolve_own(options: TextProgramOptions) -> Resolved:
    """For a program that parallelizes the model itself: find the text, and decide on layout, model, batch and steps;
    needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    options.check()
    layout = options.layout(whoami().world_size)
    sizes = options.model_config(options.default_vocab())
    check_transformer(sizes, layout, options.seq_length, options.techniques().cp_style)
    local_batch_size, global_batch_size = batch_sizes(
        options.batch_size, options.global_batch_size, layout.dp, options.default_batch_size
    )
    data = options.load(sizes.vocab_size, options.seed)
    notes = []
    if isinstance(options, ValidationOptions):
        options.check_validation()
        steps_per_epoch, there = data.check(global_batch_size), data.validation.steps_per_epoch(global_batch_size)
        if there < options.eval_batches:
            asked = f"{there} global batches instead of {options.eval_batches}"
            notes.append(f"validation: {asked}, all that the text has")
    else:
        steps_per_epoch = data.train.steps_per_epoch(global_batch_size)
    with torch.device("meta"):
        model = Transformer(sizes)
        sample = torch.zeros(local_batch_size, options.seq_length, dtype=torch.int64)
    return Resolved(
        options=options,
        layout=layout,
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=options.steps(steps_per_epoch),
        notes=tuple(notes),
    )


def check_own_kv_heads(resolved: Resolved) -> None:
    """For an example that shards key/value heads itself: raises LayoutError where ranks would have to share them."""
    heads, tp = resolved.sizes.n_kv_heads, resolved.layout.tp
    if heads % tp:
        text = f"n_kv_heads {heads} is not divisible by tp {tp}"
        raise LayoutError(f"{text}: use a divisor, or mmm.trainer.lm, whose ranks can share a key/value head")


def validation_batches(run: Run, resolved: Resolved, batches: int) -> Iterator[Batch]:
    """This rank's samples of the first global batches of the validation text, on the run's device: the same on every
    mesh, every time. Where the text has fewer, all of them."""
    validation, coordinate = resolved.data.validation, run.layout.dp_coordinate(run.rank.rank)
    for step in range(min(batches, validation.steps_per_epoch(resolved.global_batch_size))):
        yield resolved.local_batch(validation, step, coordinate).to(run.device)
