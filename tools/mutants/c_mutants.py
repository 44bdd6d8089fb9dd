"""Mutants of a C file, by its tokens: comparisons, arithmetic, booleans, signs, numbers, conditions and statements."""

from __future__ import annotations

import re

from python_mutants import Mutant

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "&": "|", "|": "&",
    "+": "-", "-": "+", "*": "/", "/": "*", "+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=",
}  # fmt: skip
"""Operators between two operands, which this code writes with a space on each side."""

TOKEN = re.compile(
    r"""(?P<skip>/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|^[ ]*\#(?!define)[^\n]*)
      | (?P<binary>(?<=\ )(?:[<>=!+\-|&]=|&&|\|\||[<>+\-*/&|])(?=\ ))
      | (?P<sign>(?<![\w)\]])[!~](?=[\w(]))
      | (?P<number>(?<![\w.])(?:0x[0-9a-f]+|\d+\.?\d*(?:e-?\d+)?)f?(?![\w.]))
      | (?P<condition>\bif\ \()""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
STATEMENT = re.compile(r"^ +(?:[\w.\->\[\]* ]+ [+\-|&]?= |[a-z_]+\()[^;{}]*;$", re.MULTILINE)
DECLARATION = re.compile(r"^ *(?:const |static |return |(?:\w+ )?\w+ \*?\w+ = )")


def c_mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant of a source; one that does not compile is found when it is built."""
    lines = source.count("\n") + 1
    found = {}

    def add(operator: str, start: int, end: int, text: str) -> None:
        changed = source[:start] + text + source[end:]
        line = source.count("\n", 0, start) + 1
        found[changed] = Mutant(file, line, operator, changed, (1, lines), at_import=False)

    comments = [match.span() for match in TOKEN.finditer(source) if match.lastgroup == "skip"]
    for match in TOKEN.finditer(source):
        token = match.group()
        if match.lastgroup == "binary":
            add(
                "comparison" if token in ("<", "<=", ">", ">=", "==", "!=") else "arithmetic",
                *match.span(),
                SWAPS[token],
            )
        elif match.lastgroup == "sign":
            add("drop sign", *match.span(), "")
        elif match.lastgroup == "number" and "x" not in token:
            for text in _other_numbers(token):
                add("constant", *match.span(), text)
        elif match.lastgroup == "condition":
            end = _closing(source, match.end() - 1)
            add("negate condition", match.end(), end, f"!({source[match.end() : end]})")

    for match in STATEMENT.finditer(source):
        is_comment = any(start <= match.start() < end for start, end in comments)
        if not is_comment and not DECLARATION.match(match.group()):
            add("remove statement", *match.span(), ";")
    return list(found.values())


def _other_numbers(token: str) -> list[str]:
    """A larger number and a smaller one."""
    number = token.removesuffix("f")
    if number.isdigit() and number == token:
        return [str(int(number) + 1), *([str(int(number) - 1)] if int(number) else [])]
    ending = token[len(number) :]
    value = float(number)
    return [f"{2 * value!r}{ending}", f"{value / 2!r}{ending}"] if value else [f"1.0{ending}"]


def _closing(source: str, opening: int) -> int:
    """Where the bracket that opens at a place is closed."""
    depth = 0
    for place in range(opening, len(source)):
        depth += (source[place] == "(") - (source[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"a bracket at {opening} is not closed")
