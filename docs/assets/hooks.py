"""What the site has beside docs/: the README as its home, the changelog, notebooks as pages, the files of the
repository that pages link to, and what the reference takes from the code (`reference.py`).

A page's links are right in the repository; those that leave docs/ are rewritten here.
"""

import ast
import json
import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.structure.files import File, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))

import reference

ROOT = Path(__file__).parents[2]
# Pages: file of the repository → of the site.
AT_THE_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "SECURITY.md": "report-security.md",
}
# Code, where nothing is a link: fenced blocks and spans. What is left between them is prose.
CODE = re.compile(r"^ *(`{3,})[^\n]*\n.*?^ *\1`*$|(`+)(?!`).+?(?<!`)\2(?!`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"""(\]\(|\b(?:href|src|srcset)=")([^)\s"]+)""")
# A picture of a layout. Its twin for a phone has its cards one below another.
PICTURE = re.compile(r"!\[([^\]]*)\]\(((?:\.\./)*pictures/[\w-]+)\.svg\)")
BOTH = r'<picture><source media="(max-width: 600px)" srcset="\2-narrow.svg"><img alt="\1" src="\2.svg"></picture>'
MADE = re.compile(r"^<!-- made from the code: (\w+) -->$", re.MULTILINE)


def on_files(files, config):
    """Add the pages that are not in docs/."""
    pages = {path: (ROOT / path).read_text(encoding="utf-8") for path in AT_THE_ROOT}
    for path, text in pages.items():
        files.append(File.generated(config, AT_THE_ROOT[path], content=text))
    pages |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for file in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        path = f"docs/notebooks/{file.name}"
        pages[path] = notebook_page(file)
        files.append(File.generated(config, site_path(path), content=pages[path]))
    linked = {target for path, text in pages.items() for target in outside(text, path)}
    for path in sorted(linked - AT_THE_ROOT.keys()):
        text = source_page(path)
        files.append(File.generated(config, site_path(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown, page, config, files):
    """A page as the site has it."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    path = next((path for path, there in AT_THE_ROOT.items() if there == uri), f"docs/{uri}")
    markdown = MADE.sub(lambda found: getattr(reference, found[1])(), markdown)
    markdown = PICTURE.sub(BOTH, markdown)
    return rewritten(markdown, path, uri)


def site_path(path):
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return AT_THE_ROOT.get(path, f"source/{path}.md")


def in_repository(target, path):
    """The file that a link of the page `path` leads to, and the part of it; None where it is no file."""
    if re.match(r"[a-z]+:|#|/", target):
        return None
    name, _, part = target.partition("#")
    found = normpath(PurePosixPath(path).parent / name)
    return (found, part) if (ROOT / found).exists() and not found.startswith("..") else None


def outside(text, path):
    """The files outside docs/ that a page links to."""
    prose = CODE.sub("", text)
    found = [in_repository(target, path) for _, target in LINK.findall(prose)]
    return {each[0] for each in found if each is not None and not each[0].startswith("docs/")}


def rewritten(markdown, path, uri):
    """A page whose links lead to where the site has what they lead to in the repository."""

    def link(found):
        there = in_repository(found[2], path)
        if there is None:
            return found[0]
        # A notebook's own page links to its file.
        from_own_page = site_path(there[0]) == uri
        stays = there[0].startswith("docs/") and not there[0].endswith(".ipynb")
        if path.startswith("docs/") and (stays or from_own_page):
            return found[0]
        line = re.match(r"L(\d+)", there[1])
        part = f"__codelineno-0-{line[1]}" if line else there[1]
        target = relpath(site_path(there[0]), PurePosixPath(uri).parent)
        return f"{found[1]}{target}{'#' if part else ''}{part}"

    parts, last = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(link, markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, LINK.sub(link, markdown[last:])])


def notebook_page(file):
    """A notebook as a page: its text, its code, and what the code has printed and drawn."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                printed = "".join(output["text"]).rstrip()
                parts.append(f"```text\n{printed}\n```")
            else:
                picture = "".join(output["data"]["image/png"]).strip()
                parts.append(f"![What the cell draws](data:image/png;base64,{picture})")
    # Below the title.
    title, rest = parts[0].split("\n", 1)
    download = f"This page is a notebook: [download it]({file.name}), and run it with Jupyter or in Colab."
    return "\n\n".join([title, download, rest, *parts[1:]])


def source_page(path):
    """A page with a file of the repository, its lines numbered, or with what a folder of it holds."""
    head = f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n# `{path}`\n\n"
    if (ROOT / path).is_dir():
        files = sorted((ROOT / path).glob("*.py"))
        return head + "\n".join(f"- `{file.name}`: {summary(file)}" for file in files)
    language = {".py": "python", ".json": "json", ".toml": "toml"}.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f'{head}`````{language} linenums="1"\n{text}`````\n'


def summary(file):
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
