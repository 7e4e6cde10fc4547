"""Text that a language model writes: a prompt, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError, DataError
from mmm.models.sampling import Sampling
from mmm.parallel.generate import generate
from mmm.parallel.parallel_model import ParallelModel


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
    most = min(vocabulary, tokenizer.vocab_size)
    found = generate(model, prompt, tokens, block, sampling, most, stop)
    return tokenizer.decode([*prompt[len(bos) :], *(token for token in found if token not in stop)]), len(found)
