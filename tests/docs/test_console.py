"""What the pages' console blocks show is what their commands print."""

import pytest

from support.console import WRITE, anew, check_page, commands_of, matches, plain
from support.pages import PAGES, blocks, name_of

LONG = {"three-lines.md"}  # of minutes: `make test-long` runs it
WITH_CONSOLE = [page for page in PAGES if any(each.language == "console" for each in blocks(page.read_text()))]


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in WITH_CONSOLE if page.name not in LONG], ids=name_of)
def test_a_page_shows_what_its_commands_print(page, tmp_path):
    if wrong := check_page(page, tmp_path):
        pytest.fail("\n\n".join(wrong))


def compared(shown, printed):
    return matches(plain(shown.splitlines()), plain(printed.splitlines()))


PLOT = "  │▗▄▖  │\n2.1┤ ▝▀▄ │\n  └┬────┘\n   0    5\n     iter"
OTHER_PLOT = "2.4┤ ▚▄  │\n  │ ▝▀▄ │\n  │     │\n  └──┬──┘\n     5\n     iter"


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("loss 2.613306", "loss 2.613309"),
        ("a  b 3", "a b  3"),
        ("to 8e-16", "to 3e-15"),
        ("dt=0.483 dtf=1.2 tps=120.5 loss=2.5", "dt=1.9 dtf=0.1 tps=3 loss=2.51"),
        ("takes 4.88 s, 1,176 tokens/s", "takes 0.2 s, 95 tokens/s"),
        ("[2026-11-26 07:24:42.520614][INFO] x", "[2027-01-02 17:24:42.1][INFO] x"),
        ("outputs/a/2026-11-26-072348/b", "outputs/a/2027-01-01-000000/b"),
        ("one\n…\nlast", "one\nlast"),
        ("one\n…\nlast", "one\n2\n3\nlast"),
        ("…", ""),
        ("a … 3 b", "a 1 2 c 3 b"),
        (f"{PLOT}\nend", f"{OTHER_PLOT}\nend"),
    ],
)
def test_what_is_the_same(shown, printed):
    assert compared(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("loss 2.61", "loss 2.71"),
        ("loss 2.61", "loss nan"),
        ("816,256 parameters", "816,257 parameters"),
        ("ranks 4", "ranks 5"),
        ("a b", "a c"),
        ("a", "a\nb"),
        ("a\nb", "a"),
        ("", "a"),
        ("one\n…\nlast", "one\n2\nlast\n3"),
        ("a … 3 b", "a 1 2 c 4 b"),
        ("25.0% of it", "35.0% of it"),
        ("to 8e-16", "to 3e-5"),
        ("dp2·tp2", "dp2·tp4"),
        (f"{PLOT}\nend", "end"),
        ("┌──┐\n│a │\n└──┘", "┌──┐\n│b │\n└──┘"),
    ],
)
def test_what_differs(shown, printed):
    assert not compared(shown, printed)


def page_of(folder, text):
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_a_page(tmp_path, monkeypatch):
    monkeypatch.delenv(WRITE, raising=False)
    first = "# A\n\n```python\n# f.py\nprint(7)\n```\n\n```console\n$ python3 f.py\n7\n```\n"
    first += "\n```console\n$ X=3\n$ echo $X \\\n  b\n3 b\n$ seq 5\n1\n…\n5\n```\n"
    right = f"{first}\n```console\n$ false; cat none\ncat: none: No such file or directory\n```\n"
    assert check_page(page_of(tmp_path, right), tmp_path) == []
    (wrong,) = check_page(page_of(tmp_path, right.replace("…\n5", "…\n6")), tmp_path)
    assert wrong.startswith("page.md:14: $ seq 5\nthe page shows:")


def test_a_command_that_fails_unseen(tmp_path, monkeypatch):
    monkeypatch.delenv(WRITE, raising=False)
    (wrong,) = check_page(page_of(tmp_path, "```console\n$ cat none\n…\n```\n"), tmp_path)
    assert "fails with 1" in wrong


def test_outputs_written_anew(tmp_path, monkeypatch):
    page = page_of(tmp_path, "a\n```console\n$ seq 3\n$ seq 6\n1\n8\n…\n9\n```\nb\n")
    monkeypatch.setenv(WRITE, "1")
    check_page(page, tmp_path)
    assert page.read_text() == "a\n```console\n$ seq 3\n1\n2\n3\n$ seq 6\n1\n2\n…\n6\n```\nb\n"


@pytest.mark.parametrize(
    ("shown", "now"),
    [
        ("loss 1.00\n…\nb 2", "loss 1.00\n…\nb 2"),  # as it is: nothing differs by much
        ("loss 1.00\n…\nb 3", "loss 1.01\n…\nb 2"),
        ("…\na 8\n…\nb …", "…\na 1\n…\nb …"),
        ("…\nloss 2.00\n…", "…\nloss 1.01\n…"),
        ("x\n…\ny", "loss 1.01\n…\nb 2"),
        ("…\nx\n…", "…\nloss 1.01\na 1\nb 2\n…"),
    ],
)
def test_what_is_left_out_stays_out(shown, now):
    (command,) = commands_of(f"$ a\n{shown}\n")
    assert anew(command, ["loss 1.01", "a 1", "b 2"]) == now.splitlines()


def test_a_block_begins_with_a_command():
    with pytest.raises(ValueError, match="begins with a command"):
        commands_of("words\n$ a\n")
