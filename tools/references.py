"""Which entry of docs/references.md a source in the tables of metrics and presets is."""

from __future__ import annotations

from rollcorr.config import presets
from rollcorr.core import metric_tables

REFERENCES = {
    metric_tables.MATHS: "li-2025",
    metric_tables.IS_GUIDE: "li-2025-guide",
    metric_tables.PRAXIS: "fang--khazi-2025",
    metric_tables.OWN: "rollcorr",
    "Kish (1965)": "kish-1965",
    presets.VERL: "verl-091",
    presets.VERL_2025_11: "verl-november-2025",
    presets.VERL_2025_12: "verl-december-2025",
    presets.OWN: "rollcorr",
}
"""A source, as the code writes it → the anchor of its entry."""

SHORT_NAMES = {
    "tis": ("Yao et al. (2025)", "yao-et-al-2025"),
    "seq_tis": ("Liu, Li et al. (2025)", "liu-li-et-al-2025"),
    "mis": ("Liu, Li et al. (2025)", "liu-li-et-al-2025"),
    "icepop": ("Ling Team (2025)", "ling-team-2025"),
}
"""Where each short name of a preset comes from."""


def linked(source: str) -> str:
    """A source as a link from a page of docs/reference/.

    Raises:
        KeyError: the source has no entry; add it to docs/references.md and to REFERENCES.
    """
    return f"[{source}](../references.md#{REFERENCES[source]})"


def preset_source(name: str) -> str:
    """Where a preset comes from, as a link."""
    if name in SHORT_NAMES:
        title, anchor = SHORT_NAMES[name]
        return f"[{title}](../references.md#{anchor})"
    return linked(presets.PRESETS[name].source)
