"""docs/guides/rollout_log.md says what the code does: its table is the schema's, its code runs, its example is read."""

import re
from pathlib import Path

import pytest

import rollcorr.rollout_log
from rollcorr.rollout_log import COLUMNS, FRAMEWORKS, SCHEMA_VERSION, read_rollout_log, validate_rollout_log

pytest.importorskip("pyarrow", reason="needs rollcorr[log]")

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "rollout_log.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def framework_section(framework):
    """What the page says of a framework: its dumps, and what each column is there."""
    lines = ["| dump | files | written with | form |", "|---|---|---|---|"]
    lines += [f"| {dump.name} | `{dump.files}` | {dump.setting} | {dump.form} |" for dump in framework.dumps]
    names = [name for name in COLUMNS if name in framework.tensors or any(name in d.fields for d in framework.dumps)]
    dumps = [dump for dump in framework.dumps if dump.fields]
    header = ["column", *(f"in {dump.name}" for dump in dumps), "tensor in a step"]
    lines += ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for name in names:
        cells = [*(dump.fields.get(name) for dump in dumps), framework.tensors.get(name)]
        lines.append(" | ".join([f"| `{name}`", *(cell or "–" for cell in cells)]) + " |")
    lines.append("")
    for dump in framework.dumps:
        lacks = f" Not enough for a check: {dump.lacks}. Instead: {dump.instead}." if dump.lacks else ""
        settings = "".join(f" For `{column}`: {setting}." for column, setting in dump.recorded_with.items())
        lines.append(f"- {dump.name}: {dump.layout}.{lacks}{settings}")
    return "\n".join(lines)


def test_the_table_is_the_schema():
    section = PAGE.split(f"## Schema, version {SCHEMA_VERSION}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    assert table == [f"| `{c.name}` | {c.type} | {c.unit} | {c.per} | {c.meaning} |" for c in COLUMNS.values()]


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
    listed = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")))
    )
    assert codes - listed - {"suffix"} == set()


def test_the_tables_of_frameworks_are_those_of_the_code():
    for framework in FRAMEWORKS:
        section = PAGE.split(f"#### {framework.name} {framework.version}\n")[1].split("\n#### ")[0].split("\n### ")[0]
        assert framework_section(framework) in section
