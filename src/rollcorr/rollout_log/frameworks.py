"""Table of other frameworks: their names for the columns of the rollout log, and the contents of their dumps.

`FRAMEWORKS` contains, for each framework, the version that was read, its tensors in a training step, and its dumps. The
readers of foreign files, the hints in errors and the table in docs/guides/rollout_log.md use it. For a user's own file,
`--columns` maps its names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollcorr.rollout_log.errors import RolloutLogError, log_error
from rollcorr.rollout_log.schema import COLUMNS, OWN_PREFIX, check_column_names

if TYPE_CHECKING:
    from rollcorr.rollout_log.batch import RolloutBatch
    from rollcorr.rollout_log.source import LogSource


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Kind of file that a framework writes.

    Attributes:
        name: short name of the dump.
        files: its path, with the framework's own placeholders.
        setting: the setting that makes the framework write it.
        form: the file format.
        recognized_by: names in every row of such a file; together they occur in no other known file.
        fields: column of the log → name in the file. Columns that are not listed are not read from it.
        lacks: data that a check of the mismatch needs and that the file lacks; empty if it is complete.
        instead: the fix for `lacks`.
        recorded_with: column of the log → setting that makes the framework record it, if it does not always do so.
        layout: layout of the values of a row, and their conversion.
    """

    name: str
    files: str
    setting: str
    form: Literal["JSONL", "Parquet", "torch.save", "pickle"]
    recognized_by: frozenset[str]
    fields: Mapping[str, str] = field(default_factory=dict)
    lacks: str = ""
    instead: str = ""
    recorded_with: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Framework with its names for the columns of the log.

    Attributes:
        name: the framework's own spelling.
        version: the release or commit that was read.
        tensors: column of the log → name of the tensor in a training step.
        dumps: the files that it writes.
    """

    name: str
    version: str
    tensors: Mapping[str, str]
    dumps: tuple[Dump, ...]


_WRITE_IT = "write the log in the training step, with RolloutLogWriter: docs/guides/rollout_log.md"

VERL = Framework(
    name="verl",
    version="0.9.1",
    tensors={
        "prompt_ids": "prompts",
        "response_ids": "responses",
        "response_mask": "response_mask",
        "rollout_log_prob": "rollout_log_probs",
        "old_log_prob": "old_log_probs",
        "token_rewards": "token_level_scores",
        "advantages": "advantages",
        "group_id": "uid",
    },
    dumps=(
        Dump(
            name="generations",
            files="{rollout_data_dir}/{step}.jsonl, {validation_data_dir}/{step}.jsonl",
            setting="trainer.rollout_data_dir, trainer.validation_data_dir",
            form="JSONL",
            recognized_by=frozenset({"input", "output", "score"}),
            fields={"step": "step", "reward": "score", "sequence_id": "request_id"},
            lacks="verl's dump of generations holds text and scores, and no log-prob of a token; no setting of verl "
            "makes it write them",
            instead=f"set actor_rollout_ref.rollout.calculate_log_probs=True, and {_WRITE_IT}",
            layout="text; only step, score and request_id are taken",
        ),
    ),
)

TRL = Framework(
    name="TRL",
    version="1.16.0",
    tensors={
        "prompt_ids": "prompt_ids",
        "response_ids": "completion_ids",
        "response_mask": "completion_mask",
        "rollout_log_prob": "sampling_per_token_logps",
        "old_log_prob": "old_per_token_logps",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="completions",
            files="{output_dir}/completions/completions_{step}.parquet",
            setting="log_completions=True",
            form="Parquet",
            recognized_by=frozenset({"step", "prompt", "completion", "advantage"}),
            fields={"step": "step"},
            lacks="TRL's table of completions holds text, rewards and one advantage per row, and no log-prob of a "
            "token; no setting of TRL makes it write them",
            instead=_WRITE_IT,
            layout="text; only step is taken: the weights that sum the reward functions are not in the file",
        ),
    ),
)

PRIME_RL = Framework(
    name="prime-rl",
    version="559b447 (0.8.0)",
    tensors={
        "response_mask": "loss_mask",
        "rollout_log_prob": "inference_logprobs",
        "log_prob": "trainer_logprobs",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="token_exports",
            files="{output_dir}/token_exports/step_{step}/rank_{rank}.jsonl",
            setting="trainer.enable_token_export = true",
            form="JSONL",
            recognized_by=frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}),
            fields={
                "step": "step",
                "sequence_id": "rank, export_sequence_idx",
                "prompt_ids": "token_ids",
                "response_ids": "token_ids",
                "response_mask": "loss_mask, rl_weights, ref_kl_weights",
                "rollout_log_prob": "inference_logprobs",
                "log_prob": "trainer_logprobs",
                "advantages": "advantages",
            },
            layout="prompt and response in one row: the response begins at the first true of loss_mask; tokens that "
            "the policy did not sample (weights of neither rl nor ref_kl) are masked; there is no π_old",
        ),
        Dump(
            name="traces",
            files="{output_dir}/rollouts/step_{step}/{train,eval}/{all,effective}/traces.jsonl",
            setting="always written",
            form="JSONL",
            recognized_by=frozenset({"traces", "env", "errors"}),
            lacks="prime-rl's traces.jsonl holds episodes of the orchestrator, and no log-prob of the trainer",
            instead="set trainer.enable_token_export = true, and read {output_dir}/token_exports/step_*/rank_*.jsonl",
            layout="nothing is taken",
        ),
    ),
)

SLIME = Framework(
    name="slime",
    version="624b824 (0.3.1)",
    tensors={
        "response_mask": "loss_masks",
        "rollout_log_prob": "rollout_log_probs",
        "old_log_prob": "log_probs",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="train_data",
            files="{dump_details}/train_data/{rollout_id}.pt",
            setting="--dump-details DIR, or --save-debug-train-data PATH",
            form="torch.save",
            recognized_by=frozenset({"tokens", "response_lengths", "loss_masks"}),
            fields={
                "step": "rollout_id",
                "sequence_id": "sample_index",
                "prompt_ids": "tokens",
                "response_ids": "tokens",
                "response_mask": "loss_masks",
                "rollout_log_prob": "rollout_log_probs",
                "old_log_prob": "log_probs",
                "reward": "raw_reward",
                "advantages": "advantages",
                "kept_ids": "rollout_top_p_token_ids",
                "kept_offsets": "rollout_top_p_token_offsets",
            },
            recorded_with={
                "rollout_log_prob": "let the generate function fill Sample.rollout_log_probs, as slime's own does",
                "old_log_prob": "train with a policy loss",
            },
            layout="the last response_lengths tokens are the response; the other columns have its length. With "
            "--use-rollout-logprobs and several updates per rollout, log_probs are those of the update (π_θ)",
        ),
        Dump(
            name="rollout_data",
            files="{dump_details}/rollout_data/{rollout_id}.pt",
            setting="--dump-details DIR, or --save-debug-rollout-data PATH",
            form="torch.save",
            recognized_by=frozenset({"tokens", "response_length", "loss_mask"}),
            fields={
                "step": "rollout_id",
                "sequence_id": "index",
                "group_id": "group_index",
                "prompt_ids": "tokens",
                "response_ids": "tokens",
                "response_mask": "loss_mask",
                "rollout_log_prob": "rollout_log_probs",
                "reward": "reward",
                "kept_ids": "rollout_top_p_token_ids",
                "kept_offsets": "rollout_top_p_token_offsets",
            },
            lacks="slime's dump of rollouts holds the sampler's log-probs, and none of the trainer",
            instead="use --dump-details DIR or --save-debug-train-data PATH, and read the train_data files",
            layout="the last response_length tokens are the response; a reward that is a dictionary is not taken",
        ),
    ),
)

SKYRL = Framework(
    name="SkyRL",
    version="0.3.0",
    tensors={
        "response_mask": "loss_mask",
        "rollout_log_prob": "rollout_logprobs",
        "old_log_prob": "action_log_probs",
        "token_rewards": "rewards",
        "advantages": "advantages",
    },
    dumps=(
        Dump(
            name="dumped_data",
            files="{export_path}/dumped_data/global_step_{step}_training_input.pkl",
            setting="trainer.dump_data_batch=true",
            form="pickle",
            recognized_by=frozenset({"sequences", "attention_mask", "response_mask", "loss_mask"}),
            fields={
                "step": "{step} in the name of the file",
                "prompt_ids": "sequences",
                "response_ids": "sequences",
                "response_mask": "loss_mask",
                "rollout_log_prob": "rollout_logprobs",
                "old_log_prob": "action_log_probs",
                "advantages": "advantages",
            },
            recorded_with={
                "rollout_log_prob": "set generator.sampling_params.logprobs=1",
                "old_log_prob": "use a loss or a trainer.algorithm.off_policy_correction that reads π_old: where "
                "nothing does, SkyRL leaves out the forward pass",
            },
            layout="tensors of a batch: the last tokens of attention_mask, as many as response_mask has, are the "
            "response; the other columns are taken where response_mask is 1; rows that only pad the batch are left out",
        ),
        Dump(
            name="dumped_evals",
            files="{export_path}/dumped_evals/global_step_{step}_evals/*.jsonl",
            setting="trainer.dump_eval_results=true",
            form="JSONL",
            recognized_by=frozenset({"input_prompt", "output_response", "score"}),
            lacks="SkyRL's dump of an evaluation holds text and scores, and no log-prob of a token",
            instead="set trainer.dump_data_batch=true, and read {export_path}/dumped_data/*.pkl",
            layout="nothing is taken",
        ),
    ),
)

FRAMEWORKS: tuple[Framework, ...] = (VERL, TRL, PRIME_RL, SLIME, SKYRL)
"""The frameworks with known dumps."""

# Further spellings in users' own files.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "rollout_log_prob": ("rollout_logprob", "sampling_logprobs", "sampler_logprobs", "behavior_logprobs"),
    "old_log_prob": ("old_logprobs", "old_logprob", "prox_logp", "proximal_logprobs", "train_log_probs"),
    "log_prob": ("logprobs", "train_logprobs"),
    "response_mask": ("action_mask", "completion_mask"),
    "reward": ("rewards", "score"),
}


def recognize(names: Collection[str], *, form: str) -> tuple[Framework, Dump] | None:
    """Return the framework and dump of a file with these names, or `None` if the file is unknown."""
    known = [(framework, dump) for framework in FRAMEWORKS for dump in framework.dumps if dump.form == form]
    return next((found for found in known if found[1].recognized_by.issubset(names)), None)


_FORMS = {".parquet": "Parquet", ".pt": "torch.save", ".pkl": "pickle"}
_SHOWN_FIELDS = 30


def parse_column_names(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts such as `rollout_log_prob=rollout_logprobs,old_log_prob=lp`.

    Returns:
        Column of the log → name in the file.

    Raises:
        ValueError: a text has a different form, the left side is no column, or a name is given twice.
    """
    names: dict[str, str] = {}
    for text in (part.strip() for joined in texts for part in joined.split(",")):
        ours, equals, theirs = (part.strip() for part in text.partition("="))
        if not (ours and equals and theirs):
            raise ValueError(f"columns {text[:80]!r} is not of the form OUR_NAME=THEIR_NAME[,…]")
        if ours not in COLUMNS and theirs in COLUMNS:
            raise ValueError(f"columns {text[:80]!r}: our name stands on the left; write {theirs}={ours[:40]}")
        if ours in names:
            raise ValueError(f"columns: {ours} is given twice, as {names[ours][:40]} and as {theirs[:40]}")
        names[ours] = theirs
    check_column_names(names)
    return names


def columns_of_fields(fields: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Map each field of a file to a column of the log. A field that `names` maps is not read under its own name."""
    columns = {field: column for column, field in names.items()}
    ours = (field for field in fields if field in COLUMNS or field.startswith(OWN_PREFIX))
    own = {field: field for field in ours if field not in columns and field not in names}
    return own | {field: columns[field] for field in fields if field in columns}


def missing_column(columns: Sequence[str], batch: RolloutBatch, source: LogSource, *, so: str = "") -> RolloutLogError:
    """Build the error for a file without any of the required columns. It contains the file's columns and the fix.

    Args:
        columns: the columns, of which at least one is required.
        batch: the first rows of the file.
        source: the reader of the file.
        so: the consequence, in a few words; defaults to an empty text.
    """
    file = batch.file or ""
    fields = source.fields(Path(file))
    form = next((form for ending, form in _FORMS.items() if file.endswith(ending)), "JSONL")
    known = recognize(fields, form=form)
    if known is not None:
        framework, dump = known
        whose = f"{framework.name}'s {dump.name} (read at {framework.version})"
        if dump.lacks and not any(column in dump.fields for column in columns):
            return log_error("missing", f"{dump.lacks} (read at {framework.version})", fix=dump.instead, file=file)
        for column in columns:
            if column in dump.fields:
                fix = dump.recorded_with.get(column, "")
                return log_error("missing", f"{dump.fields[column]} is not recorded in {whose}{so}", fix=fix, file=file)

    # A log of this library contains every column, with null if it is not recorded.
    recorded = [field for field in fields if field not in COLUMNS or (field in batch.columns and batch.has(field))]
    recorded = [field for field in recorded if field != "schema_version"]
    near = near_names(columns, [field for field in recorded if field not in source.names.values()])
    found = ", ".join(near[column] for column in columns if column in near)
    if not found and any("rollout_corr/" in field for field in fields):
        fix = "give a rollout log; `rollcorr report RUN` and `rollcorr watch RUN` read metrics"
        return log_error("missing", "these are the metrics of steps, without tokens", fix=fix, file=file)

    shown = found or ", ".join(recorded[:_SHOWN_FIELDS])[:600] or "no columns"
    title = f"no column {' or '.join(columns)}{so}; the file has {shown}"

    option = ",".join(f"{column}={field}" for column, field in near.items()) if found else f"{columns[0]}=THEIR_NAME"
    fix = f"use --columns {option}"
    if not found:
        fix += ", if one of them holds it. Otherwise score the tokens, and log that too"
    return log_error("missing", title, fix=fix, file=file)


def near_names(columns: Sequence[str], fields: Sequence[str]) -> dict[str, str]:
    """Map columns of the log to similar fields: the missing columns, and the columns that a framework names."""
    free = [field for field in fields if field not in COLUMNS]
    found: dict[str, str] = {}
    for column in (*columns, *(name for name in COLUMNS if name not in columns)):
        # One match for the missing columns is enough.
        if column in fields or (column in columns and any(other in found for other in columns)):
            continue
        tensors = [framework.tensors[column] for framework in FRAMEWORKS if column in framework.tensors]
        names = [name for name in (*tensors, *_OTHER_NAMES.get(column, ())) if name in free]
        if not names and column in columns:
            names = get_close_matches(column, free, n=1, cutoff=0.8)
        if names:
            found[column] = names[0]
            free.remove(names[0])
    return found
