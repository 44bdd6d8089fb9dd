"""Write docs/notebooks/ from tools/notebooks/: each script becomes a notebook with its outputs.

    python tools/make_notebook.py

A script is in the percent format: `# %%` begins a cell of code, `# %% [markdown]` a cell of text. Cells run in order,
in one process; what they print and the figures that they show are kept. Needs matplotlib.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tools" / "notebooks"
NOTEBOOKS = ROOT / "docs" / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def cells_of(script: str) -> list[tuple[str, str]]:
    """The cells of a script: "markdown" or "code", and the text."""
    cells = []
    for mark, text in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.DOTALL | re.MULTILINE):
        text = text.strip("\n")
        if mark:
            cells.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE)))
        else:
            cells.append(("code", text))
    return cells


def executed(script: str) -> dict:
    """A notebook with the outputs of its cells."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict = {"__name__": "__main__"}
    notebook_cells, count = [], 0
    for number, (kind, source) in enumerate(cells_of(script)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        if kind == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source.replace("plt.show()", ""), f"cell {count}", "exec"), names)
            outputs = []
            if printed.getvalue():
                text = printed.getvalue().splitlines(keepends=True)
                outputs.append({"name": "stdout", "output_type": "stream", "text": text})
            outputs += [_picture(plt.figure(number)) for number in plt.get_fignums()]
            plt.close("all")
            cell |= {"execution_count": count, "outputs": outputs}
        notebook_cells.append(cell)
    return {"cells": notebook_cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}


def _picture(figure) -> dict:  # noqa: ANN001
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    """Write every notebook."""
    NOTEBOOKS.mkdir(parents=True, exist_ok=True)
    for script in sorted(SCRIPTS.glob("*.py")):
        notebook = executed(script.read_text(encoding="utf-8"))
        path = NOTEBOOKS / f"{script.stem}.ipynb"
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
