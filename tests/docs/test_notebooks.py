"""Each notebook of docs/notebooks runs from top to bottom in a new kernel, and shows what its file shows.

MMM_WRITE_DOCS=1 writes its outputs anew."""

import html
import json
import os

import pytest

from support.clock import PATIENCE
from support.console import WRITE, matches, plain
from support.pages import DOCS, SITE

# Each is run from top to bottom.
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def shown(cell):
    """What a cell's outputs show: lines of text, and the kinds of other outputs."""
    lines = []
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream":
            # In a file, a text may be a list of lines.
            lines += "".join(output["text"]).splitlines()
        elif output["output_type"] == "error":
            lines.append(f"{output['ename']}: {output['evalue']}")
        else:
            lines += sorted(output["data"])
    return plain(lines)


def different(cells, run):
    """The cells whose outputs are not those of a run, with both."""
    differences = []
    for cell, ran in zip(cells, run, strict=True):
        if not matches(shown(cell), shown(ran)):
            differences.append(
                "\n".join([*ran["source"].splitlines()[:1], "shows:", *shown(cell), "is now:", *shown(ran)])
            )
    return differences


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_print(path, tmp_path, monkeypatch):
    # Only `make docs` installs these two.
    import nbformat
    from nbclient import NotebookClient

    # The kernel leaves its files here.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    stored = nbformat.read(path, 4)
    notebook = nbformat.read(path, 4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=PATIENCE, record_timing=False, resources=where).execute()
    if os.environ.get(WRITE):
        # The kernel adds its version, which differs between machines.
        notebook.metadata = stored.metadata
        nbformat.write(notebook, path)
    elif differences := different(stored.cells, notebook.cells):
        pytest.fail("\n\n".join(differences))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_one_run(path):
    """From top to bottom, in a new kernel, without an error or a word on stderr."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


def test_notebooks_are_found_and_differences_seen():
    assert NOTEBOOKS
    cell = {"source": "print(1)", "outputs": [{"output_type": "stream", "text": ["loss 5.56\n", "tail\n"]}]}
    other = {"source": "print(1)", "outputs": [{"output_type": "stream", "text": "loss 5.9\ntail\n"}]}
    failed = {"source": "print(1)", "outputs": [{"output_type": "error", "ename": "ValueError", "evalue": "no"}]}
    assert not different([cell], [cell])
    assert different([cell], [other])
    assert different([cell], [failed])
    assert different([failed], [{"source": "print(1)"}])


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_site_has_a_page_for_a_notebook(path):
    """With what it prints and draws, and the file itself."""
    page = (SITE / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert f'href="{path.name}"' in page
    assert (SITE / "notebooks" / path.name).read_bytes() == path.read_bytes()
    printed = [line for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] for line in shown(cell)]
    assert [line for line in printed if line.startswith("first difference")]
    for line in printed:
        if line.startswith(("same:", "first difference")):
            assert line in html.unescape(page)
    # The home page leads to it.
    assert f'href="notebooks/{path.stem}.html"' in (SITE / "index.html").read_text(encoding="utf-8")
