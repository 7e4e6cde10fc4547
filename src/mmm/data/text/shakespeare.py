"""Tiny Shakespeare (Karpathy 2015, github.com/karpathy/char-rnn): 40,000 lines of plays, 1,115,394 bytes of ASCII."""

from __future__ import annotations

import os
from pathlib import Path

import torch.hub

from mmm.data.cache import Refused, cache_folder, download_once
from mmm.errors import DataError

NAME = "input.txt"
URL = f"https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/{NAME}"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def shakespeare() -> Path:
    """The file of the text in the cache, downloaded once per host.

    Raises:
        DataError: it is not in the cache and cannot be downloaded.
    """
    folder = cache_folder() / "shakespeare"
    path = folder / NAME
    if not os.path.isfile(path):
        try:
            download_once(folder, _download)
        except Refused as refused:
            raise DataError(
                f"--dataset shakespeare is not in {cache_folder()} and cannot be downloaded ({refused}): "
                f"give a text with --text FILE"
            ) from None
    return path


def _download(folder: Path) -> None:
    path = os.fspath(folder / NAME)
    # Raises RuntimeError if the hash is another one.
    torch.hub.download_url_to_file(URL, path, hash_prefix=SHA256, progress=False)
