"""What mkdocs cannot do alone: GitHub's anchors, links out of docs/, and a notebook as a page.

Pages are written for GitHub first, where `../../src/rollcorr/train/loop.py` is a link that works. Here every file of
the repository that a page links to becomes part of the site, under repository/: Markdown and source as pages, the rest
as it is. mkdocs calls the functions named `on_…`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from api_pages import DOORS, page_name

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE_NAME = re.compile(r"\[(?:[\w/]+/)?(\w+\.md)\]\(((?:[^)\s]*/)?\1(?:#[^)\s]*)?)\)")
OUTSIDE = "repository/"
SOURCE = {".py": "python", ".pyi": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
ROWS_OF_A_TABLE = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`]+`")


def github_slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives to a heading; tests/test_docs.py has the same rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings GitHub's anchors, and put the pages of the API, which are generated, into the navigation.

    With the address of a repository in ROLLCORR_REPOSITORY, each written page has a link that edits it.
    """
    if repository := os.environ.get("ROLLCORR_REPOSITORY"):
        config.edit_uri = repository.rstrip("/") + "/edit/main/docs/"
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_slug
    titles = {door: door.removeprefix("rollcorr.").removeprefix("integrations.") for door in DOORS}
    _entry(config.nav, "API").extend({title: f"reference/api/{page_name(door)}"} for door, title in titles.items())
    return config


def _entry(nav: list, title: str) -> list:
    """The list under a title, at whatever depth."""
    for item in nav:
        if isinstance(item, dict):
            for name, below in item.items():
                if isinstance(below, list):
                    found = below if name == title else _entry(below, title)
                    if found is not None:
                        return found
    return None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, and what that links to in turn."""
    from mkdocs.structure.files import File

    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    for notebook in notebooks:
        text = notebook_as_markdown(json.loads(notebook.content_string))
        page = File.generated(config, notebook.src_uri, content=text)
        files.remove(notebook)
        files.append(_as_page(page, config))
        texts[f"docs/{notebook.src_uri}"] = text
    waiting = list(texts)
    added: set[str] = set()
    while waiting:
        path = waiting.pop()
        for target in sorted(_outside(texts[path], path) - added):
            added.add(target)
            if Path(target).suffix == ".md" or Path(target).suffix in SOURCE:
                texts[target] = _page_of(target)
                files.append(File.generated(config, _site_path(target), content=texts[target]))
                waiting.append(target)
            else:
                files.append(File.generated(config, _site_path(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's own paths, and write tables as Python-Markdown reads them."""
    uri = page.file.src_uri
    path = uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"
    if Path(path.removesuffix(".md")).suffix in SOURCE and uri.startswith(OUTSIDE):
        page.meta["search"] = {"exclude": True}  # a source file would crowd out the pages
        return markdown

    if uri.startswith(OUTSIDE) or "<!-- Written by tools/" in markdown:
        page.edit_url = None

    # A word is looked up to be explained; studies use all of them.
    boost = 0.2 if uri.startswith(OUTSIDE) else 1
    page.meta["search"] = {"boost": 4 if uri == "glossary.md" else boost}
    if "/" not in uri and uri not in ("glossary.md", "references.md"):
        page.meta["hide"] = ["navigation"]  # it would hold this page alone
    return outside_fences(markdown, lambda text: _tables(_relinked(text, path, uri)))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script that lets the search work from disk from the site itself, not from another host."""
    here = os.path.relpath("theme/worker.js", os.path.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", here)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page of an address that leads nowhere."""
    return output_content.replace("https://unpkg.com/iframe-worker/shim", "/theme/worker.js")


def outside_fences(text: str, change) -> str:  # noqa: ANN001
    """Change a page everywhere but in its blocks of code, whose `no-run` marks are for the tests alone."""
    parts, start = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[start : fence.start()]), re.sub(r"^```(\w+) no-run", r"```\1", fence[0])]
        start = fence.end()
    return "".join([*parts, change(text[start:])])


def notebook_as_markdown(notebook: dict) -> str:
    """A notebook as a page: text, code, and below the code what it printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})")
            else:
                parts.append(f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _as_page(file, config: MkDocsConfig):  # noqa: ANN001, ANN202
    """mkdocs takes a file for a page by its ending alone."""
    file.is_documentation_page = lambda: True
    file.name = Path(file.src_uri).stem
    file.dest_uri = file.src_uri.removesuffix(".ipynb") + ".html"
    return file


def _targets(text: str, path: str) -> list[tuple[str, str]]:
    """Each relative link of a page, with the file of the repository that it leads to."""
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:|#", link):
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(path), link.partition("#")[0]))
        found.append((link, target))
    return found


def _outside(text: str, path: str) -> set[str]:
    if Path(path).suffix in SOURCE:
        return set()
    return {
        target for _, target in _targets(text, path) if not target.startswith("docs/") and (ROOT / target).is_file()
    }


def _site_path(target: str) -> str:
    return f"{OUTSIDE}{target}.md" if Path(target).suffix in SOURCE else f"{OUTSIDE}{target}"


def _page_of(target: str) -> str:
    text = (ROOT / target).read_text(encoding="utf-8")
    language = SOURCE.get(Path(target).suffix)
    return text if language is None else f"# {target}\n\n~~~~~~~~ {language}\n{text}~~~~~~~~\n"


def _relinked(text: str, path: str, uri: str) -> str:
    places = {}
    for link, target in _targets(text, path):
        if not (ROOT / target).is_file():
            continue
        here = target.removeprefix("docs/") if target.startswith("docs/") else _site_path(target)
        _, mark, anchor = link.partition("#")
        places[link] = os.path.relpath(here, os.path.dirname(uri) or ".") + mark + anchor
    text = FILE_NAME.sub(lambda match: _titled(match, path), text)
    return LINK.sub(lambda match: f"]({places.get(match[1], match[1])})", text)


def _titled(match: re.Match, path: str) -> str:
    """On GitHub a page is called by its file; here by its title."""
    target = ROOT / os.path.normpath(os.path.join(os.path.dirname(path), match[2].partition("#")[0]))
    title = re.search(r"^# (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE) if target.is_file() else None
    return match[0] if title is None else f"[{title[1]}]({match[2]})"


def _tables(text: str) -> str:
    """GitHub wants a bar inside code escaped in a table; Python-Markdown would show the backslash."""

    def row(match: re.Match) -> str:
        return CODE_SPAN.sub(lambda span: span[0].replace("\\|", "|"), match[0])

    return ROWS_OF_A_TABLE.sub(row, text)
