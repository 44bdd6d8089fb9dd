"""docs/reference/api/: one page per front door, with a section for each of its public names.

mkdocstrings fills the sections from signatures and docstrings when the site is built. A name that several doors open
has its section behind the first of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence

DOORS = {
    "rollcorr": "what most users need",
    "rollcorr.config": "configurations, presets, conversion of older generations; no torch",
    "rollcorr.core": "pure tensor functions",
    "rollcorr.kernels": "implementations of the correction and of log-probs without logits",
    "rollcorr.correction": "the correction, the policy loss, denominators, process groups, scoring",
    "rollcorr.layouts": "others' tensors in and out",
    "rollcorr.diffusion": "denoising steps in place of tokens",
    "rollcorr.rollout_log": "writing, reading and checking rollout logs",
    "rollcorr.run_directory": "what a run leaves behind, and the sinks of its metrics",
    "rollcorr.diagnostics": "health, checks of logs, provenance, reports",
    "rollcorr.engines": "samplers",
    "rollcorr.simulation": "policies with a known mismatch, their exact gradient, and the error of every estimator",
    "rollcorr.confirm": "rows scored again under variants of the trainer",
    "rollcorr.conformance": "fifteen properties of any correction function",
    "rollcorr.monitor": "metrics, alarms and logs over a run, in any training loop",
    "rollcorr.train": "the reference trainers",
    "rollcorr.train.grpo": "the trainer for language models",
    "rollcorr.train.flow_grpo": "the trainer for diffusion models",
    "rollcorr.integrations.trl": "a mixin and `attach` for TRL's trainers",
    "rollcorr.integrations.verl": "verl's functions, drop-in",
    "rollcorr.integrations.verl.v2025_11": "the same for verl of November 2025",
    "rollcorr.integrations.verl.v2025_10": "the same for verl of October 2025",
}
"""Front doors, in the order of their pages. tests/test_api_pages.py compares them with docs/reference/stable.md."""

FIRST = {
    "rollcorr": ("correct", "policy_loss", "Monitor"),
    "rollcorr.config": ("RolloutCorrectionConfig", "PRESETS"),
    "rollcorr.core": ("token_log_prob", "Statistics"),
    "rollcorr.correction": ("correct", "Correction", "policy_loss"),
    "rollcorr.layouts": ("pack_padded", "unpack_list"),
    "rollcorr.diffusion": ("diffusion_loss",),
    "rollcorr.rollout_log": ("RolloutLogWriter",),
    "rollcorr.run_directory": ("read_run",),
    "rollcorr.diagnostics": ("check_logs", "causes", "advise"),
    "rollcorr.engines": ("Engine", "TransformersEngine"),
    "rollcorr.simulation": ("measure", "make_pair"),
    "rollcorr.confirm": ("confirm",),
    "rollcorr.conformance": ("grade_function",),
    "rollcorr.train": ("train", "GrpoTrainer"),
    "rollcorr.train.grpo": ("GrpoTrainer",),
    "rollcorr.train.flow_grpo": ("FlowGrpoTrainer",),
    "rollcorr.integrations.trl": ("attach",),
    "rollcorr.integrations.verl": ("install", "compute_rollout_correction_and_add_to_batch"),
    "rollcorr.integrations.verl.v2025_11": ("compute_rollout_correction_and_add_to_batch",),
    "rollcorr.integrations.verl.v2025_10": ("compute_rollout_importance_weights",),
}
"""Names that open a page, because most readers come for them."""

# What mkdocstrings is told about a table of the code: its docstring says what it holds.
LONG_VALUE = ("    options:", "      show_attribute_values: false")

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]


def page_name(door: str) -> str:
    """The file of a front door's page."""
    return door.removeprefix("rollcorr.").removeprefix("integrations.").replace(".", "_") + ".md"


def sections() -> dict[str, str]:
    """Each public name, as DOOR.NAME → the DOOR.NAME that has its section."""
    first: dict[int, str] = {}
    found = {}

    # A package describes its own names, and `rollcorr` leads to them.
    for door in (*list(DOORS)[1:], "rollcorr"):
        module = importlib.import_module(door)
        for name in sorted(module.__all__, key=lambda name: (_place(door, name), name)):
            value, path = getattr(module, name), f"{door}.{name}"
            # Numbers and texts may be one object by chance; only what has a definition of its own is followed.
            is_defined = inspect.isclass(value) or inspect.isroutine(value)
            found[path] = first.setdefault(id(value), path) if is_defined else path
    return found


def _place(door: str, name: str) -> int:
    """Where a name stands on its page: first names, then functions and classes, then constants."""
    names = FIRST.get(door, ())
    if name in names:
        return names.index(name)
    return len(names) + name.isupper()


def api_pages(generated: str, table: Table) -> dict[str, Callable[[], str]]:
    """The pages, by path."""
    pages = {f"docs/reference/api/{page_name(door)}": _page(door, generated) for door in DOORS}
    return pages | {"docs/reference/api/index.md": lambda: _index(generated, table)}


def _page(door: str, generated: str) -> Callable[[], str]:
    return lambda: _page_text(door, generated)


def _page_text(door: str, generated: str) -> str:
    own, elsewhere = [], []
    for path, section in sections().items():
        if path.rpartition(".")[0] == door:
            (own if section == path else elsewhere).append((path, section))
    lines = [f"# {door}", "", generated, "", _introduction(door), ""]
    if door == "rollcorr":
        lines += [f"- {_link(path.rpartition('.')[2], section)}: {_summary(path)}" for path, section in elsewhere] + [
            ""
        ]
    elif elsewhere:
        links = ", ".join(_link(path.rpartition(".")[2], section) for path, section in elsewhere)
        lines += [f"Also opened here, and described where the link leads: {links}.", ""]
    for path, _ in own:
        lines += [f"::: {path}", *(LONG_VALUE if _is_long(path) else ()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _is_long(path: str) -> bool:
    """Whether a constant's value would fill the page."""
    door, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(door), name)
    return not inspect.isclass(value) and not inspect.isroutine(value) and len(repr(value)) > 300


def _introduction(door: str) -> str:
    """The first paragraph of a package's docstring, without its formula marks."""
    text = inspect.getdoc(importlib.import_module(door)) or ""
    return text.split("\n\n")[0]


def _summary(path: str) -> str:
    """The first line of a docstring."""
    door, _, name = path.rpartition(".")
    return (inspect.getdoc(getattr(importlib.import_module(door), name)) or "").partition("\n")[0]


def _link(label: str, section: str) -> str:
    return f"[`{label}`]({page_name(section.rpartition('.')[0])}#{section})"


def _index(generated: str, table: Table) -> str:
    names: dict[str, list[str]] = {door: [] for door in DOORS}
    for path, section in sections().items():
        door, _, name = path.rpartition(".")
        names[door].append(_link(name, section))
    rows = [(f"[`{door}`]({page_name(door)})", purpose, ", ".join(names[door])) for door, purpose in DOORS.items()]
    return f"""# API

{generated}

For everyone who calls the library: each public name has a section with its formula, the shapes and units of what it
takes and returns, its errors and its source. [Stable names](../stable.md) lists the names that stay.

{table(("import from", "what it is for", "names"), rows)}

Where to go next: [your own training loop](../../tutorials/own_loop.md) uses these names in order;
[notation](../notation.md) explains the symbols of the formulas.
"""
