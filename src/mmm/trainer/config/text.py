"""What the programs that train a Transformer on text have in common: flags, and everything decided before the ranks
meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mmm.data import RandomTokens
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.sources import Sources, open_sources
from mmm.errors import ConfigError
from mmm.models.rope import RopeScaling
from mmm.models.transformer import TransformerConfig
from mmm.outside import parse_json
from mmm.runtime.ranks import whoami
from mmm.trainer.config.options import RunOptions
from mmm.trainer.config.resolve_text import TextData
from mmm.trainer.config.transformer_options import ExpertOptions, TransformerOptions


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
