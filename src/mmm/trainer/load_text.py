"""The text that flags ask for."""

from __future__ import annotations

from collections.abc import Callable

from mmm.data import RandomTokens
from mmm.data.text.blend import Blend
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.sources import Sources, open_sources
from mmm.data.text.text_data import TextData
from mmm.trainer.config import Text


def open_text(
    flags: Text,
    default_tokenizer: Callable[[], Tokenizer | None] = lambda: None,
) -> Sources | Blend | None:
    """Open the files that the tokens come from. Returns None for random tokens.

    Args:
        flags: the group ``data`` of the flags.
        default_tokenizer: returns the tokenizer of a text if neither a flag nor a file of tokens says which; None for
            bytes.

    Raises:
        ConfigError, DataError: a text that cannot be used.
    """
    if flags.dataset == "random":
        return None
    text = flags.text
    if flags.dataset == "shakespeare":
        # Imported here: with it comes the downloader.
        from mmm.data.text.shakespeare import shakespeare

        text = (shakespeare(),)
    tokenizer = None if flags.tokenizer is None else str(flags.tokenizer)
    if not flags.text_weights:
        return open_sources(text, tokenizer, default_tokenizer, flags.token_dtype)
    sources = [open_sources((path,), tokenizer, default_tokenizer, flags.token_dtype) for path in text]
    return Blend(sources, flags.text_weights)


def load_text(flags: Text, sources: Sources | Blend | None, vocab_size: int, seed: int) -> TextData:
    """The tokens to train on, and those to validate on.

    Args:
        flags: the group ``data`` of the flags.
        sources: what `open_text` returned.
        vocab_size: number of tokens in the model's vocabulary.
        seed: decides the order of the samples, and random tokens.

    Raises:
        ConfigError, DataError: a text that cannot be used, or has a token outside the vocabulary.
    """
    if sources is None:
        train = RandomTokens(vocab_size, flags.seq_length, seed)
        # Other tokens than those of training.
        validation = RandomTokens(vocab_size, flags.seq_length, seed + 1)
        source = f"uniform random tokens below {vocab_size}"
        return TextData(train, validation, {"dataset": "random", "source": source})
    documents = {"pack": flags.pack, "document_mask": flags.document_mask}
    tokens = sources.tokens(flags.seq_length, seed, vocab_size, **documents)
    about: dict[str, object] = {"dataset": flags.dataset, **sources.describe()}
    # Checkpoints compare these names, so flags that were not given are left out.
    asked = [name for name, is_asked in documents.items() if is_asked]
    if asked:
        about["documents"] = asked
    notes = sources.notes(flags.seq_length)
    if notes:
        about["note"] = "; ".join(notes)
    return TextData(*tokens, about, sources.bytes_per_token, sources.tokenizer)
