"""What the pages' console blocks show is what their commands print."""

import re

import pytest

from support.commands import check_command, commands_in
from support.console import check_page
from support.pages import PAGES, ROOT, blocks, name_of

# Of minutes: `make test-long` runs it.
LONG = {"three-lines.md"}
# Pages that show what a command prints.
WITH_CONSOLE = [page for page in PAGES if any(block.language == "console" for block in blocks(page.read_text()))]


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in WITH_CONSOLE if page.name not in LONG], ids=name_of)
def test_a_page_shows_what_its_commands_print(page, tmp_path):
    if wrong := check_page(page, tmp_path):
        pytest.fail("\n\n".join(wrong))


# All commands of a page, shown with an output or not.
COMMANDS = {page: commands_in(page.read_text(encoding="utf-8")) for page in PAGES}


def wrong(lines, monkeypatch, capsys):
    """Of each line that is not right, what its program says."""
    differences = []
    for line in lines:
        try:
            check_command(line, monkeypatch)
        except (Exception, SystemExit) as error:
            differences.append(f"{line}\n    {error!r} {capsys.readouterr().err[-500:]}")
    return differences


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=name_of)
def test_a_command_is_there_and_takes_its_flags(page, monkeypatch, capsys):
    if differences := wrong(COMMANDS[page], monkeypatch, capsys):
        pytest.fail("\n".join(differences))


@pytest.mark.docs
def test_commands_from_the_talks(monkeypatch, capsys):
    """The last column of each row."""
    rows = re.findall(
        r"^\| \d+ \| .+ \| .+ \| `([^`]+)` \|$", (ROOT / "docs/from-the-talks.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 100
    if differences := wrong(dict.fromkeys(rows), monkeypatch, capsys):
        pytest.fail("\n".join(differences))
