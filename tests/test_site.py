"""The site's structure: every page is reached, every public name has a section, every source leads to its entry."""

import contextlib
import importlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from rollcorr.config.presets import PRESETS
from rollcorr.core.metric_registry import METRICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCES = (DOCS / "references.md").read_text(encoding="utf-8")


def tool(name):
    """A script of tools/, imported."""
    path = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


ENTRIES = re.findall(r"^### (.+)$", REFERENCES, re.MULTILINE)


def in_navigation(items):
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            for below in item.values():
                yield from [below] if isinstance(below, str) else in_navigation(below)


def test_every_page_stands_once_in_the_navigation():
    pages = list(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    there = {str(path.relative_to(DOCS)) for ending in ("md", "ipynb") for path in DOCS.rglob(f"*.{ending}")}
    # The hooks add the pages of the API, which are generated.
    there -= {page for page in there if page.startswith("reference/api/") and page != "reference/api/index.md"}
    assert sorted(pages) == sorted(there)


def test_every_public_name_has_one_section_in_the_api():
    api = tool("api_pages")
    written = [
        name
        for path in sorted((DOCS / "reference" / "api").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    sections = api.sections()
    for door in api.DOORS:
        for name in importlib.import_module(door).__all__:
            assert sections[f"{door}.{name}"] in written, f"{door}.{name} has no page: run tools/generate_docs.py"
        assert set(api.FIRST.get(door, ())) <= set(importlib.import_module(door).__all__), door
    assert len(written) == len(set(written))
    assert set(written) == set(sections.values())


def test_every_room_that_is_called_stable_has_a_page():
    stable = (DOCS / "reference" / "stable.md").read_text(encoding="utf-8").split("## Packages")[1]
    named = set()
    for cell in re.findall(r"^\| (`rollcorr.*?) \|", stable, re.MULTILINE):
        for path in re.findall(r"`([\w.]+)`", cell):
            named.add(
                path if path.startswith("rollcorr") else "rollcorr.integrations" * path.startswith(".verl") + path
            )
    named = {path if path.startswith("rollcorr") else f"rollcorr{path}" for path in named}
    assert named - set(tool("api_pages").DOORS) == set()


def test_every_source_of_a_metric_or_preset_leads_to_an_entry():
    references = tool("references")
    anchors = {anchor(entry) for entry in ENTRIES}
    assert len(anchors) == len(ENTRIES)
    links = [references.linked(row.source) for row in METRICS.values()] + [references.preset_source(p) for p in PRESETS]
    for link in links:
        assert re.search(r"references\.md#([^)]+)\)$", link)[1] in anchors, link
    for page in ("metrics", "presets"):
        text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        rows = text.count("(../references.md#")
        assert rows >= {"metrics": len(METRICS), "presets": len(PRESETS)}[page]


SOURCES = {
    (path.relative_to(ROOT), " ".join(text.split()))
    for path in sorted((ROOT / "src").rglob("*.py"))
    for text in re.findall(
        r"Source: (.*?)(?=\n\s*\n|\"\"\"|\n\s*[A-Z]\w+:\n)", path.read_text(encoding="utf-8"), re.DOTALL
    )
}


def test_every_source_of_a_docstring_has_an_entry():
    assert len(SOURCES) > 20
    missing = []
    for path, text in sorted(SOURCES):
        for number in re.findall(r"arXiv:(\d{4}\.\d{5})", text):
            if f"https://arxiv.org/abs/{number}" not in REFERENCES:
                missing.append((str(path), number))
        for name, year in re.findall(r"([A-Z][\w-]+)(?: et al\.| Team|, [A-Z]\w+ & \w+| & \w+)? \((\d{4})\)", text):
            if not any(name in entry and year in entry for entry in ENTRIES):
                missing.append((str(path), name, year))
    assert missing == []


def test_a_source_without_an_entry_is_an_error():
    with pytest.raises(KeyError):
        tool("references").linked("Nobody (1900)")


def test_every_option_has_a_line_on_the_page_of_options():
    page = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    for option in (
        "rollout_is",
        "clip_ratio_c",
        "optim.lr",
        "rollout.sampling.top_p",
        "model.lora.rank",
        "reward.name",
    ):
        assert re.search(rf"^\| `{option}` \| .+ \| .+ \|$", page, re.MULTILINE), option


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    script = (ROOT / "tools" / "notebooks" / f"{path.stem}.py").read_text(encoding="utf-8")
    held = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert held == tool("make_notebook").cells_of(script), "run python tools/make_notebook.py"

    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    names = {"__name__": path.stem}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]).replace("plt.show()", "plt.close()"), names)
            shown = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            assert printed.getvalue() == shown
    assert any(
        "image/png" in output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", [])
    )


def checker():
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "tools" / "docs_site" / "check_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_of_the_built_site_finds_what_is_wrong(tmp_path):
    (tmp_path / "search").mkdir()
    index = {"config": {"separator": r"[\s\-]+"}, "docs": [{"title": "ESS", "text": "of <b>top-p</b>"}]}
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(index), encoding="utf-8")
    page = '<a href="other.html#here">x</a><a href="gone.html">y</a><img src="https://cdn/x.png"><p id="there">'
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    (tmp_path / "other.html").write_text('<a href="index.html#there">z</a>', encoding="utf-8")
    found = [fault for fault in checker().faults(tmp_path) if "no section for" not in fault]
    assert found == [
        "index.html fetches https://cdn/x.png",
        "index.html: other.html#here leads to no anchor",
        "index.html: gone.html leads to no file",
        "the search does not find 'bypass'",
    ]
