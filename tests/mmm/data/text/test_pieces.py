"""Pieces of texts: together they have the documents of the text, whatever its separators, its bytes and their size."""

import random

import pytest

from mmm.data.text.pieces import TextFile, read_documents, split

PIECE = 1 << 24


def pieces_of(path, size, separator, splittable=True):
    return list(split([TextFile(path, False)], size, separator, splittable))


def documents_of(path, size, separator):
    found = pieces_of(path, size, separator)
    assert [piece.begin for piece in found] == [0, *(piece.end for piece in found[:-1])]
    assert found[-1].end == path.stat().st_size
    assert all(piece.end - piece.begin >= size for piece in found[:-1])
    return [each for piece in found for each in read_documents(piece, separator, "text", utf8=False)]


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"aba", b"aab", b"aaaa", "é".encode(), b"<s>"], ids=str)
def test_documents_are_those_of_the_text(tmp_path, separator):
    generator, path = random.Random(0), tmp_path / "text"
    letters = [bytes([byte]) for byte in {*separator, *b"ab", 0x80, 0xBF, 0xC3}] + [separator] * 2
    for _ in range(60):
        text = b"".join(generator.choice(letters) for _ in range(generator.randrange(1, 40)))
        path.write_bytes(text)
        expected = [each for each in text.split(separator) if each]
        for size in (1, 2, 3, 7, 20):
            assert documents_of(path, size, separator) == expected


def test_a_separator_at_the_edge_of_a_piece(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * (PIECE - 1) + b"\n\n" + b"\n" + b"b" * 100 + b"\n\n" + b"c" * 50)
    assert list(map(len, documents_of(path, PIECE, b"\n\n"))) == [PIECE - 1, 101, 50]
