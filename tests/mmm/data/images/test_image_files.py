"""Images from files: MNIST and CIFAR-10 as published, folders. Damaged files are named; folders are only read. Sets of
images: shapes, normalisation, the digits that come with the package, made-up images, the record."""

import hashlib
import io
import os
import pickle
import shutil
from importlib import resources

import numpy as np
import pytest
import torch
from PIL import Image

from mmm.data.images import digits
from mmm.data.images.batches import BatchOrder, ImageLoader
from mmm.data.images.datasets import load_images
from mmm.data.images.fake import FakeImages
from mmm.data.images.image_set import convert_channels, resize
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DataError
from support.published import expected_cifar, mnist_arrays, write_cifar, write_mnist

# --- MNIST ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mnist(tmp_path):
    """A folder with a small MNIST as torchvision keeps it."""
    write_mnist(tmp_path)
    return tmp_path


def test_mnist_is_read_and_not_written(mnist):
    before = sorted(mnist.rglob("*"))
    data = load_images("mnist", mnist)
    assert sorted(mnist.rglob("*")) == before
    assert (data.name, data.note, data.source) == ("mnist", "", str(mnist))
    arrays = mnist_arrays()
    assert (data.shape, data.train.samples, data.test.samples) == ((1, 28, 28), 20, 7)
    images, labels = data.train.images([3, 1])
    # Mean and standard deviation as MNIST's are usually taken.
    expected = (torch.from_numpy(arrays[0][[3, 1]]) / 255 - 0.1307) / 0.3081
    assert torch.allclose(images[:, 0], expected, atol=1e-5)
    assert labels.tolist() == arrays[1][[3, 1]].tolist()


@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: b"\0" + content[4:], lambda _: b""])
def test_a_damaged_file_is_refused(mnist, change):
    path = mnist / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=f"{mnist} does not hold MNIST, or a file of it is damaged"):
        load_images("mnist", mnist)


@pytest.mark.parametrize(
    ("name", "dataset"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST"), ("cifar10", "CIFAR10")]
)
def test_what_is_missing_is_named_and_nothing_stands_in(tmp_path, name, dataset):
    with pytest.raises(DataError, match=f"{tmp_path} does not hold {dataset}"):
        load_images(name, tmp_path)


# --- CIFAR-10 -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar_folder(tmp_path, monkeypatch):
    """A folder in CIFAR-10's layout of 4 images a batch, whose md5 torchvision is made to expect."""
    dataset = import_torchvision("datasets").CIFAR10
    folder = tmp_path / "given"
    write_cifar(folder / dataset.base_folder, 4)
    for name, value in expected_cifar(folder / dataset.base_folder).items():
        monkeypatch.setattr(dataset, name, value)
    return folder


def test_cifar(cifar_folder):
    data = load_images("cifar10", cifar_folder)
    assert (data.shape, data.train.samples, data.test.samples) == ((3, 32, 32), 20, 4)
    assert data.train.labels[[0, 4, 5]].tolist() == [0, 1, 1]
    expected = np.random.RandomState(1).randint(0, 256, (4, 3072))[0].reshape(3, 32, 32)
    assert data.train.pixels([4])[0].tolist() == expected.tolist()
    assert data.classes[3] == "class 3"


def test_a_pickle_with_another_md5_is_not_opened(cifar_folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    batch = cifar_folder / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="damaged"):
        load_images("cifar10", cifar_folder)
    assert not (tmp_path / "sprung").exists()
    batch.unlink()
    with pytest.raises(DataError, match="damaged"):
        load_images("cifar10", cifar_folder)


# --- folders --------------------------------------------------------------------------------------------------------


def picture(path, colour, size=(40, 30), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


def in_two_classes(folder, image, name="0.png", **options):
    """A folder with the same picture in each of two classes. Returns what reads it, by more options."""
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        image.save(folder / label / name, **options)
    return lambda **settings: load_images("folder", folder, **settings).train.pixels([0])


@pytest.fixture
def pictures(tmp_path):
    """60 pictures: cats are red, dogs are blue; each is a little different."""
    for i in range(30):
        picture(tmp_path / "cat" / f"{i}.png", (200 + i, 0, 0))
        picture(tmp_path / "dog" / f"{i}.jpg", (0, 0, 200 + i))
    (tmp_path / "dog" / "notes.txt").write_text("not a picture")
    return tmp_path


def test_a_folder_is_split_by_the_hash_of_its_paths(pictures, tmp_path_factory):
    data = load_images("folder", pictures, image_size=16)
    assert data.classes == ("cat", "dog")
    assert data.train.samples + data.test.samples == 60
    # A tenth of 60, by chance.
    assert 1 <= data.test.samples <= 14
    images, labels = data.train.images(range(data.train.samples))
    assert (images.shape[1:], labels.sum() > 0) == ((3, 16, 16), True)
    # Cats have label 0.
    red = images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2))
    assert torch.equal(red, labels == 0)
    assert not data.train.in_memory
    moved = tmp_path_factory.mktemp("moved") / "elsewhere"
    shutil.copytree(pictures, moved)
    assert load_images("folder", moved, image_size=16).sha256 == data.sha256
    (moved / "cat" / "new.png").write_bytes((moved / "cat" / "0.png").read_bytes())
    grown = load_images("folder", moved, image_size=16)
    held_out = {str(path) for path in grown.test._paths} - {str(b"cat/new.png")}
    # A new file moves no other.
    assert held_out == {str(path) for path in data.test._paths}


def test_train_and_test_folders(tmp_path):
    for split, samples in (("train", range(4)), ("test", range(2))):
        for name, colour in (("b", 250), ("a", 5)):
            for i in samples:
                picture(tmp_path / split / name / "deep" / f"{i}.PNG", colour, mode="L")
    # a test set may lack a class
    shutil.rmtree(tmp_path / "test" / "a")
    data = load_images("folder", tmp_path, image_size=8, channels=1)
    assert (data.train.samples, data.test.samples, data.shape) == (8, 2, (1, 8, 8))
    assert data.test.labels[[0, 1]].tolist() == [1, 1]
    assert data.test.pixels([0]).unique().tolist() == [250]
    picture(tmp_path / "test" / "zebra" / "0.png", 0, mode="L")
    with pytest.raises(DataError, match=r"other classes \['zebra'\]"):
        load_images("folder", tmp_path)
    shutil.rmtree(tmp_path / "test")
    with pytest.raises(DataError, match="has train/ and none of val, validation, test"):
        load_images("folder", tmp_path)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_kinds_of_pixels_are_converted(tmp_path, mode, channels):
    image = Image.new("RGB", (20, 10), (9, 255, 255)).convert(mode)
    read = in_two_classes(tmp_path, image, "0.jpg" if mode == "CMYK" else "0.png")
    assert read(image_size=4, channels=channels).shape == (1, channels, 4, 4)


def test_the_middle_square_is_cut_out(tmp_path):
    wide = Image.new("L", (48, 16), 0)
    # The middle square is white.
    wide.paste(255, (16, 0, 32, 16))
    assert in_two_classes(tmp_path, wide)(image_size=16, channels=1).unique().tolist() == [255]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["page", "FIFO", "EPS"])
def test_a_file_that_is_no_image_is_named(pictures, kind):
    """A FIFO is not waited for. Of EPS, Pillow's reader would start a program."""
    path = pictures / "cat" / "7.png"
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "EPS":
        Image.new("RGB", (9, 9)).save(path, "EPS")
    else:
        path.write_bytes(b"<html>not found</html>")
    data = load_images("folder", pictures, image_size=8)
    split = data.train if b"cat/7.png" in data.train._paths else data.test
    with pytest.raises(DataError, match=r"cat/7.png is not an image that can be read"):
        split.images(range(split.samples))


@pytest.mark.parametrize("workers", [0, 1])
def test_half_an_image_is_named_when_it_is_read(pictures, workers):
    noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "PNG")
    # The head is there, and not all of the pixels.
    (pictures / "cat" / "7.png").write_bytes(stream.getvalue()[:5000])
    data = load_images("folder", pictures, image_size=8)
    split = data.train if b"cat/7.png" in data.train._paths else data.test
    loader = ImageLoader(BatchOrder(split, 1, train=False), workers=workers)
    with pytest.raises(DataError, match=r"^/.*cat/7.png is not an image .*take it out of the folder$"):
        list(loader.epoch())


def test_sixteen_bit_images_are_refused(tmp_path):
    read = in_two_classes(tmp_path, Image.new("I;16", (9, 9), 4000))
    with pytest.raises(DataError, match="more than 8 bits a channel"):
        read()


def test_folders_without_classes_or_images(tmp_path):
    with pytest.raises(DataError, match="0 classes"):
        load_images("folder", tmp_path)
    (tmp_path / ".git").mkdir()
    with pytest.raises(DataError, match="0 classes"):
        load_images("folder", tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="cat has no image"):
        load_images("folder", tmp_path)
    for name in ("cat", "dog"):
        picture(tmp_path / name / "0.png", 0, mode="L")
    data = load_images("folder", tmp_path)
    assert (data.train.samples, data.test.samples) == (1, 1)
    with pytest.raises(DataError, match="1 or 3 channels, not 4"):
        load_images("folder", tmp_path, channels=4)


def test_every_ending_of_what_is_read_is_an_image_and_others_are_counted(tmp_path):
    for name in ("1", "2", "10"):
        picture(tmp_path / name / "0.png", 0)
        picture(tmp_path / name / "1.gif", 0, mode="P")
        picture(tmp_path / name / "2.jfif", 0, format="JPEG")
        (tmp_path / name / "3.heic").write_bytes(b"of another format")
    (tmp_path / "1" / "notes.txt").write_text("no image")
    (tmp_path / "4.png").write_bytes((tmp_path / "1" / "0.png").read_bytes())
    data = load_images("folder", tmp_path, image_size=8)
    # Three of each class; heic, the text and the picture without a class are left out.
    assert data.train.samples + data.test.samples == 9
    assert data.train.images(range(data.train.samples))[0].shape[1:] == (3, 8, 8)
    assert "5 files" in data.note
    record = data.describe()
    assert (record["classes"], record["class_names"]) == (3, ["1", "10", "2"])


def test_an_image_is_turned_as_its_exif_says(tmp_path):
    upright = Image.new("L", (16, 16), 0)
    # The upper half is white.
    upright.paste(255, (0, 0, 16, 8))
    exif = Image.Exif()
    # orientation: the camera was turned by a quarter
    exif[0x0112] = 6
    (pixels,) = in_two_classes(tmp_path, upright.rotate(90), exif=exif)(image_size=16, channels=1)
    assert torch.equal(pixels, torch.from_numpy(np.array(upright))[None])


def test_transparent_pixels_are_laid_on_white_and_it_is_said(tmp_path, caplog):
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 255))
    # blue, and not seen
    half.paste((0, 0, 255, 0), (0, 0, 4, 8))
    with caplog.at_level("INFO", logger="mmm"):
        (pixels,) = in_two_classes(tmp_path, half)(image_size=8)
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]
    assert pixels[:, 0, 7].tolist() == [255, 0, 0]
    assert "transparent" in caplog.text


def test_what_is_hidden_is_passed_over(pictures):
    plain = load_images("folder", pictures, image_size=8)
    picture(pictures / ".ipynb_checkpoints" / "0-checkpoint.png", 0)
    picture(pictures / "cat" / ".ipynb_checkpoints" / "1-checkpoint.png", 0)
    (pictures / ".empty").mkdir()
    # A resource fork, which looks like a picture.
    (pictures / "dog" / "._0.jpg").write_bytes(b"macOS's")
    data = load_images("folder", pictures, image_size=8)
    assert (data.classes, data.sha256) == (("cat", "dog"), plain.sha256)


def test_one_class_is_refused(tmp_path):
    picture(tmp_path / "pets" / "cat" / "0.png", 0)
    for i in range(2):
        picture(tmp_path / "pets" / "dog" / f"{i}.png", 0)
    with pytest.raises(DataError, match=r"1 classes \['pets'\]"):
        load_images("folder", tmp_path)
    assert load_images("folder", tmp_path / "pets").classes == ("cat", "dog")
    for split in ("train", "val"):
        picture(tmp_path / "split" / split / "cat" / "0.png", 0)
    with pytest.raises(DataError, match=r"1 classes \['cat'\]"):
        load_images("folder", tmp_path / "split")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["mnist", "cifar10", "folder"])
def test_strides_are_those_of_the_shape(request, name, channels):
    made = request.getfixturevalue({"mnist": "mnist", "cifar10": "cifar_folder", "folder": "pictures"}[name])
    data = load_images(name, made, channels=channels, image_size=16)
    for image_set in (data.train, data.test):
        images, _ = image_set.images([0, 1, 2])
        assert images.stride() == torch.empty(images.shape).stride()


# --- digits ---------------------------------------------------------------------------------------------------------


def test_the_digits_are_scikit_learns_byte_for_byte():
    packed = resources.files("mmm.data.images").joinpath("embedded/digits.csv.gz").read_bytes()
    assert hashlib.sha256(packed).hexdigest() == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
    assert "BSD 3-Clause" in resources.files("mmm.data.images").joinpath("embedded/README.md").read_text(
        encoding="utf-8"
    )
    images, labels = digits.read()
    assert images.shape == (1797, 8, 8)
    assert images.max() == 16
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


# --- made-up images -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 16, 24)])
def test_made_up_images_can_be_learned(shape):
    train = FakeImages(500, shape, 10, seed=1)
    test = FakeImages(300, shape, 10, seed=1, first=500)
    (images, labels), (test_images, test_labels) = train.images(range(500)), test.images(range(300))
    assert labels.bincount().tolist() == [50] * 10
    # (10, pixels): the mean image of each class
    centres = torch.stack([images[labels == c].mean(0) for c in range(10)]).flatten(1)
    nearest = torch.cdist(test_images.flatten(1), centres).argmin(1)
    # By chance it would be 0.1.
    assert (nearest == test_labels).float().mean() > 0.9
    assert images.std() == pytest.approx(0.75, abs=0.25)
    # no two alike
    assert len(torch.cat([images, test_images]).flatten(1).unique(dim=0)) == 800


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_an_image_is_the_same_in_any_batch():
    pixels = torch.randint(0, 256, (9, 3, 11, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for channels in (1, 3):
        full = resize(convert_channels(pixels, channels), (28, 30))
        for i in range(9):
            one = convert_channels(pixels[i : i + 1], channels)
            assert torch.equal(resize(one, (28, 30)), full[i : i + 1])
    exact = torch.nn.functional.interpolate(pixels.double(), (28, 30), mode="bilinear", antialias=True)
    assert (resize(pixels, (28, 30)) - exact).abs().max() <= 1


# --- names and the record -------------------------------------------------------------------------------------------


def test_the_record():
    record = load_images("digits", channels=3, image_size=32).describe()
    assert record["dataset"] == record["dataset_asked"] == "digits"
    assert (record["train_images"], record["test_images"], record["classes"]) == (1437, 360, 10)
    assert record["class_names"] == list("0123456789")
    assert record["image_shape"] == [3, 32, 32]
    assert "UCI" in record["source"]
    assert len(record["sha256"]) == 64
    assert record["note"] == ""
