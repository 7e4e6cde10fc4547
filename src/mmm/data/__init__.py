"""Batches: what a rank gets depends on (seed, step, global batch size) and its place in the batch, not on the mesh."""

from mmm.data.text import Corpus, read_text_files, standard_library
from mmm.data.tokens import Batch, FileTokens, Mixture, RandomTokens, TextTokens, Tokens

__all__ = [
    "Batch",
    "Corpus",
    "FileTokens",
    "Mixture",
    "RandomTokens",
    "TextTokens",
    "Tokens",
    "read_text_files",
    "standard_library",
]
