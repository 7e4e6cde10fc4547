"""A sample of text at each evaluation: ``--prompt``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError, DataError
from mmm.parallel.parallel_model import ParallelModel
from mmm.trainer.options import BaseOptions, Need
from mmm.trainer.resolve import Resolved
from mmm.trainer.run.core import Run
from mmm.trainer.run.record import Record

if TYPE_CHECKING:
    from mmm.models.sampling import Sampling

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
        from mmm.models.sampling import Sampling

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


def checked(sampling: Sampling, prefix: str = "") -> Sampling:
    """It itself. Raises ConfigError for what is wrong with it."""
    for name, rule in sampling.problems():
        raise ConfigError(f"--{prefix}{name} {getattr(sampling, name)}: {rule}")
    return sampling


def encode_prompt(
    prompt: str, tokenizer: Tokenizer | None, block: int, vocabulary: int, bos: Sequence[int] = ()
) -> list[int]:
    """The tokens of a prompt, `bos` before them, unless the prompt begins with those by itself.

    Raises:
        DataError: a character that the vocabulary lacks, or no tokenizer. ConfigError: it is empty, or too long.
    """
    if tokenizer is None:
        raise DataError("--prompt: no tokenizer is known, to make tokens of it; give --tokenizer, or a text with one")
    try:
        tokens = [int(token) for token in tokenizer.encode(prompt.encode())]
    except UnicodeEncodeError:
        raise DataError("--prompt is no UTF-8") from None
    except DataError as error:
        raise DataError(f"--prompt: {error}") from None
    if tokens[: len(bos)] != [*bos]:
        tokens = [*bos, *tokens]
    if not tokens:
        raise ConfigError("--prompt is empty: give a text to go on with")
    if max(tokens) >= vocabulary:
        raise DataError(f"--prompt has the token {max(tokens)}, and the model's vocabulary has {vocabulary} tokens")
    if len(tokens) > block:
        raise ConfigError(f"--prompt has {len(tokens)} tokens, and the model's block {block}: shorten it")
    return tokens


def sample_text(
    model: ParallelModel,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    tokens: int,
    sampling: Sampling,
    block: int,
    vocabulary: int,
    stop: Sequence[int] = (),
    bos: Sequence[int] = (),
) -> tuple[str, int]:
    """The prompt, without the `bos` that it begins with, and what follows; of how many tokens that is. A collective.

    Args: as of `generate`.
    """
    from mmm.parallel.generate import generate  # a run with --prompt only

    most = min(vocabulary, tokenizer.vocab_size)
    found = generate(model, prompt, tokens, block, sampling, most, stop)
    return tokenizer.decode([*prompt[len(bos) :], *(token for token in found if token not in stop)]), len(found)


def log_sample(run: Run, model: ParallelModel, resolved: Resolved, bos: Sequence[int], stop: Sequence[int]) -> None:
    """Have the model go on with ``--prompt``; log it, and keep it in the record. A collective."""
    options: Any = run.options
    if options.prompt is None:
        return
    data, vocabulary = resolved.data, resolved.sizes.vocab_size
    block = data.train.seq_length
    prompt = encode_prompt(options.prompt, data.tokenizer, block, vocabulary, bos)
    tokens, sampling = options.sample_tokens or 100, options.sampling()
    text, _ = sample_text(model, prompt, data.tokenizer, tokens, sampling, block, vocabulary, stop, bos)
    run.log.info("sample after step %d:\n%s", run.clock.step, text, stacklevel=2)
    record = run.hook(Record)
    before = () if record is None else record.facts.get("samples", ())
    kept = [*before, {"iter": run.clock.step, "text": text}]
    run.describe(samples=kept)
