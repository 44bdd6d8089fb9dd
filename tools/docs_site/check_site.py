"""Check the built site: links lead somewhere, nothing is fetched, every API section is there, words are found.

    python tools/docs_site/check_site.py [SITE]

Only the standard library is needed. Exit code 1, and one line per fault.
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("ESS", "top-p", "bypass")
FETCHED = {"img": "src", "link": "href", "script": "src", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what a browser would fetch for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what this element has."""
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        address = values.get(FETCHED.get(tag, ""), "")
        if address and values.get("rel") != "canonical":
            self.fetched.append(address)


def faults(site: Path) -> list[str]:
    """One line for each thing that is wrong with a built site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no page"]
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} fetches {url}" for url in page.fetched if re.match(r"(https?:)?//", url)]
        internal = [url for url in page.fetched if not re.match(r"(https?:)?//|data:", url)]
        for link in [*page.links, *internal]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or (path.name == "404.html" and link.startswith("/")):
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name}: {link} leads to no file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} leads to no anchor")
    return found + missing_sections(site, pages) + unfound_words(site)


def missing_sections(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Names that a page of the API asks for, and that were not rendered."""
    found = []
    for source in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")):
        built = pages.get(site / "reference" / "api" / f"{source.stem}.html")
        for name in re.findall(r"^::: (\S+)", source.read_text(encoding="utf-8"), re.MULTILINE):
            if built is None or name not in built.anchors:
                found.append(f"{source.name}: no section for {name}")
    return found


def unfound_words(site: Path) -> list[str]:
    """Words that a reader would search for, and the index of the search does not hold as words."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    separator = re.compile(index["config"]["separator"])
    found = []
    for word in WORDS:
        wanted = [part.lower() for part in separator.split(word) if part]
        if not any(_holds(entry, wanted, separator) for entry in index["docs"]):
            found.append(f"the search does not find {word!r}")
    return found


def _holds(entry: dict, wanted: list[str], separator: re.Pattern) -> bool:
    """Whether the words stand in an entry, one behind the other."""
    text = re.sub(r"<[^>]+>", " ", f"{entry['title']} {entry['text']}")
    words = [part.lower() for part in separator.split(text) if part]
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words)))


def main() -> int:
    """Print the faults of a site."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    found = faults(site)
    print(*found, sep="\n")
    print(f"{site}: {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
