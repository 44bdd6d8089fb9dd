"""Print the options that no page names: fields of public configurations, and options of the command line.

    python tools/undocumented_options.py

A page is README.md, a notebook, a file in `examples/`, or a file in `docs/` outside `docs/reference/`, which is
generated. A field counts as named where its name stands as a word, an option of the command line as `--name`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = re.compile(r"(Config|Options|Settings|Spec)$")
TEXTS = {".ipynb", ".md", ".py", ".sh", ".toml", ".yaml", ".yml"}


def pages() -> str:
    """Return the text of all pages."""
    files = [ROOT / "README.md", *(ROOT / "examples").rglob("*"), *(ROOT / "docs").rglob("*")]
    reference = ROOT / "docs" / "reference"
    shown = [file for file in files if file.suffix in TEXTS and not file.is_relative_to(reference)]
    return "\n".join(file.read_text(encoding="utf-8") for file in shown)


def configurations() -> list[type]:
    """Return the public dataclasses that hold options, and the blocks in them."""
    import rollcorr

    packages = [rollcorr.__name__, *(m.name for m in pkgutil.walk_packages(rollcorr.__path__, "rollcorr.") if m.ispkg)]
    found: dict[str, type] = {}
    for package in packages:
        try:
            module = importlib.import_module(package)
            public = [getattr(module, name) for name in getattr(module, "__all__", ())]
        except ImportError:  # an extra or a framework is missing
            continue
        for member in public:
            if isinstance(member, type) and CONFIGURATION.search(member.__name__):
                found |= {block.__qualname__: block for block in _blocks(member)}
    return list(found.values())


def _blocks(config: type) -> Iterator[type]:
    """A dataclass, and those that its fields hold."""
    if dataclasses.is_dataclass(config):
        yield config
        for hint in typing.get_type_hints(config).values():
            if isinstance(hint, type):
                yield from _blocks(hint)


def undocumented_fields(text: str) -> list[str]:
    """Return `Class.field` for each field that the text does not name."""
    words = set(re.findall(r"\w+", text))
    return [
        f"{config.__name__}.{field.name}"
        for config in configurations()
        for field in dataclasses.fields(config)
        if field.init and not field.name.startswith("_") and field.name not in words
    ]


def undocumented_parameters(text: str) -> list[str]:
    """Return `command --option` for each option of the command line that the text does not name."""
    import typer

    from rollcorr.cli import app

    group: Any = typer.main.get_command(app)
    return [
        f"{name} {parameter.opts[0]}"
        for name, command in group.commands.items()
        for parameter in command.params
        if parameter.opts[0].startswith("--") and not any(_named(option, text) for option in parameter.opts)
    ]


def _named(option: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


if __name__ == "__main__":
    everything = pages()
    print("\n".join([*undocumented_fields(everything), *undocumented_parameters(everything)]))
