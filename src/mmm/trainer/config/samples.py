"""The flags of a sample of text at each evaluation: ``--prompt``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmm.errors import ConfigError
from mmm.generate.text import checked, encode_prompt
from mmm.models.sampling import Sampling
from mmm.trainer.config.options import BaseOptions, Need
from mmm.trainer.config.resolve import Resolved

PROMPT = Need(
    lambda options, layout: options.prompt is not None, "--prompt", "no text is sampled", "--prompt with a text"
)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(BaseOptions):
    """Flags of the text that a language model writes at each evaluation."""

    NEEDS: ClassVar[dict[str, Need]] = dict.fromkeys(
        ("sample_tokens", "sample_temperature", "sample_top_k", "sample_top_p"), PROMPT
    )
    prompt: str | None = None
    """At each evaluation, have the model go on with this text; it is logged, and in the record."""
    sample_tokens: int | None = None
    """With --prompt, how many tokens. Default: 100."""
    sample_temperature: float | None = None
    """With --prompt, what the logits are divided by; 0: always the most probable token. Default: 1."""
    sample_top_k: int | None = None
    """With --prompt, only among so many of the most probable tokens. Default: all."""
    sample_top_p: float | None = None
    """With --prompt, only among the most probable tokens that have this probability together. Default: 1, all."""

    def sampling(self) -> Sampling:
        """How a token is drawn.

        Raises:
            ConfigError: a value that is wrong by itself.
        """
        if self.sample_tokens is not None and self.sample_tokens < 1:
            raise ConfigError(f"--sample_tokens {self.sample_tokens}: it must be at least 1")
        given = {"temperature": self.sample_temperature, "top_k": self.sample_top_k, "top_p": self.sample_top_p}
        given = {name: value for name, value in given.items() if value is not None}
        return checked(Sampling(seed=self.seed, **given), "sample_")  # type: ignore[arg-type]

    def check_prompt(self, resolved: Resolved, bos: Sequence[int]) -> None:
        """Raises ConfigError, DataError: a prompt, or how to go on with it, that does not fit."""
        if self.prompt is not None:
            self.sampling()
            block, vocabulary = resolved.data.train.seq_length, resolved.sizes.vocab_size
            encode_prompt(self.prompt, resolved.data.tokenizer, block, vocabulary, bos)
