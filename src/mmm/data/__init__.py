"""Batches of text, images, and arrays in a file.

A batch depends on (seed, step, global batch size) and on a rank's place in the batch. It does not depend on the mesh.
"""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.data.arrays import ArrayBatches as ArrayBatches
    from mmm.data.arrays import Arrays as Arrays
    from mmm.data.sequences import Sequences as Sequences
    from mmm.data.text.corpus import Corpus as Corpus
    from mmm.data.text.corpus import read_text_files as read_text_files
    from mmm.data.text.corpus import standard_library as standard_library
    from mmm.data.text.documents import FileTokens as FileTokens
    from mmm.data.text.tokens import Batch as Batch
    from mmm.data.text.tokens import RandomTokens as RandomTokens
    from mmm.data.text.tokens import TextTokens as TextTokens
    from mmm.data.text.tokens import Tokens as Tokens

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.data.arrays": "ArrayBatches Arrays",
        "mmm.data.sequences": "Sequences",
        "mmm.data.text.corpus": "Corpus read_text_files standard_library",
        "mmm.data.text.documents": "FileTokens",
        "mmm.data.text.tokens": "Batch RandomTokens TextTokens Tokens",
    },
)
