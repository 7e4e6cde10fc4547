"""The flags of a sample of text at each evaluation: the group ``sample``."""

from __future__ import annotations

from dataclasses import dataclass

from mmm.generate.text import checked
from mmm.models.sampling import Sampling
from mmm.trainer.config.run import check_counts, check_effect


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The text that the model writes at each evaluation."""

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

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        given = {"sample_tokens": self.sample_tokens, "sample_temperature": self.sample_temperature}
        given |= {"sample_top_k": self.sample_top_k, "sample_top_p": self.sample_top_p}
        check_effect(self.prompt is not None, "--prompt", "no text is sampled", "--prompt with a text", **given)
        check_counts(sample_tokens=self.sample_tokens)
        self.sampling(seed=0)

    def sampling(self, seed: int) -> Sampling:
        """How a token is drawn."""
        given = {"temperature": self.sample_temperature, "top_k": self.sample_top_k, "top_p": self.sample_top_p}
        given = {name: value for name, value in given.items() if value is not None}
        return checked(Sampling(seed=seed, **given), "sample_")  # type: ignore[arg-type]
