"""The engine around vLLM, with a stand-in for vLLM: the contract, kept sets, faults, and weights that do not arrive."""

import dataclasses
import math
import os
import sys
from contextlib import closing

import fake_vllm
import pytest
import torch
from engine_contract import NEW_TOKENS, PROMPTS, EngineContract, change
from vllm_doubles import InProcess, use_in_process

from rollcorr.config import SamplingSpec
from rollcorr.core.logprobs import kept_log_prob
from rollcorr.engines.base import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    GenerationSettings,
    WeightSyncError,
)
from rollcorr.engines.response_scoring import response_logits, score_responses
from rollcorr.engines.row_seeds import row_seed
from rollcorr.engines.vllm.offline import VllmEngine, VllmOptions

TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "logprobs": "processed"}


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    use_in_process(monkeypatch)


def make_engine(policy, *, cls=VllmEngine, sampling=None, tokens=NEW_TOKENS, **options):
    return cls(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(**(sampling or {})),
            max_new_tokens=tokens,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        VllmOptions(**{"dtype": "float32", **options}),
    )


class Forgetful(VllmEngine):
    """Load all parameters of the policy but one, which keeps its first value."""

    forgotten = None

    def _load(self, version):
        if self.forgotten is not None:
            from safetensors.torch import load_file, save_file

            file = self._folder / "model.safetensors"
            save_file({**load_file(file), self.forgotten: self.old[self.forgotten]}, file)
        super()._load(version)


class TestVllm(EngineContract):
    name = "vllm"
    noise = rescoring_noise = 1e-4

    def make(self, policy, cls=VllmEngine):
        return make_engine(policy, cls=cls)

    def forgetful(self, policy, parameter):
        engine = self.make(policy, Forgetful)
        engine.old = dict(engine.export_weights())
        engine.forgotten = parameter
        return engine


def logits_of(policy, tokens):
    with torch.no_grad():
        return response_logits(policy.model, tokens)


def test_kept_sets_replay_to_the_log_probs_that_the_engine_told(micro_policy):
    rollout = make_engine(micro_policy, sampling=TRUNCATED).generate(PROMPTS, seed=0)
    tokens, mask = rollout.tokens, rollout.tokens.response_mask
    assert rollout.kept.offsets.diff().max() <= 5
    replayed, outside = kept_log_prob(
        logits_of(micro_policy, tokens), tokens.response_ids, rollout.kept.padded(mask), temperature=0.7
    )
    assert not outside[mask].any()
    torch.testing.assert_close(replayed[mask], rollout.rollout_log_prob[mask], atol=1e-5, rtol=0)
    assert rollout.raw_log_prob is None


def test_raw_log_probs_of_a_truncated_sampler_are_of_the_whole_vocabulary(micro_policy):
    rollout = make_engine(micro_policy, sampling={**TRUNCATED, "logprobs": "raw"}).generate(PROMPTS, seed=0)
    mask = rollout.tokens.response_mask
    with torch.no_grad():
        expected = score_responses(micro_policy.model, rollout.tokens).log_prob
    torch.testing.assert_close(rollout.rollout_log_prob[mask], expected[mask], atol=1e-5, rtol=0)
    assert torch.equal(rollout.raw_log_prob, rollout.rollout_log_prob)
    assert rollout.kept is None


def test_logits_that_tie_at_the_boundary_are_all_kept(micro_policy):
    with torch.no_grad():  # five of nine tokens are equally likely, the rest have probability 0
        micro_policy.model.get_input_embeddings().weight.zero_()
    engine = make_engine(micro_policy, sampling={"top_k": 3, "logprobs": "processed"})
    with pytest.raises(EngineAnswerError, match=r"17 ids that vLLM kept have a mass of 0\.06.* tie at the 3-th place"):
        engine.generate(PROMPTS, seed=0)


def test_scoring_at_a_temperature_renormalizes(micro_policy):
    engine = make_engine(micro_policy, sampling={"temperature": 0.5, "logprobs": "processed"})
    tokens = engine.generate(PROMPTS, seed=0).tokens
    mask = tokens.response_mask
    with torch.no_grad():
        expected = score_responses(micro_policy.model, tokens, temperature=0.5).log_prob
    torch.testing.assert_close(engine.score(tokens)[mask], expected[mask], atol=1e-5, rtol=0)


def test_a_worker_that_dies_is_started_again_and_gives_the_same_tokens(micro_policy):
    engine = make_engine(micro_policy)
    engine.update_weights(micro_policy.model, version=4)
    expected = engine.generate(PROMPTS, seed=0)
    InProcess.dies = 1
    again = engine.generate(PROMPTS, seed=0)
    assert torch.equal(again.tokens.response_ids, expected.tokens.response_ids)
    assert again.sampling == expected.sampling
    assert InProcess.started == 2


def test_a_worker_that_keeps_dying_is_an_error_and_the_engine_recovers_later(micro_policy):
    engine = make_engine(micro_policy)
    InProcess.dies = 2
    with pytest.raises(EngineUnavailableError, match="died when asked to generate"):
        engine.generate(PROMPTS, seed=0)
    assert len(engine.generate(PROMPTS, seed=0).tokens) == len(PROMPTS)


def test_no_restart_is_made_when_none_is_allowed(micro_policy):
    engine = make_engine(micro_policy, restarts=0)
    InProcess.dies = 1
    with pytest.raises(EngineUnavailableError):
        engine.generate(PROMPTS, seed=0)
    engine.restart()
    assert len(engine.generate(PROMPTS, seed=0).tokens) == len(PROMPTS)


def test_the_old_head_of_a_tied_model_is_caught_at_the_start(micro_policy, monkeypatch):
    monkeypatch.setattr("rollcorr.engines.vllm.weight_receiver.repack_output_head", lambda model: None)
    with pytest.raises(WeightSyncError, match=r"weight sync incomplete.*check tied and renamed ones"):
        make_engine(micro_policy, dtype="bfloat16")


def test_an_environment_without_vllm_is_named_with_the_extra(micro_policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineUnavailableError, match=r"vLLM did not start.*runs in /envs/9/python, .*rollcorr\[vllm\]"):
        make_engine(micro_policy, python="/envs/9/python")


class HalfLoaded(fake_vllm.LLM):
    """Its second reload fails half-way."""

    reloads = 0

    def collective_rpc(self, method, args=()):
        self.reloads += 1
        if self.reloads == 2:
            with torch.no_grad():
                self.model.model.norm.weight.zero_()
            raise RuntimeError("shapes do not fit")
        return super().collective_rpc(method, args)


def test_a_load_that_fails_half_way_leaves_an_engine_that_samples_nothing(micro_policy, monkeypatch):
    monkeypatch.setattr(fake_vllm, "LLM", HalfLoaded)
    engine = make_engine(micro_policy)
    before = engine.generate(PROMPTS, seed=0)
    change(micro_policy)
    with pytest.raises(WeightSyncError, match=r"weight sync incomplete, vLLM refused it: .*shapes do not fit"):
        engine.update_weights(micro_policy.model, version=1)
    for use in (lambda: engine.generate(PROMPTS, seed=0), lambda: engine.score(before.tokens), engine.restart):
        with pytest.raises(EngineError, match=r"may not be used, .*shapes do not fit.*Call update_weights"):
            use()
    engine.update_weights(micro_policy.model, version=1)
    assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 1


def test_an_update_by_restart_starts_from_the_weights(micro_policy, monkeypatch):
    monkeypatch.setattr(
        "rollcorr.engines.vllm.weight_receiver.repack_output_head", lambda model: None
    )  # no weight to repack
    engine = make_engine(micro_policy, update="restart")
    change(micro_policy)
    engine.update_weights(micro_policy.model, version=1)
    assert InProcess.started == 2
    assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 1


def test_prefixes_cached_under_old_weights_must_go(micro_policy, monkeypatch):
    engine = make_engine(micro_policy)
    monkeypatch.setattr(fake_vllm.LLM, "reset_prefix_cache", lambda llm: False)
    with pytest.raises(WeightSyncError, match="prefix cache, whose entries are of the old weights"):
        engine.update_weights(micro_policy.model, version=1)


def faulty(change_answer):
    """A worker whose answers are changed on their way."""

    class Faulty(InProcess):
        def ask(self, what, **values):
            answer = super().ask(what, **values)
            if what == "generate":
                change_answer(answer["completions"])
            return answer

    return Faulty


def lose_a_log_prob(rows):
    rows[1]["logprobs"]["content"].pop()


def lose_log_probs(rows):
    rows[1]["logprobs"] = None


def lose_a_row(rows):
    rows.pop()


def set_log_prob(value):
    def change_answer(rows):
        rows[2]["logprobs"]["content"][3]["logprob"] = value

    return change_answer


def set_field(name, value):
    def change_answer(rows):
        rows[0][name] = value

    return change_answer


@pytest.mark.parametrize(
    ("change_answer", "message"),
    [
        (lose_a_log_prob, "row 1 has 11 log_probs for 12 tokens"),
        (lose_log_probs, "row 1 has 0 log_probs for 12 tokens"),
        (lose_a_row, "answered 3 of 4 prompts"),
        (set_log_prob(math.nan), r"log_probs\[3\] of row 2 is nan"),
        (set_log_prob(None), r"log_probs\[3\] of row 2 is None"),
        (set_log_prob(-9999.0), r"log_probs\[3\] of row 2 is -9999"),
        (set_log_prob(-math.inf), r"log_probs\[3\] of row 2 is -inf"),
        (set_log_prob("0"), r"log_probs\[3\] of row 2 is '0'"),
        (set_field("finish_reason", "abort"), "row 0 ended with 'abort'"),
        (set_field("token_ids", [1] * 12), "row 0 has log-probs of the tokens"),
        (set_field("token_ids", None), "row 0 is no answer of vLLM"),
        (set_field("weight_versions", [{"version": "7", "start": 0, "end": 5}]), "do not cover its 12 tokens"),
        (set_field("weight_versions", [{"version": "new", "start": 0, "end": 12}]), "row 0 is of weights 'new'"),
    ],
)
def test_no_part_of_a_faulty_answer_is_used(micro_policy, monkeypatch, change_answer, message):
    use_in_process(monkeypatch, faulty(change_answer))
    engine = make_engine(micro_policy)
    with pytest.raises(EngineAnswerError, match=message):
        engine.generate(PROMPTS, seed=0)


def test_versions_that_change_within_a_response_are_told_by_token(micro_policy, monkeypatch):
    """A second thread updates the weights during the requests."""
    spans = [{"version": "0", "start": 0, "end": 5}, {"version": "3", "start": 5, "end": 12}]
    updates = []
    set_spans = set_field("weight_versions", spans)

    def updated_meanwhile(rows):
        set_spans(rows)
        updates.append(3)
        engine.update_weights(micro_policy.model, version=3)

    use_in_process(monkeypatch, faulty(updated_meanwhile))
    engine = make_engine(micro_policy)
    rollout = engine.generate(PROMPTS, seed=0)
    assert rollout.policy_versions[0].tolist() == [0] * 5 + [3] * 7
    assert (rollout.policy_versions[1:] == 0).all()
    assert (updates, rollout.sampling.policy_version, engine.weight_version) == ([3], 0, 3)


@pytest.mark.parametrize("label", ["default", "7"])
def test_weights_that_a_worker_was_not_given_are_refused(micro_policy, monkeypatch, label):
    use_in_process(monkeypatch, faulty(set_field("weight_versions", [{"version": label, "start": 0, "end": 12}])))
    with pytest.raises(EngineAnswerError, match=r"was restarted since|of version 7 by vLLM's own account"):
        make_engine(micro_policy).generate(PROMPTS, seed=0)


def test_a_mask_that_vllm_returns_itself_is_taken(micro_policy, monkeypatch):
    use_in_process(monkeypatch, faulty(lambda rows: [mask(row) for row in rows]))

    def mask(row):
        content = row["logprobs"]["content"]
        row["sampling_mask"] = [sorted({entry["token_id"], 7, 8}) for entry in content]
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)  # the request did not ask for more

    engine = make_engine(micro_policy, sampling=TRUNCATED, engine_args={"return_sampling_mask": True})
    rollout = engine.generate(PROMPTS, seed=0)
    first = rollout.kept.ids[: rollout.kept.offsets[1]].tolist()
    assert first == sorted({int(rollout.tokens.response_ids[0, 0]), 7, 8})


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9, "logprobs": "processed"}, "without top_k"),
        ({"min_p": 0.1, "logprobs": "processed"}, "without top_k"),
        ({"logprobs": "tempered"}, "raw or processed"),
        ({"temperature": 0.001}, r"at least 0\.01"),
        ({"logit_bias": {3: 200.0}}, "within ±100"),
    ],
)
def test_what_vllm_would_do_otherwise_is_refused(micro_policy, sampling, message):
    with pytest.raises(ValueError, match=message):
        make_engine(micro_policy, sampling=sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "max_new_tokens must be"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"update": "never"}, "update must be one of"),
        ({"timeout": 0}, "timeout must be"),
        ({"restarts": -1}, "restarts must be"),
        ({"sync_tolerance": 0.0}, "sync_tolerance must be"),
        ({"engine_args": {"logprobs_mode": "raw_logits"}}, r"\['logprobs_mode'\] are set by the engine itself"),
    ],
)
def test_bad_settings_are_refused(micro_policy, options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(micro_policy, **options)


def test_prompts_that_do_not_fit_are_refused(micro_policy):
    engine = make_engine(micro_policy, engine_args={"max_model_len": 20})
    with pytest.raises(ValueError, match=r"prompt of 9 tokens and max_new_tokens 12 .* max_model_len 20"):
        engine.generate([[1] * 9], seed=0)
    with pytest.raises(ValueError, match="prompt 1 has token id 258, outside the vocabulary 0 … 257"):
        engine.generate([[1], [258]], seed=0)


def test_equal_prompts_of_a_group_draw_apart(micro_policy):
    assert row_seed(0, 0) != row_seed(0, 1) != row_seed(1, 0)
    tokens = make_engine(micro_policy).generate([[1, 2]] * 4, seed=0).tokens.response_ids.tolist()
    assert len({tuple(row) for row in tokens}) == 4


def test_parts_of_a_batch_send_its_seeds(micro_policy, monkeypatch):
    """32 rows in one call, in 4 × 8, in 32 × 1 and on two ranks: vLLM gets one seed for each row."""
    sent = []
    complete = VllmEngine._complete
    monkeypatch.setattr(
        VllmEngine, "_complete", lambda self, rows, seeds: sent.extend(seeds) or complete(self, rows, seeds)
    )
    engine = make_engine(micro_policy, tokens=2)
    sent.clear()  # of the engine's own checks
    for size in (32, 8, 1, 16):
        for first in range(0, 32, size):
            engine.generate([[1, 2]] * size, seed=3, first_row=first)
    assert sent == [row_seed(3, row) for row in range(32)] * 4


def test_a_closed_engine_answers_nothing_and_leaves_no_folder(micro_policy):
    with closing(make_engine(micro_policy)) as engine:
        folder = engine._folder
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(EngineError, match="it was closed"):
        engine.generate(PROMPTS, seed=0)


def test_the_spec_given_is_kept_apart_from_what_the_engine_adds(micro_policy):
    engine = make_engine(micro_policy, sampling=TRUNCATED)
    assert engine.sampling.engine_version == fake_vllm.__version__
    plain = dataclasses.replace(engine.sampling, engine=None, engine_version=None, policy_version=None)
    assert plain == SamplingSpec(**TRUNCATED)


def test_a_real_worker_process_answers_and_dies_with_its_engine(micro_policy, monkeypatch, tmp_path):
    """The program itself in an interpreter of its own, with the stand-in under vLLM's name."""
    monkeypatch.undo()
    path = f"{fake_vllm.as_package(tmp_path)}:{os.environ['PYTHONPATH']}"
    with closing(
        make_engine(micro_policy, sampling=TRUNCATED, python=sys.executable, env={"PYTHONPATH": path})
    ) as engine:
        rollout = engine.generate(PROMPTS, seed=0)
        process = engine._worker._process
        assert process.poll() is None
    assert process.poll() is not None
    assert len(rollout.kept) == int(rollout.tokens.response_mask.sum())
