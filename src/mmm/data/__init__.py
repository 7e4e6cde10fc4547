"""Batches of text, images, and arrays in a file.

A batch depends on (seed, step, global batch size) and on a rank's place in the batch. It does not depend on the mesh.
"""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.data.text.tokens import Batch as Batch
    from mmm.data.text.tokens import RandomTokens as RandomTokens
    from mmm.data.text.tokens import Tokens as Tokens

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.data.text.tokens": "Batch RandomTokens Tokens",
    },
)
