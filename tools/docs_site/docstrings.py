"""Docstrings as the site shows them: examples as code, sources in bold with their links.

The house writes `Example:` above lines with `>>>`, which Google's style calls `Examples:`, and ends with a line
`Source: …`. mkdocstrings loads the class below through mkdocs.yml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

MARKED_CODE = re.compile(r"^( *)```\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class HouseStyle(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_shown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:  # noqa: ANN401
        """Called once all modules are loaded, so that a decorator's class can be looked up."""
        for module in _modules(pkg):
            # An imported function is changed where it is defined.
            for function in module.functions.values():
                if function.is_alias:
                    continue
                for decorator in function.decorators:
                    if found := re.fullmatch(r"called_as\((\w+)\)", str(decorator.value)):
                        call = module[found[1]]
                        with_the_arguments_of_its_call(function, call.final_target if call.is_alias else call)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for below in module.modules.values():
        if not below.is_alias:
            yield from _modules(below)


def as_shown(text: str) -> str:
    """The docstring with the section's name that the parser knows, and with links in its sources."""
    text = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = MARKED_CODE.sub(r"\1```python\n\2\1```", text)
    text = re.sub(r"^(\s*)Source: ", r"\1**Source:** ", text, flags=re.MULTILINE)
    text = re.sub(r"(?<![\w/])(?<!\]\()docs/([\w/]+)\.md", _page_link, text)
    return re.sub(r"(?<!\[)arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _page_link(match: re.Match) -> str:
    """A page that a docstring names, as a link from a page of the API.."""
    return f"[{match[1].rpartition('/')[2].replace('_', ' ')}](../../{match[1]}.md)"


def _fields_of(call: griffe.Class) -> list[griffe.Parameter]:
    """The fields of a dataclass and of its bases, as the parameters that its constructor has."""
    parameters = [parameter for base in call.resolved_bases for parameter in _fields_of(base)]
    for attribute in call.members.values():
        if not attribute.is_attribute:
            continue
        keyword_only = "kw_only=True" in str(attribute.value)
        kind = griffe.ParameterKind.keyword_only if keyword_only else griffe.ParameterKind.positional_or_keyword
        default = str(attribute.value) if attribute.value is not None and not keyword_only else None
        default = "False" if keyword_only else default
        parameters.append(griffe.Parameter(attribute.name, annotation=attribute.annotation, kind=kind, default=default))
    return parameters


def _described_fields(call: griffe.Class) -> str:
    """What the dataclass and its bases say of their fields, indented as under `Args:`."""
    sections = []
    for owner in [*reversed(call.mro()), call]:
        text = owner.docstring.value if owner.docstring else ""
        sections += re.findall(r"^Attributes:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    return "\n".join(section.rstrip() for section in sections)


def with_the_arguments_of_its_call(function: griffe.Function, call: griffe.Class) -> None:
    """Show the arguments that the decorator `called_as` gives a function, in place of the one in its source."""
    keyword_only = griffe.ParameterKind.keyword_only
    function.parameters = griffe.Parameters(*sorted(_fields_of(call), key=lambda field: field.kind is keyword_only))
    described = f"Args:\n{_described_fields(call)}\n"
    text = re.sub(r" ?`\w+Call` describes the arguments\.", "", function.docstring.value)
    before, mark, after = text.partition("\nReturns:" if "\nReturns:" in text else "\nRaises:")
    function.docstring.value = f"{before}\n{described}{mark}{after}"
