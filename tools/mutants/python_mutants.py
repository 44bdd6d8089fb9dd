"""Mutants of a Python file: one small edit each, of the kinds that programmers make by mistake.

An edit replaces a span of the source, so a survivor is shown as a diff of what somebody could have typed. Docstrings,
annotations, messages of errors and warnings, f-strings and type-only code are left as they are.
"""

from __future__ import annotations

import ast
from typing import NamedTuple


class Mutant(NamedTuple):
    """One edit of one file.

    Attributes:
        file: path from the root of the tree.
        line: first line of the edit, from 1.
        operator: kind of the edit.
        text: whole source after the edit.
        lines: first and last line of the code that a test must run to see it.
        at_import: that code runs when the module is imported, so the lines of tests do not tell who sees it.
    """

    file: str
    line: int
    operator: str
    text: str
    lines: tuple[int, int]
    at_import: bool


COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
MESSAGES = ("warn", "debug", "info", "warning", "error", "exception", "log_error", "echo", "print")
"""Calls whose arguments are texts for people."""

NOT_NUMBERS_OF_INTEREST = ("stacklevel", "maxsize", "indent", "ndigits")
"""Keywords whose constants only change a message or a cache."""


def python_mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant of a source, each text once."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return list({mutant.text: mutant for mutant in finder.found}.values())


def parses(text: str) -> bool:
    """Whether an edit left a valid program."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Walks a module and collects edits; what it does not visit is not changed."""

    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.source = source
        self.found: list[Mutant] = []
        self._rows = [0]
        for row in source.encode().splitlines(keepends=True):
            self._rows.append(self._rows[-1] + len(row))
        self._bytes = source.encode()
        self._function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
        self._statement: ast.stmt | None = None

    # --- edits

    def _offset(self, line: int, column: int) -> int:
        return self._rows[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno or 0, node.end_col_offset or 0)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def _edit(self, operator: str, start: int, end: int, text: str) -> None:
        statement = self._statement
        assert statement is not None
        changed = (self._bytes[:start] + text.encode() + self._bytes[end:]).decode()
        line = self._bytes[:start].count(b"\n") + 1

        # Of a block the condition alone; of a function's defaults the body, for the line with them runs at import.
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if isinstance(statement, ast.If | ast.While | ast.For | ast.With):
            last = max(first, statement.body[0].lineno - 1)
        at_import = self._function is None
        self.found.append(Mutant(self.file, line, operator, changed, (first, last), at_import))

    def _replace(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self._edit(operator, *self._span(node), text)

    def _between(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the sign between two operands, where it is written plainly."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._bytes[start:end].decode()
        if gap.count(old) == 1 and "#" not in gap:
            self._edit(operator, start, end, gap.replace(old, new))

    # --- what is visited

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and remember the innermost statement."""
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        super().visit(node)
        self._statement = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Defaults and body, without annotations and decorators."""
        if any("overload" in ast.dump(decorator) for decorator in node.decorator_list):
            return
        outer, self._function = self._function, node
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._function = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body."""
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """The value, unless it lists names or types."""
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if names != ["__all__"]:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts stay."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion in the package only narrows a type."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """An error that is not raised; its message stays."""
        self._replace("remove raise", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call that is not made; docstrings stay."""
        if isinstance(node.value, ast.Call):
            self._replace("remove call", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """A sum that is not taken, or is taken with the other sign."""
        self._replace("remove statement", node, "pass")
        for kind, new in ARITHMETIC.items():
            old = _SIGNS[kind]
            if isinstance(node.op, kind):
                self._between("arithmetic", node.target, node.value, f"{old}=", f"{new}=")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """The other branch; a block of imports for types stays."""
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The other value."""
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        """The opposite condition, where no other operator writes it."""
        is_flipped = isinstance(test, ast.Compare) and not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if not is_flipped and not isinstance(test, ast.UnaryOp):
            self._replace("negate condition", test, f"not ({self._text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        """Another comparison."""
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between("comparison", left, right, _SIGNS[type(op)], COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operation; texts and unions of types stay."""
        if any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
            return
        if type(node.op) in ARITHMETIC:
            self._between("arithmetic", node.left, node.right, _SIGNS[type(node.op)], ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`or` for `and`, and the reverse."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("boolean", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without the sign."""
        self._replace("drop sign", node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Another number."""
        value = node.value
        if isinstance(value, bool):
            self._replace("constant", node, str(not value))
        elif isinstance(value, int):
            self._replace("constant", node, str(value + 1))
            self._replace("constant", node, f"({value - 1})" if value < 1 else str(value - 1))
        elif isinstance(value, float):
            self._replace("constant", node, repr(2 * value if value else 1.0))
            self._replace("constant", node, repr(value / 2 if value else -1.0))

    def visit_Call(self, node: ast.Call) -> None:
        """Two arguments in the other order; texts for people stay."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MESSAGES or name in ("isinstance", "TypeVar", "cast", "getattr"):
            return
        if len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            first, second = node.args[:2]
            start, end = self._span(first)[0], self._span(second)[1]
            gap = self._bytes[self._span(first)[1] : self._span(second)[0]].decode()
            if self._text(first) != self._text(second):
                self._edit("swap arguments", start, end, self._text(second) + gap + self._text(first))
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in NOT_NUMBERS_OF_INTEREST:
                self.visit(keyword.value)


_SIGNS: dict[type, str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
