"""Two pages on the rollout log, from the tables in the code: its columns, and the dumps of frameworks that are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rollcorr.monitor.field_names import ACCEPTED, LOGGED
from rollcorr.rollout_log import COLUMNS, FRAMEWORKS, FileLimits, Framework
from rollcorr.rollout_log.schema import SCHEMA_VERSION

Table = Callable[..., str]

LIMIT_MEANINGS = {
    "rows": "rows of a file",
    "row_tokens": "values of one row in any column, except kept ids",
    "row_kept_ids": "kept ids of one row",
    "line_bytes": "bytes of a line of JSON",
    "page_bytes": "sum over the columns that are read: decompressed bytes of the largest page in a row group",
    "footer_bytes": "bytes of the footer of a Parquet file",
    "pickle_bytes": "bytes of a `.pkl` file, or of the pickle (without tensors) in a `.pt` file",
    "pickle_objects": "size of a pickle: a number in a list counts 1, a list or object 7, a text 1 plus 1 per 8 bytes",
}


def schema_page(generated: str, table: Table) -> str:
    """docs/reference/rollout_log_schema.md: every column, and what holds for all of them."""
    rows = [(f"`{c.name}`", f"`{c.type}`", c.unit, c.per, c.meaning) for c in COLUMNS.values()]
    limits = [(f"`{f.name}`", f"{f.default:,}", LIMIT_MEANINGS[f.name]) for f in dataclasses.fields(FileLimits)]
    return f"""# Columns of the rollout log

{generated}

The schema of the [rollout log](../guides/rollout_log.md), version {SCHEMA_VERSION}.

{table(("column", "type", "unit", "per", "meaning"), rows)}

- Every column may be null or absent, which means "not recorded", also `response_ids`. The length of a response is the
  length of the first token column, in the order above, that its row records.
- `prompt` and the columns from `dimensions` to `mean_distance` (version 1.1) are for [denoising
  steps](../guides/rollout_log.md#denoising-steps). `rollout_entropy` came with version 1.3.
- `routing_difference` (version 1.2) is for mixture-of-experts models where both sides record the experts of each token.
  `rollcorr.rollout_log.routing_difference(rollout_experts, train_experts)` computes it from two tensors (…, layers,
  experts per token).
- In a list of floats, null and NaN are missing values, and both are read as NaN. In other lists, null is an error.
- Log-probs are float32. Parquet preserves NaN, ±inf, −0.0 and subnormal values bit for bit.
- You can add columns of your own with names `x_…`: one number, flag or text for each sequence. They are written, read
  and converted like other columns. The first batch of a Parquet file sets their names and types.
- The metadata of the file contains `rollcorr.schema_version` (`{SCHEMA_VERSION}`) and `rollcorr.units` (JSON, column →
  unit).
- A minor version adds columns, which older readers skip. A major version changes the meaning of a column; older readers
  then raise an error that asks for an upgrade.
- Files of other programs are read if their columns have these names, or with
  [`--columns`](../guides/rollout_log.md#logs-of-other-frameworks). Other columns are skipped, except `x_…`. float64 and
  float16 are converted to float32, large and fixed-size lists to lists, and integer flags to booleans.

## Limits of a file

These limits are the fields of `FileLimits`. [The rollout log](../guides/rollout_log.md#untrusted-files) describes the
error for a file that exceeds a limit, and how to raise the limit.

{table(("limit", "default", "limited quantity"), limits)}

- Three limits are fixed: 64 levels of JSON, 524,288 column chunks of a Parquet file, and 256 leaf columns that are read
  (a struct has one for each field).
- Data is read only if the footer of a Parquet file and the headers of its pages agree on sizes. In a row group of more
  than 16 million values, row lengths are decoded first, and long rows are read in smaller batches.
- Other files also have limits. YAML: 1 MiB, 20,000 values with aliases expanded, 64 levels. `metrics.jsonl`: 1 MiB per
  line, 256 MiB of memory for all steps. If a file exceeds a limit, the command prints one line and exits with code 2.

Where to go next: [the rollout log](../guides/rollout_log.md), [dumps of other frameworks](dumps.md).
"""


def dumps_page(generated: str, table: Table) -> str:
    """docs/reference/dumps.md: each framework's names for our columns, in its batches and in its dumps."""
    sections = "\n\n".join(
        f"## {framework.name} {framework.version}\n\n{framework_section(framework, table)}" for framework in FRAMEWORKS
    )
    batches = [(f"`{name}`", framework.batch, masks_of(framework)) for name, framework in ACCEPTED.items()]
    return f"""# Dumps of other frameworks

{generated}

Read this to use dumps or batches of these frameworks, or to log more. The names come from the source of the stated
version. "tensor in a step" is what the framework calls the column inside its training step. The same tables are data:
`rollcorr.rollout_log.FRAMEWORKS`. `rollcorr check NAME` prints a framework's settings and code lines.

## Batches that `Monitor.correct` accepts

{table(("fields=", "batch", "mask"), batches)}

It takes `old_log_prob`, `rollout_log_prob` and the mask by the names of "tensor in a step" below, and logs
{", ".join(f"`{column}`" for column in LOGGED)} if a tensor batch contains them.

{sections}

Where to go next: [how to read such a dump](../guides/rollout_log.md#logs-of-other-frameworks), [every
column](rollout_log_schema.md).
"""


def masks_of(framework: Framework) -> str:
    """The masks of a batch, and what they are multiplied with."""
    names = [f"`{name}`" for name in framework.names("response_mask")]
    return " or ".join(names) + "".join(f", times `{name}`" for name in framework.further_masks)


def framework_section(framework: Framework, table: Table) -> str:
    """What the page says of a framework: its dumps, what each column is there, and the lines that log more."""
    files = [(dump.name, f"`{dump.files}`", dump.setting, dump.form) for dump in framework.dumps]
    names = [name for name in COLUMNS if name in framework.tensors or any(name in d.fields for d in framework.dumps)]
    dumps = [dump for dump in framework.dumps if dump.fields]
    columns = [(f"`{name}`", *(dump.fields.get(name) for dump in dumps), framework.tensors.get(name)) for name in names]
    remarks = []
    for dump in framework.dumps:
        instead = dump.instead or "add the lines below"
        lacks = f" Not enough for a check: {dump.lacks}. Instead: {instead}." if dump.lacks else ""
        settings = "".join(f" For `{column}`: {setting}." for column, setting in dump.recorded_with.items())
        remarks.append(f"- {dump.name}: {dump.layout}.{lacks}{settings}")
    needs = f"{framework.needs}, and add" if framework.needs else "add"
    lines = f"To write `{framework.log}`, {needs} to {framework.place}:\n\n```python no-run\n{framework.lines}\n```"
    parts = (
        table(("dump", "files", "written with", "form"), files) if files else "It writes no dump.",
        table(("column", *(f"in {dump.name}" for dump in dumps), "tensor in a step"), columns),
        "\n".join(remarks),
        lines if framework.lines else "",
    )
    return "\n\n".join(part for part in parts if part)
