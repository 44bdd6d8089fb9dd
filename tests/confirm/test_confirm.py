"""`confirm`: faults made by other code than the variants, healthy rows, interrupts and bad input."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.config.documents import BadInputError
from rollcorr.confirm import confirm
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

ROWS, TOKENS, PROMPT, VOCABULARY = 10, 32, 6, 48


def make_model(seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=1,
        **options,
    )
    return LlamaForCausalLM(config).eval()


def step_logits(model, prompts, drawn):
    return model(input_ids=torch.cat([prompts, drawn], 1)).logits[:, -1].float()


@torch.no_grad()
def rows_of(model, process=None, context=None, seed=0, prompts_of=lambda prompts: prompts):
    """Sample rows token by token, with one processor of transformers; return rows with both log-probs."""
    draw = torch.Generator().manual_seed(seed)
    prompts = prompts_of(torch.randint(2, VOCABULARY, (ROWS, PROMPT), generator=draw))
    seen = prompts if context is None else context(prompts)
    drawn = torch.empty(ROWS, 0, dtype=torch.int64)
    sampler, trainer = [], []
    for _ in range(TOKENS):
        logits = step_logits(model, seen, drawn)
        if process is not None:
            logits = process(torch.cat([seen, drawn], 1), logits)
        token = torch.multinomial(logits.softmax(-1), 1, generator=draw)
        sampler.append(logits.log_softmax(-1).gather(1, token))
        trainer.append(step_logits(model, prompts, drawn).log_softmax(-1).gather(1, token))
        drawn = torch.cat([drawn, token], 1)
    columns = {
        "prompt_ids": prompts,
        "response_ids": drawn,
        "rollout_log_prob": torch.cat(sampler, 1),
        "old_log_prob": torch.cat(trainer, 1),
    }
    return [{"step": 3, **{name: values[row].tolist() for name, values in columns.items()}} for row in range(ROWS)]


def write(folder, rows):
    with RolloutLogWriter(folder / "log.parquet") as log:
        log.write(RolloutBatch.from_rows(rows))
    return folder / "log.parquet"


def swap(rows):
    return [{**row, "rollout_log_prob": row["old_log_prob"], "old_log_prob": row["rollout_log_prob"]} for row in rows]


FAULTS = {
    "temperature 0.7": {"process": TemperatureLogitsWarper(0.7)},
    "top-p 0.8": {"process": TopPLogitsWarper(0.8)},
    "repetition penalty 1.2": {"process": RepetitionPenaltyLogitsProcessor(1.2)},
    "BOS": {"context": lambda prompts: torch.cat([torch.ones(len(prompts), 1, dtype=torch.int64), prompts], 1)},
}


@pytest.mark.parametrize("side", ["sampler", "trainer"])
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named_on_its_side(tmp_path, name, side):
    model = make_model()
    rows = rows_of(model, **FAULTS[name])
    result = confirm(write(tmp_path, rows if side == "sampler" else swap(rows)), model)
    assert result.cause == f"{side}: {name}"
    found = result.sides[side]
    assert found.removed[name] >= 0.9
    assert found.removed[name] == max(found.removed.values())
    assert all(found.gaps[name] < gap for other, gap in found.gaps.items() if other != name)


@pytest.mark.parametrize("side", ["sampler", "trainer"])
@pytest.mark.parametrize(
    ("whose", "context"),
    [
        ("first", lambda prompts: prompts[:1].expand_as(prompts)),
        ("previous", lambda prompts: prompts.roll(1, 0)),
        ("next", lambda prompts: prompts.roll(-1, 0)),
    ],
)
def test_the_context_of_another_row_is_named(tmp_path, whose, context, side):
    model = make_model()
    rows = rows_of(model, context=context)
    result = confirm(write(tmp_path, rows if side == "sampler" else swap(rows)), model)
    name = f"{whose} row's prompt"
    assert result.cause == f"{side}: {name}"
    assert result.sides[side].removed[name] >= 0.9


TEMPLATES = {
    "with BOS": "{{ bos_token }}{% for m in messages %}<user> {{ m['content'] }} <end>{% endfor %}",
    "without BOS": "{% for m in messages %}<user> {{ m['content'] }} <end>{% endfor %}",
    "with a last newline": "{% for m in messages %}<user> {{ m['content'] }} <end>\n{% endfor %}",
}


def make_tokenizer(template):
    """A tokenizer of words w2 … that adds BOS, as Llama's does, and has a chat template."""
    words = ["<unk>", "<s>", "<user>", "<end>", "\n", *(f"w{n}" for n in range(5, VOCABULARY))]
    text = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text, bos_token="<s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<end>", "\n"]})
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@pytest.mark.parametrize("side", ["sampler", "trainer"])
@pytest.mark.parametrize("logged", ["plain", "chat"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_of_one_side_is_named(tmp_path, template, logged, side):
    """One side gets the template, and the other the text with BOS, as `tokenizer(text)` returns it."""
    model, tokenizer = make_model(), make_tokenizer(template)
    texts = [" ".join(f"w{5 + (7 * row + 3 * n) % 40}" for n in range(PROMPT)) for row in range(ROWS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = {
        "plain": torch.tensor(tokenizer(texts)["input_ids"]),
        "chat": torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]),
    }
    other = prompts["chat" if logged == "plain" else "plain"]
    rows = rows_of(model, prompts_of=lambda drawn: prompts[logged], context=lambda drawn: other)
    result = confirm(write(tmp_path, rows if side == "sampler" else swap(rows)), model, tokenizer=tokenizer)
    assert result.cause == f"{side}: chat template"
    assert result.sides[side].removed["chat template"] >= 0.9


def test_logits_that_are_not_shifted_are_named(tmp_path):
    model = make_model()
    rows = rows_of(model)
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
            logits = model(input_ids=ids).logits[0, PROMPT:].log_softmax(-1)
            row["old_log_prob"] = logits.gather(-1, ids[0, PROMPT:, None])[:, 0].tolist()
    assert confirm(write(tmp_path, rows), model).cause == "trainer: logits not shifted"


def test_dropout_of_the_trainer_is_named(tmp_path):
    rows = rows_of(make_model())
    noisy = make_model(attention_dropout=0.3).train()
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
            logits = noisy(input_ids=ids).logits[0, PROMPT - 1 : -1].log_softmax(-1)
            row["old_log_prob"] = logits.gather(-1, ids[0, PROMPT:, None])[:, 0].tolist()
    result = confirm(write(tmp_path, rows), noisy)
    assert result.cause == "trainer: evaluation mode, one row at a time"
    assert "look for dropout" in result.verdict
    removed = result.sides["trainer"].removed
    assert removed["plain"] == max(removed.values()) >= 0.9


def test_other_weights_are_unknown(tmp_path):
    model, other = make_model(), make_model(seed=1)
    rows = rows_of(model)
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
            logits = other(input_ids=ids).logits[0, PROMPT - 1 : -1].log_softmax(-1)
            row["old_log_prob"] = logits.gather(-1, ids[0, PROMPT:, None])[:, 0].tolist()
    result = confirm(write(tmp_path, rows), other)
    assert result.cause is None
    assert result.verdict.startswith("unknown: the trainer agrees")


def test_without_a_fault_nothing_is_named(tmp_path):
    model = make_model()
    result = confirm(write(tmp_path, rows_of(model)), model)
    assert result.cause is None
    assert result.verdict.startswith("no mismatch")


def test_an_interrupt_keeps_the_scored_rows(tmp_path):
    model = make_model()
    log = write(tmp_path, rows_of(model, **FAULTS["temperature 0.7"]))

    def stop(rows, total):
        raise KeyboardInterrupt

    result = confirm(log, model, on_rows=stop)
    assert (result.rows, result.complete, result.cause) == (1, False, "sampler: temperature 0.7")


def test_bad_input_is_named(tmp_path):
    model = make_model()
    rows = rows_of(model)
    log = write(tmp_path, rows)
    with pytest.raises(BadInputError, match="choose others with --steps"):
        confirm(log, model, steps=(9, 10))
    with pytest.raises(BadInputError, match="rows must be at least 2, got 1"):
        confirm(log, model, rows=1)
    (tmp_path / "without").mkdir()
    for row in rows:
        del row["prompt_ids"]
    with pytest.raises(BadInputError, match="has no prompt_ids"):
        confirm(write(tmp_path / "without", rows), model)


def test_ids_that_the_model_lacks_are_named(tmp_path):
    model = make_model()
    for number, token in enumerate((-100, VOCABULARY)):
        (tmp_path / str(number)).mkdir()
        rows = rows_of(model)
        for row in rows:
            row["response_ids"][3] = token
        with pytest.raises(BadInputError, match=f"the token id {token}, and the model has the ids 0 to 47"):
            confirm(write(tmp_path / str(number), rows), model)


def test_rows_without_ids_are_left_out(tmp_path):
    model = make_model()
    rows = rows_of(model, **FAULTS["temperature 0.7"])
    rows[0]["prompt_ids"] = None
    rows[1]["response_ids"] = None
    assert confirm(write(tmp_path, rows), model, rows=ROWS).rows == ROWS - 2


def test_long_responses_are_cut(tmp_path, monkeypatch):
    model = make_model()
    rows = rows_of(model, **FAULTS["temperature 0.7"])
    for row in rows:
        row["rollout_log_prob"][TOKENS // 2 :] = row["old_log_prob"][TOKENS // 2 :]
    monkeypatch.setattr("rollcorr.confirm.confirmation.MAX_TOKENS", TOKENS // 2)
    assert confirm(write(tmp_path, rows), model).cause == "sampler: temperature 0.7"


def test_the_command_names_the_fault(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    log = write(tmp_path, rows_of(model, **FAULTS["temperature 0.7"]))
    result = CliRunner().invoke(app, ["confirm", str(log), "--model", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert "confirmed: sampler: temperature 0.7" in result.output.splitlines()[0]
    unknown = CliRunner().invoke(app, ["confirm", str(tmp_path / "no"), "--model", str(tmp_path / "model")])
    assert unknown.exit_code == 2
    assert "confirm run/rollouts --model" in CliRunner().invoke(app, ["confirm", "--help"]).output


@pytest.mark.parametrize("recorded", [True, False])
def test_a_temperature_of_both_sides_is_no_cause(tmp_path, recorded):
    """The sampler's noise exceeds that of bfloat16, so the mismatch asks for a cause."""
    model = make_model()
    rows = rows_of(model, TemperatureLogitsWarper(0.7))
    for row in rows:
        row["old_log_prob"] = [x + 0.12 * (-1) ** i for i, x in enumerate(row["rollout_log_prob"])]
        if recorded:
            row["sampling"] = {"temperature": 0.7, "logprobs": "processed"}
    result = confirm(write(tmp_path, rows), model)
    assert result.mismatch > 3 * result.noise
    assert result.cause == ("trainer: evaluation mode, one row at a time" if recorded else None)
    assert ("log `sampling`" in result.verdict) is not recorded


def test_variants_start_from_the_recorded_temperature(tmp_path):
    model = make_model()
    rows = [
        {**row, "sampling": {"temperature": 0.7, "logprobs": "processed"}}
        for row in rows_of(model, TemperatureLogitsWarper(0.7))
    ]
    result = confirm(write(tmp_path, rows), model)
    assert result.cause == "trainer: temperature 1"
    assert result.sides["sampler"].removed == {}
