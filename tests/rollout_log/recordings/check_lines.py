"""Check that the printed lines fit their place in each framework: `python check_lines.py SOURCES`.

SOURCES is as in `record_dumps.py`. Each variable of the lines must occur in the function that `place` names, and each
field and key in the framework's package. No code of a framework is run.
"""

import ast
import builtins
import sys
from pathlib import Path

from rollcorr.rollout_log import FRAMEWORKS, Framework

# Of this library, and of dictionaries.
OWN = {"from_padded", "write", "update", "items"}


def check_lines(source: Path, framework: Framework) -> None:
    """Raise `ValueError` for a variable, field or key of the lines that the framework does not have."""
    path, function = framework.place.split(", ")[:2]
    tree = ast.parse((source / path).read_text(encoding="utf-8"))
    inside = next(node for node in ast.walk(tree) if getattr(node, "name", None) == function.split(".")[-1])
    lines = list(ast.walk(ast.parse(framework.lines)))

    # Variables of the function, and those that the lines bind themselves.
    known = {node.id for node in ast.walk(inside) if isinstance(node, ast.Name)} | set(dir(builtins))
    known |= {node.arg for node in ast.walk(inside) if isinstance(node, ast.arg)}
    known |= {node.id for node in lines if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.name for node in lines if isinstance(node, ast.alias)}
    missing = {node.id for node in lines if isinstance(node, ast.Name)} - known

    package = "".join(file.read_text(encoding="utf-8") for file in (source / path.split("/")[0]).rglob("*.py"))
    used = {node.attr for node in lines if isinstance(node, ast.Attribute)} - OWN
    used |= {
        node.slice.value for node in lines if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    missing |= {name for name in used if isinstance(name, str) and name not in package}
    if missing:
        raise ValueError(f"{framework.name}: {framework.place} has no {', '.join(sorted(missing))}")


if __name__ == "__main__":
    for framework in FRAMEWORKS:
        if framework.lines and not framework.place.startswith("your script"):
            check_lines(Path(sys.argv[1]) / framework.name.lower(), framework)
            print(framework.name, framework.version)  # noqa: T201
