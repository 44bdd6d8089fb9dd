"""README and docs/ stay true: code runs and prints the shown output, YAML parses, links and names exist."""

import ast
import contextlib
import importlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch
import typer

from rollcorr.cli import app
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.conversion import convert
from rollcorr.config.documents import load_yaml
from rollcorr.config.presets import PRESETS
from rollcorr.core.metric_registry import CRITERIA, METRICS, criterion_metrics
from rollcorr.core.metric_tables import DIFFUSION_METRICS, LAG_METRICS
from rollcorr.simulation.simulation_file import read_simulation_file

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
}
OWN_TEST = {  # pages whose code runs in a test of their own
    "docs/guides/health.md": "diagnostics/test_health_page.py",
    "docs/guides/rollout_log.md": "rollout_log/test_rollout_log_docs.py",
    "docs/coming_from/verl.md": "integrations/test_verl_docs.py",
}
# Python blocks and the output right below them. Fences marked `python no-run` are skipped.
PYTHON = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|[`$]\s?)rollcorr ([a-z][a-z-]*)", re.MULTILINE)
TARGET = re.compile(r"(?:^|[`$]\s?)make ([a-z][a-z-]*)", re.MULTILINE)


def with_a_match(pattern, besides=()):
    return [page for page, text in PAGES.items() if re.search(pattern, text) and page not in besides]


def code_of(text):
    """The fenced blocks and code spans of a page, one a line."""
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return "\n".join([*fences, *(f"`{span}`" for span in spans)])


def anchors(text):
    """Return GitHub's anchors for the headings of a page, and the anchors of names on an API page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    described = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(described)


@pytest.mark.parametrize("page", with_a_match(r"```python\n", besides=OWN_TEST))
def test_the_code_of_a_page_runs_and_prints_what_stands_below_it(page, tmp_path, monkeypatch):
    """Blocks share their names, in order."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}
    for code, output in PYTHON.findall(PAGES[page]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        if output:
            assert printed.getvalue() == output
    assert above_zero(names) == [], "`rollcorr check` calls a log-prob above 0 a fault"


def above_zero(names):
    """Return the values, also nested, that cannot be log-probs of a probability."""
    batches = [value for value in names.values() if isinstance(value, dict) and "__name__" not in value]
    held = {name: value for values in (names, *batches) for name, value in values.items() if isinstance(name, str)}
    pattern = re.compile(r"(old|rollout|train)_log_?probs?|old_per_token_logps|sampling_per_token_logps|rollout|packed")
    log_probs = {name: value for name, value in held.items() if pattern.fullmatch(name)}
    tensors = {name: value for name, value in log_probs.items() if isinstance(value, torch.Tensor)}
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and (tensor > 0).any()]


def test_pages_with_a_test_of_their_own_are_run_there():
    for page, test in OWN_TEST.items():
        source = (ROOT / "tests" / test).read_text(encoding="utf-8")
        assert Path(page).name in source
        assert "exec(" in source


def test_the_install_page_lists_every_extra():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    names = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE)) - {"all", "dev", "docs", "release"}
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", PAGES["docs/install.md"], re.MULTILINE)
    listed = {name for row, _ in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == names | {"all"}


def test_a_null_needs_the_tokens_that_the_tutorial_names():
    for page in ("docs/tutorials/own_loop.md", "docs/guides/null.md"):
        assert "at least 64 rows and 10,000 tokens" in " ".join(PAGES[page].split()), page


SCRIPTS = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "experiments" / "training_runs").glob("*.py")]
EXAMPLES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SCRIPTS}
BLOCKS = {
    page: re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for page, text in PAGES.items()
}
TAUGHT = {page: blocks for page, blocks in BLOCKS.items() if blocks} | {page: [text] for page, text in EXAMPLES.items()}


def imported_modules(code):
    """The modules of rollcorr that a piece of code imports, or imports names from."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {module for module in found if module.split(".")[0] == "rollcorr"}


def test_pages_import_from_packages_only():
    """A package lists its public names in `__all__`."""
    imported = {
        (page, module) for page, blocks in TAUGHT.items() for code in blocks for module in imported_modules(code)
    }
    for page, module in sorted(imported):
        origin = importlib.util.find_spec(module).origin
        assert Path(origin).name == "__init__.py", f"{page} imports {module}: import the package that exports it"
        assert importlib.import_module(module).__all__


def test_the_page_of_stable_names_lists_what_the_front_door_opens():
    import rollcorr

    section = PAGES["docs/reference/stable.md"].split("## Names of `rollcorr`")[1].split("##")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(rollcorr.__all__)


def test_a_deeper_import_would_be_found():
    assert imported_modules("from rollcorr.core.weights import masked_weights") == {"rollcorr.core.weights"}
    assert Path(importlib.util.find_spec("rollcorr.core.weights").origin).name != "__init__.py"


@pytest.mark.parametrize("page", with_a_match(r"```yaml\n(?:.*\n)*?.*rollout_"))
def test_the_yaml_of_a_page_is_read_without_a_warning(page):
    for text in re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL):
        if "rollout_" in text and "estimators:" not in text:
            convert(load_yaml(text))


@pytest.mark.parametrize("page", with_a_match(r"```yaml\n(?:[^`].*\n)*estimators:"))
def test_the_study_of_a_page_is_one_that_simulate_reads(page, tmp_path):
    for text in re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL):
        if "estimators:" in text:
            path = tmp_path / "study.yaml"
            path.write_text(text, encoding="utf-8")
            assert read_simulation_file(path)


def test_the_estimator_table_names_presets_with_the_settings_of_their_row():
    table = PAGES["docs/guides/choosing.md"].split("| estimator |")[1].split("\n\n")[0].splitlines()[2:]
    modes = [(False, "ppo_clip"), (True, "ppo_clip"), (True, "reinforce")]
    named = set()
    for line in table:
        _, weights, criterion, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for (bypass, loss), cell in zip(modes, cells, strict=True):
            if not cell.startswith("`"):
                continue
            config = RolloutCorrectionConfig.preset(cell.strip("`"))
            named.add(cell.strip("`"))
            assert (config.bypass_mode, config.loss_type) == (bypass, loss), line
            assert config.rollout_is == (None if weights == "–" else weights.split(",")[0]), line
            assert config.rollout_rs == (None if criterion == "–" else criterion), line
            assert (config.is_mode == "icepop") == ("band" in weights), line
    assert named == {name for name in PRESETS if name.startswith(("decoupled_", "bypass_"))} - {"bypass_pg_rs"} | {
        "disabled"
    }


def test_every_relative_link_leads_to_a_heading():
    broken = []
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
                broken.append(f"{page}: {link}")
    assert not broken, "\n".join(broken)


def test_every_named_command_and_make_target_exists():
    commands = set(typer.main.get_command(app).commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    unknown = {}
    for page, text in PAGES.items():
        code = code_of(text)
        unknown[page] = set(COMMAND.findall(code)) - commands | set(TARGET.findall(code)) - targets
    assert not any(unknown.values()), unknown


def test_every_named_preset_and_metric_exists():
    fields = set(RolloutCorrectionConfig().to_dict())
    presets = set(PRESETS) | {"bypass_old_logprob_for_rollout"} | fields
    metrics = set(METRICS).union(*(criterion_metrics(criterion) for criterion in CRITERIA))
    unknown = {}
    for page, text in PAGES.items():
        words = set(re.findall(r"`([a-z0-9_]+)`", text))
        unknown[page] = {word for word in words if re.match(r"(decoupled|bypass)_", word)} - presets
        unknown[page] |= {w for w in words if re.match(r"(log_ppl|log_ratio|chi2|prob_diff|saturated)_", w)} - metrics
    assert not any(unknown.values()), unknown


def test_the_index_lists_every_page_once():
    listed = re.findall(r"^\| (?:[^|]*\| )?\[[^\]]+\]\(([\w/]+\.md)\)", PAGES["docs/index.md"], re.MULTILINE)
    pages = {page for page in PAGES if page.startswith("docs/")}
    api = {page for page in pages if page.startswith("docs/reference/api/")} - {"docs/reference/api/index.md"}
    assert sorted(f"docs/{page}" for page in listed) == sorted(pages - api - {"docs/index.md", "docs/install.md"})


def test_every_generated_page_is_current():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    generate_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_docs)
    assert generate_docs.outdated() == [], "run python tools/generate_docs.py"
    assert {page for page, text in PAGES.items() if generate_docs.GENERATED in text} == {
        page for page in generate_docs.PAGES if page.endswith(".md")
    }


def words(text):
    """The words of a page outside its code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\w[\w'’.-]*", prose))


LOOKED_UP = (
    "docs/reference/api/",
    "docs/reference/stable.md",
    "docs/contributing/",
    "docs/gallery.md",
    "docs/references.md",
)
"""Pages that nobody reads from top to bottom: names, results, the bibliography, and what contributors need."""

HAND_WRITTEN = [
    page
    for page, text in PAGES.items()
    if page.startswith("docs/")
    and not page.startswith(LOOKED_UP)
    and "<!-- Written by tools/generate_docs.py." not in text
]
READ_IN_ORDER = ("docs/guides/", "docs/tutorials/", "docs/background/", "docs/coming_from/")


def test_the_hand_written_pages_can_be_read_in_an_afternoon():
    """At 240 words per minute, 28,000 words are two hours."""
    counts = {page: words(PAGES[page]) for page in HAND_WRITTEN}
    longest = sorted(counts, key=counts.get, reverse=True)[:5]
    assert sum(counts.values()) <= 28_000, {page: counts[page] for page in longest}


FIRST_PAGES = ["README.md", "docs/install.md", "docs/index.md", *(p for p in PAGES if p.startswith("docs/tutorials/"))]


def test_first_pages_have_at_most_800_words():
    """Count words like `wc -w`: tables and code included."""
    assert len(FIRST_PAGES) == 7
    counts = {page: len(PAGES[page].split()) for page in FIRST_PAGES}
    assert max(counts.values()) <= 800, counts


def test_written_pages_have_at_most_35000_words():
    """Counted as above, without the pages that tools/generate_docs.py writes."""
    written = {page: len(text.split()) for page, text in PAGES.items() if "<!-- Written by tools/" not in text}
    pages = {page: count for page, count in written.items() if page.startswith(("docs/", "README"))}
    assert sum(pages.values()) <= 35_000, sorted(pages.items(), key=lambda item: -item[1])[:8]


def test_pages_end_with_where_to_go_next():
    for page in HAND_WRITTEN:
        last = PAGES[page].rstrip().split("\n\n")[-1]
        if page.startswith(READ_IN_ORDER):
            assert re.match(r"Where to go next:.*\]\([^)]+\)", last, re.DOTALL), f"{page}: {last}"


def test_the_metrics_page_lists_every_metric_once():
    tables = PAGES["docs/reference/metrics.md"].split("## Healthy ranges")[0]
    listed = re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE)
    template = {name.replace("seq_sum_k1", "CRITERION") for name in criterion_metrics("seq_sum_k1")}
    assert sorted(listed) == sorted([*METRICS, *LAG_METRICS, *DIFFUSION_METRICS, *template])
    assert all(f"`{criterion}`" in tables for criterion in CRITERIA)


def test_each_known_failure_names_tests_that_exist():
    line = r"^(\d+)\. .*? ((?:`[\w/.:]*test_[\w.:]+`(?:, )?)+)$"
    rows = dict(re.findall(line, PAGES["docs/contributing/known_failures.md"], re.MULTILINE))
    assert list(rows) == [str(number) for number in range(1, len(rows) + 1)]
    own = "test_known_failures.py"
    for number, cell in rows.items():
        tests = [name.rpartition("::") for name in re.findall(r"`([^`]+)`", cell)]
        for file, _, test in tests:
            source = (ROOT / "tests" / (file or own)).read_text(encoding="utf-8")
            assert f"def {test}(" in source, (number, test)
    numbered = re.findall(r"^def test_(\d\d)_", (ROOT / "tests" / own).read_text(encoding="utf-8"), re.MULTILINE)
    assert {str(int(number)) for number in numbered} <= set(rows), "a test for a line that is not there"
