"""docs/guides/rollout_log.md matches the code: code runs, the example parses, all codes are listed."""

import re
from pathlib import Path

import pytest

import rollcorr.rollout_log
from rollcorr.rollout_log import read_rollout_log, validate_rollout_log

pytest.importorskip("pyarrow", reason="needs rollcorr[log]")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guides" / "rollout_log.md").read_text(encoding="utf-8")
LIMITS = (DOCS / "reference" / "rollout_log_schema.md").read_text(encoding="utf-8").split("## Limits of a file")[1]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in blocks("python"):
        exec(code, names)
    assert capsys.readouterr().out == blocks("text")[0] + "2 rows\n"  # and no problem was found
    assert names["packed"].shape == (6,)
    assert names["report"].rows == 2
    assert (tmp_path / "rollouts.jsonl.gz").exists()


def test_the_json_example_is_a_row(tmp_path):
    (example,) = blocks("json")
    (tmp_path / "log.jsonl").write_text(example)
    (batch,) = read_rollout_log(tmp_path)
    assert batch.lengths.tolist() == [3]
    assert batch.values("step").tolist() == [3]
    assert validate_rollout_log(tmp_path, required=()).findings == ()


def test_every_code_of_a_problem_is_listed():
    source = "".join(
        path.read_text(encoding="utf-8") for path in Path(rollcorr.rollout_log.__file__).parent.glob("*.py")
    )
    codes = set(re.findall(r'code="(\w+)"', source)) | set(re.findall(r'_warning\(\s*"(\w+)"', source))
    codes |= set(re.findall(r'_error\("(\w+)"', source)) | set(re.findall(r'code = "(\w+)"', source))
    assert {"length", "zeros", "membership"} <= codes
    rows = [line for line in [*PAGE.splitlines(), *LIMITS.splitlines()] if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows)))
    assert codes - listed - {"suffix"} == set()
