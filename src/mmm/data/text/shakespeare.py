"""Tiny Shakespeare (Karpathy 2015, github.com/karpathy/char-rnn): 40,000 lines of plays, 1,115,394 bytes of ASCII."""

from __future__ import annotations

import os
from pathlib import Path

from mmm.data.download import File, Refused, cache_folder, obtain
from mmm.errors import DataError
from mmm.runtime.ranks import Rank

FILE = File(
    "input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    1_115_394,
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)


def shakespeare(ranks: Rank | None = None) -> Path:
    """The text's file in the cache, downloaded once a host.

    Args:
        ranks: who this process is, so that one rank of a host downloads and the others wait for it.

    Raises:
        DataError: it is not in the cache, and cannot be downloaded.
    """
    home = cache_folder() / "shakespeare"
    if not os.path.isfile(home / FILE.name):
        try:
            obtain(home, (FILE,), ranks)
        except Refused as refused:
            raise DataError(
                f"--dataset shakespeare is not in {cache_folder()} and cannot be downloaded ({refused}): "
                f"give a text with --text FILE"
            ) from None
    return home / FILE.name
