"""What the pages' console blocks show is what their commands print."""

import pytest

from support.console import check_page
from support.pages import PAGES, blocks, name_of

LONG = {"three-lines.md"}  # of minutes: `make test-long` runs it
WITH_CONSOLE = [page for page in PAGES if any(each.language == "console" for each in blocks(page.read_text()))]


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in WITH_CONSOLE if page.name not in LONG], ids=name_of)
def test_a_page_shows_what_its_commands_print(page, tmp_path):
    if wrong := check_page(page, tmp_path):
        pytest.fail("\n\n".join(wrong))
