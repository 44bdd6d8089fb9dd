"""Dumps that other frameworks' own writers made (`recordings/record_dumps.py`), and the lines for those without."""

import hashlib
import json
import re
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import foreign_dumps as dumps
import pytest
import torch

from rollcorr.diagnostics.log_check import check_logs
from rollcorr.rollout_log import FRAMEWORKS, RolloutLogError, read_rollout_log
from rollcorr.run_directory.stored_run import BadInputError

RECORDINGS = Path(__file__).parent / "recordings"
LISTED = json.loads((RECORDINGS / "recordings.json").read_text(encoding="utf-8"))
NEMO_RL = RECORDINGS / "nemo-rl" / f"train_data_step{dumps.STEP}.jsonl"


def rows_of(path, **options):
    """Return the rows of a log as dictionaries without missing values."""
    rows = [row for batch in read_rollout_log(path, **options) for row in batch.to_rows()]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize("name", LISTED)
def test_recordings_are_as_recorded(name):
    files = {str(file.relative_to(RECORDINGS / name)) for file in (RECORDINGS / name).rglob("*") if file.is_file()}
    assert files == LISTED[name]["sha256"].keys()
    for file, digest in LISTED[name]["sha256"].items():
        assert hashlib.sha256((RECORDINGS / name / file).read_bytes()).hexdigest() == digest
    assert next(f.version for f in FRAMEWORKS if f.name.lower() == name).split()[0] in LISTED[name]["commit"]


COMPLETE = {
    "prime-rl": "token_exports/step_3/rank_0.jsonl",
    "slime": "train_data/3.pt",
    "SkyRL": "dumped_data/global_step_3_training_input.pkl",
    "verl": "with_lines/3.jsonl",
}


@pytest.mark.parametrize("name", COMPLETE)
def test_recorded_dumps_with_log_probs_are_read(name):
    """verl's was recorded with the lines that `rollcorr check` prints."""
    path = RECORDINGS / name.lower() / COMPLETE[name]
    rows = rows_of(path)
    train = "log_prob" if name == "prime-rl" else "old_log_prob"
    for i, row in enumerate(rows):
        inside = len(dumps.RESPONSES[i])
        assert row["response_mask"][:inside] == [bool(x) for x in dumps.MASKS[i]]
        assert not any(row["response_mask"][inside:])
        assert row["rollout_log_prob"][:inside] == dumps.ROLLOUT[i]
        assert row[train][:inside] == dumps.TRAIN[i]
        assert row["step"] == dumps.STEP
    assert len(rows) == 2
    assert check_logs([path]).metrics["rollout_corr/kl"] == pytest.approx((0.25 + 0.5) / 4)


TEXTS = {
    "areal": "rollout/7/12.jsonl",
    "roll": "rollout_dump_data.step_3.jsonl",
    "roll, mock": "train/step_000003.pkl",
    "ms-swift": "completions.jsonl",
    "ms-swift, Megatron": "megatron/completions.jsonl",
    "tinker-cookbook": "train_rollout_summaries.jsonl",
    "verl": "3.jsonl",
    "trl": "completions/completions_00001.parquet",
}


@pytest.mark.parametrize("name", TEXTS)
def test_recorded_dumps_without_log_probs_are_answered_with_lines(name):
    """The same lines as for the framework's name, which another test runs."""
    framework = name.split(",")[0]
    path = RECORDINGS / framework / TEXTS[name]
    assert printed_lines(path) == printed_lines(framework)
    with pytest.raises(BadInputError, match="no log-prob"):
        check_logs([path])


def test_columns_of_nemo_rl_by_hand():
    rows = rows_of(NEMO_RL)
    for i in range(2):
        assert rows[i] == {
            "step": dumps.STEP,
            "sequence_id": str(i),
            "prompt_ids": dumps.PROMPTS[i],
            "response_ids": dumps.RESPONSES[i],
            "response_mask": [bool(x) for x in dumps.MASKS[i]],
            "rollout_log_prob": dumps.ROLLOUT[i],
            "old_log_prob": dumps.TRAIN[i],
            "reward": dumps.REWARDS[i],
            "advantages": dumps.ADVANTAGES[i],
        }
    assert rows[2]["response_mask"] == [False, False]
    assert "reward" not in rows[2]


@pytest.mark.parametrize("path", [NEMO_RL, NEMO_RL.parent], ids=["file", "directory"])
def test_check_of_nemo_rl_needs_no_option(path):
    metrics = check_logs([path]).metrics
    assert metrics["rollout_corr/token_count"] == 4
    assert metrics["rollout_corr/kl"] == pytest.approx((0.25 + 0.5) / 4)


def test_nemo_rl_rows_without_loss_change_no_metric(tmp_path):
    """The last row of the recording has sample_loss_mask 0, other log-probs, another reward and other advantages."""
    lines = NEMO_RL.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / NEMO_RL.name).write_text("".join(lines[:2]), encoding="utf-8")
    assert check_logs([tmp_path / NEMO_RL.name]).metrics == pytest.approx(check_logs([NEMO_RL]).metrics, nan_ok=True)


def test_own_logs_with_names_of_dumps_are_read(tmp_path):
    for name in ("completions.jsonl", "val_data_step3.jsonl", "other.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "rollout_log_prob": [-1.0]}\n', encoding="utf-8")
    assert len(rows_of(tmp_path)) == 3


def nemo_rl_changed(folder, **changes):
    """Write the recording's first row with other values."""
    row = json.loads(NEMO_RL.read_text(encoding="utf-8").splitlines()[0])
    (folder / NEMO_RL.name).write_text(json.dumps(row | changes) + "\n", encoding="utf-8")
    return folder / NEMO_RL.name


def test_zeros_of_nemo_rl_are_not_log_probs(tmp_path):
    """With force_on_policy_ratio it skips the forward pass of the old policy."""
    with pytest.raises(BadInputError, match=r"prev_logprobs is not recorded.*force_on_policy_ratio=false"):
        check_logs([nemo_rl_changed(tmp_path, prev_logprobs=[[0.0] * 8])])
    (certain,) = rows_of(nemo_rl_changed(tmp_path, prev_logprobs=[[0.0, -3.0, *[0.0] * 6]]))
    assert certain["old_log_prob"] == [0.0, 0.0], "a forward pass with certain tokens"


def test_dynamic_sampling_of_nemo_rl_logs_filtered_rewards(tmp_path):
    (row,) = rows_of(nemo_rl_changed(tmp_path, filtered_rewards=[0.5], rewards=[7.0]))
    assert row["reward"] == 0.5
    beyond = {name: [] for name in ("token_loss_mask", "prev_logprobs", "generation_logprobs", "sample_loss_mask")}
    assert rows_of(nemo_rl_changed(tmp_path, rewards=[7.0], **beyond)) == [{"step": dumps.STEP}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prev_logprobs": [[-1.0]]}, "prev_logprobs has 1 values for 8 tokens"),
        ({"generation_logprobs": "x"}, "generation_logprobs is a NoneType, not a list"),
        ({"input_lengths": [9]}, "input_lengths is 9 for 8 tokens with padding"),
    ],
)
def test_broken_rows_of_nemo_rl_are_errors(changes, message, tmp_path):
    with pytest.raises(RolloutLogError, match=message):
        rows_of(nemo_rl_changed(tmp_path, **changes))


def test_known_dumps_take_no_other_names():
    with pytest.raises(RolloutLogError, match="leave out --columns"):
        rows_of(NEMO_RL, column_names={"rollout_log_prob": "generation_logprobs"})


def test_conversations_of_nemo_rl_name_the_other_file():
    with pytest.raises(BadInputError, match=r"no log-prob of a token.*read the train_data_step"):
        check_logs([NEMO_RL.with_name(f"val_data_step{dumps.STEP}.jsonl")])


def padded(rows, *, before=0):
    """Return rows as (B, T), padded on the right, with zeros for a prompt before them."""
    rows = [torch.tensor([0.0] * before + [float(value) for value in row]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def in_verl(folder):
    batch = {"response_mask": padded(dumps.MASKS), "rollout_log_probs": padded(dumps.ROLLOUT)}
    batch["old_log_probs"] = padded(dumps.TRAIN)
    return {"batch": SimpleNamespace(batch=batch), "reward_extra_infos_dict": {}}


def in_areal(folder):
    """Log-probs of the sampler are at their token; those of the trainer and the mask are one position earlier."""
    data = {"logprobs": padded(dumps.ROLLOUT, before=2), "prox_logp": padded(dumps.TRAIN, before=1)}
    data["prox_logp"] = torch.nn.functional.pad(data["prox_logp"], (0, 1))
    loss_mask = torch.nn.functional.pad(padded(dumps.MASKS, before=1), (0, 1))
    torch_of_one_rank = SimpleNamespace(roll=torch.roll, distributed=SimpleNamespace(get_rank=lambda: 0))
    engine = SimpleNamespace(get_version=lambda: dumps.STEP)
    return {"data": data, "loss_mask": loss_mask, "torch": torch_of_one_rank, "self": SimpleNamespace(engine=engine)}


def in_roll(folder):
    """The mask covers the whole sequence; log-probs begin at its second token."""
    batch = {"response_mask": padded(dumps.MASKS, before=2), "infer_logprobs": padded(dumps.ROLLOUT, before=1)}
    batch["old_log_probs"] = padded(dumps.TRAIN, before=1)
    return {"batch": SimpleNamespace(batch=batch), "global_step": dumps.STEP}


def parts(mask, rollout, train):
    """Return one object per sequence, with tensors (1, T) of these names."""
    columns = zip(dumps.MASKS, dumps.ROLLOUT, dumps.TRAIN, strict=True)
    rows = [[torch.tensor([values]) for values in row] for row in columns]
    return [SimpleNamespace(**dict(zip((mask, rollout, train), row, strict=True))) for row in rows]


def in_openrlhf(folder):
    return {
        "experiences": parts("action_mask", "rollout_log_probs", "action_log_probs"),
        "global_step": dumps.STEP,
    }


def in_ms_swift(folder):
    batches = parts("completion_mask", "rollout_per_token_logps", "old_per_token_logps")
    state, accelerator = SimpleNamespace(global_step=dumps.STEP), SimpleNamespace(process_index=0)
    return {
        "batch_encoded_inputs": [{"grpo_batch": batch} for batch in batches],
        "self": SimpleNamespace(state=state, accelerator=accelerator),
    }


def in_tinker(folder):
    """Every list is one shorter than the sequence, and its prompt is masked."""

    def datum(mask, rollout):
        inputs = {"mask": [0.0, *map(float, mask)], "logprobs": [0.0, *rollout]}
        held = {name: SimpleNamespace(to_torch=lambda v=values: torch.tensor(v)) for name, values in inputs.items()}
        return SimpleNamespace(loss_fn_inputs=held)

    data = [datum(mask, rollout) for mask, rollout in zip(dumps.MASKS, dumps.ROLLOUT, strict=True)]
    trained = [torch.tensor([-11.0, *row]) for row in dumps.TRAIN]
    return {"data_D": data, "training_logprobs_D": trained, "i_batch": dumps.STEP}


LAYOUTS = {
    "verl": in_verl,
    "AReaL": in_areal,
    "ROLL": in_roll,
    "OpenRLHF": in_openrlhf,
    "ms-swift": in_ms_swift,
    "tinker-cookbook": in_tinker,
}


def printed_lines(path):
    """Return the lines that `rollcorr check` prints for a dump, or for the name of a framework."""
    with pytest.raises(BadInputError, match="add to ") as error:
        check_logs([path])
    return dedent("\n".join(re.findall(r"^    .*$", str(error.value), re.MULTILINE)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_printed_lines_log_both_log_probs(name, tmp_path, monkeypatch):
    """On tensors in the layout of the framework's training step. tests/integrations runs those for TRL."""
    monkeypatch.chdir(tmp_path)
    names = LAYOUTS[name](tmp_path)
    exec(printed_lines(name.lower()), names)
    if name == "verl":
        (tmp_path / "rollouts").mkdir()
        plain = {"input": ["2+2="] * 2, "output": ["4"] * 2, "score": dumps.REWARDS, "step": [dumps.STEP] * 2}
        columns = plain | {column: values.tolist() for column, values in names["reward_extra_infos_dict"].items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        (tmp_path / "rollouts" / "3.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    metrics = check_logs(["rollouts"]).metrics
    assert metrics["rollout_corr/token_count"] == 4
    assert metrics["rollout_corr/kl"] == pytest.approx((0.25 + 0.5) / 4)
    assert {row["step"] for row in rows_of("rollouts")} == {dumps.STEP}


def test_a_folder_without_a_log_is_answered_with_the_frameworks(tmp_path):
    with pytest.raises(BadInputError, match=r"how a framework writes one: rollcorr check verl\|TRL\|.*\|OpenRLHF\|"):
        check_logs([tmp_path])
    with pytest.raises(BadInputError, match=r"train_data has both log-probs.*train_data_step\{step\}.jsonl"):
        check_logs(["NeMo-RL"])


def test_every_framework_has_a_recording_or_tested_lines():
    complete = {f.name.lower() for f in FRAMEWORKS if any(d.fields and not d.lacks for d in f.dumps)}
    assert complete <= LISTED.keys()
    assert {f.name for f in FRAMEWORKS if f.lines} == {*LAYOUTS, "TRL"}
    assert complete | {f.name.lower() for f in FRAMEWORKS if f.lines} == {f.name.lower() for f in FRAMEWORKS}
