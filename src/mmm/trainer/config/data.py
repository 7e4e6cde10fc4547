"""The flags of where a trainer's tokens and images come from: the group ``data``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmm.data import RandomTokens
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.sources import Sources, open_sources
from mmm.data.text.text_data import TextData
from mmm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Where tokens come from, and what becomes of a text's documents."""

    dataset: Literal["text", "shakespeare", "random"] = "text"
    """text: the Python standard library's source, byte by byte (or --text). shakespeare: 1.1 MB of plays, downloaded
    once a host. random: uniform tokens, to time."""
    text: tuple[Path, ...] = ()
    """What to train on instead: files of text, or of conversations (.jsonl: messages, or prompt and answer; the loss is
    that of the answers); a folder of `mmm tokens`, nanoGPT's or llm.c's .bin, Megatron's .idx and .bin."""
    tokenizer: Path | None = None
    """bytes, chars, a Hugging Face tokenizer.json or a SentencePiece .model. Default: that of a folder of `mmm tokens`,
    else bytes."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in a .bin without a header, as of nanoGPT (uint16). Other files say it themselves."""
    seq_length: int = 128
    """Tokens a sample."""
    pack: bool = False
    """Fill sequences with whole documents; one that is longer than a sequence is split. For folders of `mmm tokens`,
    and Megatron's .idx and .bin."""
    document_mask: bool = False
    """With --pack: neither attention nor positions cross the ends of documents."""

    def check(self) -> None:
        """Raises ConfigError for flags that contradict each other."""
        if self.token_dtype and not any(".bin" in path.name for path in self.text):
            raise ConfigError(f"--token_dtype {self.token_dtype} is for a .bin of --text, and there is none")
        if self.text and self.dataset != "text":
            raise ConfigError(f"--text and --dataset {self.dataset} contradict each other: leave one out")
        if self.dataset == "random":
            for flag in ("tokenizer", "pack", "document_mask"):
                if getattr(self, flag):
                    raise ConfigError(f"--{flag} and --dataset random contradict each other: leave one out")

    def sources(self, default_tokenizer: Callable[[], Tokenizer | None] = lambda: None) -> Sources | None:
        """Where the tokens come from, opened; None for random ones.

        Args:
            default_tokenizer: of texts, where no flag and no file of tokens says; None for bytes.

        Raises:
            ConfigError, DataError: a text that cannot be used.
        """
        if self.dataset == "random":
            return None
        text = self.text
        if self.dataset == "shakespeare":
            from mmm.data.text.shakespeare import shakespeare  # with it comes the downloader

            text = (shakespeare(),)
        tokenizer = None if self.tokenizer is None else str(self.tokenizer)
        return open_sources(text, tokenizer, default_tokenizer, self.token_dtype)

    def load(self, sources: Sources | None, vocab_size: int, seed: int) -> TextData:
        """The tokens.

        Args:
            sources: of `sources`.

        Raises:
            ConfigError, DataError: a text that cannot be used, or has more different tokens than the vocabulary.
        """
        if sources is None:
            train, validation = (RandomTokens(vocab_size, self.seq_length, each) for each in (seed, seed + 1))
            source = f"uniform random tokens below {vocab_size}"
            return TextData(train, validation, {"dataset": "random", "source": source})
        needed = sources.vocab_size or 0
        if vocab_size < needed:
            what = f"text has {needed} different bytes" if sources.is_bytes else f"the tokenizer has {needed} tokens"
            raise ConfigError(f"--vocab_size {vocab_size}: {what}; use at least {needed}")
        documents = {"pack": self.pack, "document_mask": self.document_mask}
        tokens = sources.tokens(self.seq_length, seed, vocab_size, **documents)
        about: dict[str, object] = {"dataset": self.dataset, **sources.describe()}
        asked = [name for name, is_asked in documents.items() if is_asked]
        if asked:
            about["documents"] = asked
        if notes := sources.notes(self.seq_length):
            about["note"] = "; ".join(notes)
        return TextData(*tokens, about, sources.bytes_per_token, sources.tokenizer)
