"""Batches: what a rank gets depends on (seed, step, global batch size) and its place in the batch, not on the mesh."""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.data.text import Corpus as Corpus
    from mmm.data.text import read_text_files as read_text_files
    from mmm.data.text import standard_library as standard_library
    from mmm.data.tokens import Batch as Batch
    from mmm.data.tokens import FileTokens as FileTokens
    from mmm.data.tokens import Mixture as Mixture
    from mmm.data.tokens import RandomTokens as RandomTokens
    from mmm.data.tokens import TextTokens as TextTokens
    from mmm.data.tokens import Tokens as Tokens

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.data.text": "Corpus read_text_files standard_library",
        "mmm.data.tokens": "Batch FileTokens Mixture RandomTokens TextTokens Tokens",
    },
)
