"""What a file is, by the end of its name and its first bytes.

Text and JSON lines are read (`mmm.data.text.pieces`), and files of tokens (`mmm.data.text.token_file`). What is of
another known format is refused with what to do instead: read as one of these, it would train a model on something
else.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mmm.errors import DataError
from mmm.outside import open_file, parse_json

HEAD = 1 << 12  # bytes that are looked at
JSON_LINES = (".jsonl", ".ndjson")
TOKENS = (".bin", ".idx")
AS_IT_IS = "or train on the file as it is, by mmm tokens --field ''"
_TO_LINES = "write its rows as JSON lines, such as by pandas: frame.to_json('NAME.jsonl', orient='records', lines=True)"
_UNPACK = "unpack it first"
_NO_TOKENS = "it has no tokens to train on"


class Format(NamedTuple):
    """A format that is neither text nor tokens.

    Attributes:
        what: it is called. suffixes: of its files' names. magic: its files begin with one of these; of 3 bytes at
            least, or a file of tokens could begin so. instead: what to do.
    """

    what: str
    suffixes: tuple[str, ...]
    magic: tuple[bytes, ...]
    instead: str


FORMATS = (
    Format("gzip", (".gz", ".tgz"), tuple(b"\x1f\x8b\x08" + bytes([flags]) for flags in range(32)), _UNPACK),
    Format("Zstandard", (".zst", ".zstd"), (b"\x28\xb5\x2f\xfd",), _UNPACK),
    Format("xz", (".xz", ".lzma"), (b"\xfd7zXZ\0",), _UNPACK),
    Format("bzip2", (".bz2",), tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), _UNPACK),
    Format("LZ4", (".lz4",), (b"\x04\x22\x4d\x18",), _UNPACK),
    Format("a zip archive, as NumPy's .npz and PyTorch's .pt", (".zip", ".npz"), (b"PK\3\4", b"PK\5\6"), _UNPACK),
    Format("7-Zip", (".7z",), (b"7z\xbc\xaf\x27\x1c",), _UNPACK),
    Format("a tar archive", (".tar",), (), _UNPACK),
    Format(
        "a NumPy array",
        (".npy",),
        (b"\x93NUMPY",),
        "tokens below 65536 are written by numpy.load(PATH).astype('<u2').tofile('NAME.bin')",
    ),
    Format("Parquet", (".parquet",), (b"PAR1",), _TO_LINES),
    Format("Arrow", (".arrow", ".feather"), (b"ARROW1\0\0",), _TO_LINES),
    Format("ORC", (".orc",), (), _TO_LINES),
    Format("Avro", (".avro",), (b"Obj\1",), _TO_LINES),
    Format("HDF5", (".h5", ".hdf5"), (b"\x89HDF\r\n\x1a\n",), _TO_LINES),
    Format("SQLite", (".sqlite", ".sqlite3", ".db"), (b"SQLite format 3\0",), _TO_LINES),
    Format("TFRecord", (".tfrecord", ".tfrecords"), (), _TO_LINES),
    Format("MosaicML's MDS", (".mds",), (b"MDS2",), _TO_LINES),
    Format("an index of Megatron's", (), (b"MMIDIDX\0", b"TNTIDX\0\0"), "it is to be called .idx, beside its .bin"),
    Format("safetensors", (".safetensors",), (), _NO_TOKENS),
    Format("GGUF or GGML", (".gguf", ".ggml"), (b"GGUF", b"lmgg", b"fmgg", b"tjgg"), _NO_TOKENS),
    Format(
        "a pickle",
        (".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9", *(b"\x80%c\x95" % version for version in (4, 5))),
        _NO_TOKENS,
    ),
    Format("PDF", (".pdf",), (b"%PDF-",), "extract its text first"),
    Format("an image", (".png", ".jpg", ".jpeg", ".gif", ".webp"), (b"\x89PNG\r\n\x1a\n",), _NO_TOKENS),
)  # fmt: skip
_BYTE_ORDER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


def read_head(path: Path) -> bytes:
    """The first bytes. Raises OSError."""
    with open_file(path) as file:
        return file.read(HEAD)


def check_magic(path: Path, head: bytes) -> None:
    """Raises DataError where a file begins as one of another format."""
    for each in FORMATS:
        if head.startswith(each.magic):
            raise DataError(f"{path} is {each.what}, by its first bytes: {each.instead}")
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 30:
        raise DataError(f"{path} is safetensors, by its first bytes: {_NO_TOKENS}")


def check_text_file(path: Path, name: str, as_it_is: bool = False) -> bool:
    """Whether it is JSON lines; else it is text.

    Args:
        name: for messages. as_it_is: JSON, CSV and the like are text as well.

    Raises:
        DataError: it is neither, or is empty, or is not in UTF-8. OSError: it cannot be read.
    """
    head, suffix = read_head(path), path.suffix.lower()
    if not head:
        raise DataError(f"{name}: the file is empty")
    check_magic(path, head)
    for each in FORMATS:
        if suffix in each.suffixes:
            raise DataError(f"{name} is {each.what}, by its name: {each.instead}")
    if suffix in TOKENS:
        raise DataError(f"{name} is a file of tokens, by its name, and no text: programs take it by --text")
    _check_encoding(head, name)
    if as_it_is:
        return False
    if suffix in (".csv", ".tsv"):
        raise DataError(f"{name} is a table, by its name: {_TO_LINES}; {AS_IT_IS}")
    objects = suffix in JSON_LINES or _begins_with_object(path, head)
    if objects and suffix not in (*JSON_LINES, ".json"):
        raise DataError(f"{name}: its first line is a JSON object: call it {path.stem}.jsonl; {AS_IT_IS}")
    if suffix == ".json" and not objects:
        raise DataError(
            f"{name} is JSON, and its first line is no object: write a document a line, as {path.stem}.jsonl, such as "
            f"by jq -c '.[]' {path}; {AS_IT_IS}"
        )
    return objects


def _begins_with_object(path: Path, head: bytes) -> bool:
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return False
    with path.open("rb") as file:
        line = next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:
        parse_json(line)
        return True
    except ValueError:
        return False


def _check_encoding(head: bytes, name: str) -> None:
    found = next((encoding for mark, encoding in _BYTE_ORDER_MARKS if head.startswith(mark)), None)
    even, odd = head[0:HEAD:2].count(0), head[1:HEAD:2].count(0)
    if found is None and max(even, odd) > max(len(head) / 5, 10 * min(even, odd), 2):
        found = "UTF-16LE" if odd > even else "UTF-16BE"
    if found is not None:
        raise DataError(f"{name} is {found}, and texts are in UTF-8: convert it by iconv -f {found} -t UTF-8")


def refuse_other_formats(path: Path) -> None:
    """For a text that ``--text`` names: as `check_text_file`, and raises DataError for JSON lines too."""
    if check_text_file(path, f"--text {path}"):
        made = f"mmm tokens {path} -o {path.stem}"
        raise DataError(
            f"--text {path} is JSON lines, whose first has neither messages nor prompt: of texts, prepare it by "
            f"{made}, and give that folder"
        )
