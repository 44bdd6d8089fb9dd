"""What the docstrings of public names leave out: arguments, shapes, units, errors, sources.

    python tools/docstring_faults.py        one line per fault: NAME: what is missing

tests/test_docstrings.py fails if there is one.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT / "tools")) if path not in sys.path]

from api_pages import sections  # noqa: E402

SHAPE = re.compile(
    r"\((?:[A-Z][\w ]*|\.\.\.|…)(?: [−+·/] \w+)?,[^)]*\)|shape|scalar|\(\)|0-d|1-D|2-D|per (?:token|sequence)"
)
# Files of formulas: what they compute was defined by somebody.
MATHS = ("advantages", "aggregation", "bounds", "diffusion", "divergence", "logprobs", "losses", "weights")


def docstring_faults() -> list[str]:
    """One line per fault, sorted."""
    return sorted({fault for path in set(sections().values()) for fault in _of_name(path)})


def _of_name(path: str) -> Iterator[str]:
    door, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(door), name)
    if inspect.isclass(value):
        yield from _of_class(path, value)
    elif inspect.isroutine(value):
        yield from _of_function(path, value)


def _of_class(path: str, owner: type) -> Iterator[str]:
    text = inspect.getdoc(owner) or ""
    if dataclasses.is_dataclass(owner):
        described = " ".join(inspect.getdoc(base) or "" for base in owner.__mro__)
        fields = [field.name for field in dataclasses.fields(owner) if not field.name.startswith("_")]
        missing = [name for name in fields if not re.search(rf"^\s*`?{name}`?[ :(,]", described, re.MULTILINE)]
        if missing:
            yield f"{path}: no line for {', '.join(missing)}"
    if not text:
        yield f"{path}: no docstring"
    if "__init__" in vars(owner) and not dataclasses.is_dataclass(owner) and not _is_internal(owner):
        yield from _of_function(path, owner.__init__, text=text)
    for name, member in vars(owner).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not name.startswith("_") and inspect.isfunction(function) and function.__module__ == owner.__module__:
            # A method that overrides another keeps its promises; what it adds stands in its own docstring.
            texts = [inspect.getdoc(vars(base)[name]) or "" for base in owner.__mro__ if name in vars(base)]
            yield from _of_function(f"{path}.{name}", function, text="\n".join(texts))


def _is_internal(owner: type) -> bool:
    return issubclass(owner, BaseException) or getattr(owner, "_is_protocol", False)


def _of_function(path: str, function: Callable, *, text: str | None = None) -> Iterator[str]:
    text = (inspect.getdoc(function) or "") if text is None else text
    if not text:
        yield f"{path}: no docstring"
        return
    code = _code(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    tensors = [p.name for p in parameters if "Tensor" in str(p.annotation)]
    missing = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and not re.search(rf"\b{p.name}\b", text)]
    if len(parameters) > 1 and missing:
        yield f"{path}: no line for {', '.join(missing)}"
    if tensors and not SHAPE.search(text):
        yield f"{path}: no shape"
    if any("log_prob" in name for name in tensors) and "nats" not in text and "as in" not in text:
        yield f"{path}: no unit"
    if _raises(code) and "Raises:" not in text and "as in" not in text:
        yield f"{path}: no errors"
    module = function.__module__
    is_formula = module.startswith("rollcorr.core.") and module.rpartition(".")[2] in MATHS
    if is_formula and "Source:" not in text and "Source:" not in (sys.modules[module].__doc__ or ""):
        yield f"{path}: no source"


def _code(function: Callable) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):  # made at run time, as the constructors of presets are
        return ast.Module(body=[], type_ignores=[])


def _raises(code: ast.AST) -> bool:
    """Whether a function raises an error itself, or checks what it is given by a function that does."""
    for node in ast.walk(code):
        if isinstance(node, ast.Raise) and node.exc is not None:
            return "NotImplementedError" not in ast.unparse(node.exc)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and re.match(r"_?check_", node.func.id):
            return True
    return False


if __name__ == "__main__":
    found = docstring_faults()
    print(*found, sep="\n")
