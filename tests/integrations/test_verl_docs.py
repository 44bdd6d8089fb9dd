"""docs/coming_from/verl.md: its code runs and prints the shown output."""

import re
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from" / "verl.md").read_text(encoding="utf-8")


def test_the_code_prints_what_the_page_says(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.protocol", None)
    names = {}
    printed = []
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(code, names)
        printed.append(capsys.readouterr().out)
    assert printed == re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_every_public_function_is_on_the_page_or_in_a_module_that_is():
    for module in (
        "rollcorr.integrations.verl",
        "rollcorr.integrations.verl.v2025_11",
        "rollcorr.integrations.verl.v2025_10",
    ):
        assert f"`{module}`" in PAGE
