"""Real data, small: what the programs read from disk in the cases that are drawn."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np

from mmm.data.text.prepare import Preparation, prepare
from support.llamas import CONFIG, write_hugging_face
from support.published import write_cifar, write_mnist

# Weights on disk that many layouts divide.
LLAMA = {**CONFIG, "num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 264}
# Images.
TRAIN, TEST = 72, 20
# To be counted up where something else is written.
DONE = "done-5"


def make(folder: Path) -> Path:
    """Write texts, weights, files in MNIST's format, folders of images; the same every time. What is there stays."""
    folder = folder.resolve()
    if (folder / DONE).exists():
        return folder
    # Of an earlier version.
    shutil.rmtree(folder, ignore_errors=True)
    generator = np.random.RandomState(0)
    for name in ("split", "flat"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    vocabulary = ["loss", "mesh", "rank", "a", "shard", "of", "the", "batch", "is", "summed", "\n", "å"]
    for name, count in (("words.txt", 12_000), ("more.txt", 3_000)):
        (folder / name).write_text(" ".join(rng.choice(vocabulary) for _ in range(count)), encoding="utf-8")
        documents = folder / name.replace(".txt", "-documents")
        prepare(Preparation((folder / name,), documents, separator="\n"), 1)
    write_hugging_face(folder / "llama", LLAMA)
    # Tokens are bytes.
    (folder / "llama" / "tokenizer.json").unlink()
    arrays = []
    for count in (TRAIN, TEST):
        labels = generator.randint(0, 10, count).astype(np.uint8)
        arrays += [_pictures(generator, labels, 28), labels]
    for name, dataset in (("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")):
        write_mnist(folder / name, arrays, dataset)
    write_cifar(folder / "cifar-10-batches-py", 15)
    _files(folder / "flat", generator, 3, 20)
    _files(folder / "split" / "train", generator, 4, 12)
    _files(folder / "split" / "val", generator, 4, 3)
    (folder / DONE).touch()
    return folder


def _pictures(rng: np.random.RandomState, labels: np.ndarray, size: int) -> np.ndarray:
    """(n, size, size) uint8: noise with a bright stripe at a place that the label says."""
    pictures = rng.randint(0, 120, (len(labels), size, size)).astype(np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        picture[2 * label : 2 * label + 3] += 110
    return pictures


def _files(folder: Path, rng: np.random.RandomState, classes: int, per_class: int) -> None:
    """PNG and JPEG files of several sizes and shapes, grey and coloured, one subfolder a class."""
    from PIL import Image

    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for index in range(per_class):
            grey = _pictures(rng, np.array([label]), 20 + index % 5)[0]
            picture = grey if index % 3 else np.stack([grey, grey // 2, 255 - grey], axis=-1)
            picture = picture[:, : len(picture) - index % 4]
            ending = "png" if index % 2 else "jpg"
            Image.fromarray(picture).save(folder / f"class{label}" / f"{index}.{ending}")
