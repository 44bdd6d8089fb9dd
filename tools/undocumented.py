"""Print the public names, configuration fields and command-line options that no page mentions; exit 1 if there are any.

    python tools/undocumented.py

A public name stands in the `__all__` of a package that can be imported here; `rollcorr.diagnostics` is left out. A page
is README.md, a notebook, a file in `examples/`, or a file in `docs/` outside `docs/reference/`, which is generated. A
name or field is mentioned if it occurs as a word, an option as `--name`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
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


def public_names() -> Iterator[tuple[str, str, object]]:
    """Yield (package, name, object) for each name of an `__all__`."""
    import rollcorr

    packages = [module.name for module in pkgutil.walk_packages(rollcorr.__path__, "rollcorr.") if module.ispkg]
    for package in ["rollcorr", *packages]:
        try:
            module = importlib.import_module(package)
            found = [(package, name, getattr(module, name)) for name in getattr(module, "__all__", ())]
        except ImportError:  # an extra or a framework is missing
            continue
        yield from found


def undocumented_names(text: str) -> list[str]:
    """Return `package.name` for each public name that the text does not mention."""
    words = set(re.findall(r"\w+", text))
    own = [(package, name) for package, name, _ in public_names() if not package.startswith("rollcorr.diagnostics")]
    return [f"{package}.{name}" for package, name in own if name not in words]


def configurations() -> list[type]:
    """Return the public dataclasses of options, and the blocks in them."""
    found: dict[str, type] = {}
    for _, _, member in public_names():
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


def undocumented() -> list[str]:
    """Return every name, field and option that no page mentions."""
    text = pages()
    return [*undocumented_names(text), *undocumented_fields(text), *undocumented_parameters(text)]


if __name__ == "__main__":
    missing = undocumented()
    print(*missing, sep="\n")
    sys.exit(bool(missing))
