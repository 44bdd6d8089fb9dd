"""The SGLang adapter: on responses of SGLang 0.5.23, on faulty responses, and on a fake server that computes.

The fake server follows SGLang's documentation for unrecorded calls: scoring given tokens, loading weights.
"""

import copy
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from engine_contract import NEW_TOKENS, PROMPTS, TRUNCATED, EngineContract, KeptSetContract, change
from local_server import serving
from micro_policy import make_micro_policy

from rollcorr import check_compatible
from rollcorr.config import SamplingSpec
from rollcorr.core.sampling import check_kept_sets, joint_support, top_k_support, top_p_support
from rollcorr.engines.base import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    GenerationSettings,
    WeightSyncError,
)
from rollcorr.engines.sglang import SglangEngine, SglangOptions

RECORDED = json.loads((Path(__file__).parent / "recordings" / "sglang_0.5.23.json").read_text(encoding="utf-8"))
RAW, TEMPERED, PROCESSED = RECORDED.values()
SPECS = {
    "raw": SamplingSpec(),
    "tempered": SamplingSpec(temperature=0.7, logprobs="tempered"),
    "processed": SamplingSpec(temperature=0.7, top_p=0.9, top_k=20, logprobs="processed"),
}
OF_KIND = dict(zip(SPECS, RECORDED.values(), strict=True))


class PretendedServer:
    """A fake server with a local model that behaves as SGLang's documentation describes."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).eval()
        self.label = "default"
        self.forgets = None
        self.refuses = None
        self.mislabels = False

    def __call__(self, handler, body):
        reply = {"/generate": self.generate, "/update_weights_from_disk": self.load}[handler.path](body)
        handler.send_json(*reply if isinstance(reply, tuple) else (reply,))

    @torch.no_grad()
    def generate(self, body):
        ids, settings = body["input_ids"], body["sampling_params"]
        if settings["max_new_tokens"] == 0:
            return self.score(ids)
        generator = torch.Generator().manual_seed(settings["sampling_seed"])
        entries, kept, over_kept, ended = [], [], [], False
        while len(entries) < settings["max_new_tokens"] and not ended:
            logits = self.model(torch.tensor([ids])).logits[0, -1] / settings["temperature"]
            support = joint_support(
                logits,
                [
                    lambda z: top_k_support(z, settings["top_k"] if settings["top_k"] > 0 else len(z)),
                    lambda z: top_p_support(z, settings["top_p"]),
                ],
            )
            inside = logits.masked_fill(~support, -torch.inf).log_softmax(-1)
            token = int(torch.multinomial(inside.exp(), 1, generator=generator))
            entries.append([float(logits.log_softmax(-1)[token]), token, None])
            kept.append(torch.where(support)[0].tolist())
            over_kept.append(float(inside[token]))
            ids = [*ids, token]
            ended = token in settings["stop_token_ids"]
        meta = {
            "finish_reason": {"type": "stop" if ended else "length"},
            "completion_tokens": len(entries),
            "output_token_logprobs": entries,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(entries)}],
        }
        if body["return_sampling_mask"]:
            meta |= {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": over_kept}
        return {"output_ids": [token for _, token, _ in entries], "meta_info": meta}

    def score(self, ids):
        log_probs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()
        entries = [[value, token, None] for value, token in zip([None, *chosen], ids, strict=True)]
        return {"meta_info": {"input_token_logprobs": entries, "weight_version": self.label}}

    @torch.no_grad()
    def load(self, body):
        if self.refuses:
            return {"success": False, "message": "shapes differ"}, self.refuses
        new = type(self.model).from_pretrained(body["model_path"], local_files_only=True)
        for name, parameter in self.model.named_parameters():
            if name != self.forgets:
                parameter.copy_(dict(new.named_parameters())[name])
        if not self.mislabels:
            self.label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}


MODEL = make_micro_policy().model  # of the recordings' vocabulary; it answers the probe


def make_engine(server, model=MODEL, **options):
    settings = {"sampling": SamplingSpec(), "max_new_tokens": 12, "eos_token_id": 256, "pad_token_id": 257}
    settings |= {name: options.pop(name) for name in settings if name in options}
    version = options.pop("version", 0)
    given = {"dtype": "float32", "engine_version": "0.5.23", "timeout": 60.0, "retries": 0}
    given = SglangOptions(url=server.url, **(given | options))
    return SglangEngine(model, GenerationSettings(**settings), given, version=version)


def replay(recorded, change=lambda answer: answer):
    """Answers each prompt as SGLang did, and the probe; `change` spoils the second row."""
    rows = {tuple(ids): row for row, ids in enumerate(recorded["request"]["input_ids"])}
    pretended = PretendedServer(MODEL)

    def answer(handler, body):
        row = rows.get(tuple(body["input_ids"]))
        if row is None:
            pretended(handler, body)
        else:
            given = copy.deepcopy(recorded["response"][row])
            handler.send_json(change(given) if row else given)

    return answer


def sent_to(server):
    """Return the sampling requests, without the requests of the probe."""
    return [body for _, body in server.requests if body["sampling_params"]["max_new_tokens"]]


def generate(kind, change=lambda answer: answer, **options):
    recorded = OF_KIND[kind]
    with serving(replay(recorded, change)) as server:
        engine = make_engine(server, sampling=SPECS[kind], **options)
        rollout = engine.generate(recorded["request"]["input_ids"], seed=0)
        return rollout, sent_to(server)


def told(recorded, name):
    return [response["meta_info"][name] for response in recorded["response"]]


@pytest.mark.parametrize("kind", SPECS)
def test_tokens_and_log_probs_are_those_of_the_recorded_answer(kind):
    recorded = OF_KIND[kind]
    rollout, _ = generate(kind)
    assert rollout.tokens.response_ids.tolist() == [response["output_ids"] for response in recorded["response"]]
    assert rollout.tokens.response_mask.all()
    if kind == "processed":
        expected = told(recorded, "output_token_sampling_logprobs")
    else:
        expected = [[entry[0] for entry in row] for row in told(recorded, "output_token_logprobs")]
    torch.testing.assert_close(rollout.rollout_log_prob, torch.tensor(expected), atol=0, rtol=0)
    assert (rollout.sampling.engine, rollout.sampling.engine_version, rollout.sampling.policy_version) == (
        "sglang",
        "0.5.23",
        0,
    )
    assert rollout.policy_versions is None


@pytest.mark.parametrize("kind", SPECS)
def test_what_is_asked_for_is_what_was_asked_for_in_the_recording(kind):
    recorded = OF_KIND[kind]["request"]
    _, requests = generate(kind)
    assert sorted(body["input_ids"] for body in requests) == sorted(recorded["input_ids"])
    for body in requests:
        for name in ("return_logprob", "return_sampling_mask"):
            assert body[name] == recorded[name]
        for name in ("max_new_tokens", "temperature", "top_p", "top_k"):
            assert body["sampling_params"][name] == recorded["sampling_params"][name]
        assert body["sampling_params"]["stop_token_ids"] == [256]
    assert len({body["sampling_params"]["sampling_seed"] for body in requests}) == 2


def test_only_temperature_1_has_raw_log_probs_beside():
    assert torch.equal(generate("raw")[0].raw_log_prob, generate("raw")[0].rollout_log_prob)
    assert generate("tempered")[0].raw_log_prob is None
    assert generate("processed")[0].raw_log_prob is None


def test_kept_sets_hold_what_was_sampled_and_their_mass_is_the_difference_of_two_kinds():
    rollout, _ = generate("processed")
    sets = [ids for row in told(PROCESSED, "output_token_sampling_mask") for ids in row]
    assert [ids.tolist() for ids in rollout.kept.ids.split(rollout.kept.offsets.diff().tolist())] == sets
    check_kept_sets(rollout.kept, tokens=24, vocabulary=258)
    for token, kept in zip(rollout.tokens.response_ids.flatten().tolist(), sets, strict=True):
        assert token in kept
    full = torch.tensor([[entry[0] for entry in row] for row in told(PROCESSED, "output_token_logprobs")])
    torch.testing.assert_close(rollout.log_kept_mass, full - rollout.rollout_log_prob, atol=1e-6, rtol=0)
    # top-p 0.9 of the full softmax, minus the share removed by top-k 20
    assert math.log(0.85) < rollout.log_kept_mass.min() < math.log(0.95)
    assert check_compatible(rollout.sampling, rollout.sampling.for_actor("replay")).verdict == "same"
    assert check_compatible(rollout.sampling, rollout.sampling.for_actor("kept_mass")).verdict == "approximate"


def labelled(label):
    """The full response from weights of one label, without spans."""

    def change(answer):
        del answer["meta_info"]["weight_versions"]
        answer["meta_info"]["weight_version"] = label
        return answer

    return change


@pytest.mark.parametrize("label", ["default", "3"])
def test_one_label_serves_where_there_are_no_spans(label):
    rollout, _ = generate("raw", labelled(label), version=3)
    assert (rollout.policy_versions, rollout.sampling.policy_version) == (None, 3)


@pytest.mark.parametrize("version", ["7", "2"])
def test_an_answer_of_weights_that_the_server_was_not_given_is_refused(version):
    with pytest.raises(EngineAnswerError, match=f"token 0 of row 1 is of version {version} by SGLang's own account"):
        generate("raw", labelled(version), version=3)
    half = [{"version": "3", "start": 0, "end": 5}, {"version": version, "start": 5, "end": 12}]
    with pytest.raises(EngineAnswerError, match=f"token 5 of row 1 is of version {version}"):
        generate("raw", meta(weight_versions=half), version=3)


def test_an_end_token_that_output_ids_leave_out_is_kept_with_its_log_prob():
    def ended(answer):
        answer["meta_info"]["output_token_logprobs"][-1] = [-0.25, 256, None]
        answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": 256}
        answer["output_ids"] = answer["output_ids"][:-1]
        return answer

    rollout, _ = generate("raw", ended)
    assert rollout.tokens.response_ids[1, -1] == 256
    assert rollout.rollout_log_prob[1, -1] == -0.25


def meta(**changes):
    def change(answer):
        answer["meta_info"] |= changes
        return answer

    return change


def entry(position, value):
    def change(answer):
        answer["meta_info"]["output_token_logprobs"][position][0] = value
        return answer

    return change


def shortened(name):
    def change(answer):
        answer["meta_info"][name] = answer["meta_info"][name][:-1]
        return answer

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shortened("output_token_logprobs"), "row 1 has 11 output_token_logprobs, for completion_tokens 12"),
        (shortened("output_token_sampling_logprobs"), "row 1 is no answer of SGLang .ValueError"),
        (shortened("output_token_sampling_mask"), "row 1 has 11 kept for 12 tokens"),
        (meta(output_token_logprobs=None), "row 1: output_token_logprobs is no list .*: None"),
        (meta(output_token_sampling_mask=None), "must know return_sampling_mask"),
        (meta(output_token_sampling_logprobs=[-9999.0] * 12), r"sampling_logprobs\[0\] of row 1 is -9999"),
        (meta(output_token_sampling_logprobs=[None] * 12), r"sampling_logprobs\[0\] of row 1 is None"),
        (meta(output_token_sampling_mask=[[]] * 12), r"kept\[0\] of row 1 is empty"),
        (meta(output_token_sampling_mask=[[999]] * 12), "is 999, no token id of the vocabulary"),
        (entry(3, None), r"output_token_logprobs\[3\] of row 1 is None"),
        (entry(3, math.nan), r"output_token_logprobs\[3\] of row 1 is nan"),
        (entry(0, -0.5), r"log_kept_mass\[0\] of row 1 is 1.4"),  # a set cannot have more than all of the mass
        (meta(finish_reason={"type": "abort", "message": "memory"}), "row 1 did not finish: .*memory.*abort"),
        (meta(finish_reason=None), "row 1 did not finish"),
        (meta(completion_tokens=11), "for completion_tokens 11"),
        (meta(weight_versions=[{"version": "default", "start": 0, "end": 9}]), "do not cover its 12 tokens"),
        (meta(weight_versions=[{"version": "default"}]), "weight_versions is"),
        (meta(weight_versions=None, weight_version="main"), "row 1 is of weights 'main', which is no policy version"),
        (lambda answer: answer | {"output_ids": [1, 2]}, r"output_ids \[1, 2\]"),
        (lambda answer: answer["meta_info"], "row 1 is no answer of SGLang"),
        (lambda answer: [answer], "row 1 is no answer of SGLang"),
    ],
)
def test_one_bad_answer_stops_the_batch_and_is_named(change, message):
    with pytest.raises(EngineAnswerError, match=message):
        generate("processed", change)


@pytest.mark.parametrize(("value", "message"), [(None, "is None"), (math.nan, "is nan"), (-9999.0, "is -9999")])
def test_a_log_prob_over_the_whole_vocabulary_is_checked_too(value, message):
    with pytest.raises(EngineAnswerError, match=rf"log_probs\[3\] of row 1 {message}"):
        generate("tempered", entry(3, value))


def test_a_server_that_fails_once_is_asked_again_and_one_that_goes_on_failing_is_unavailable():
    prompts, failed, recorded = RAW["request"]["input_ids"], defaultdict(int), replay(RAW)

    def passing(handler, body):
        row = tuple(body["input_ids"])
        failed[row] += 1
        (recorded(handler, body) if failed[row] > 1 else handler.send(500, b"busy"))

    with serving(passing) as server:
        assert len(make_engine(server, retries=1).generate(prompts, seed=0).tokens) == 2
    with (
        serving(lambda handler, body: handler.send(500, b"out of memory")) as server,
        pytest.raises(EngineUnavailableError, match="HTTP 500: out of memory"),
    ):
        make_engine(server)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.7}, "raw log-probs at temperature 1 without penalties and min_new_tokens only"),
        ({"presence_penalty": 0.5}, "raw log-probs at temperature 1 without penalties and min_new_tokens only"),
        ({"top_p": 0.9, "logprobs": "processed"}, "top_p=0.9, min_p=0 without top_k"),
        ({"temperature": 0.0, "logprobs": "tempered"}, "temperature must be > 0"),
        ({"top_k": 5, "logprobs": "processed", "support": "replayed"}, "over its own support"),
    ],
)
def test_log_probs_that_the_server_does_not_have_are_refused(sampling, message):
    with serving(replay(RAW)) as server, pytest.raises(ValueError, match=message):
        make_engine(server, sampling=SamplingSpec(**sampling))


def test_biases_and_penalties_are_sent():
    spec = SamplingSpec(logprobs="tempered", logit_bias={3: -1.5}, frequency_penalty=0.25, min_p=0.1, min_new_tokens=2)
    with serving(replay(RAW)) as server:
        make_engine(server, sampling=spec).generate(RAW["request"]["input_ids"], seed=0)
        sent = sent_to(server)[0]["sampling_params"]
    assert (sent["logit_bias"], sent["frequency_penalty"], sent["min_p"], sent["min_new_tokens"]) == (
        {"3": -1.5},
        0.25,
        0.1,
        2,
    )


def test_given_tokens_are_scored_at_temperature_1_only():
    with serving(replay(TEMPERED)) as server:
        engine = make_engine(server, sampling=SPECS["tempered"])
        tokens = engine.generate(TEMPERED["request"]["input_ids"], seed=0).tokens
        with pytest.raises(EngineError, match=r"scores given tokens at temperature 1, not 0\.7"):
            engine.score(tokens)


def test_without_a_folder_weights_are_verified_at_the_start_and_never_updated(micro_policy):
    with serving(replay(RAW)) as server:
        engine = make_engine(server)
        with pytest.raises(EngineError, match="give it a folder that the server reads too"):
            engine.update_weights(micro_policy.model, version=1)
        change(micro_policy)
        with pytest.raises(WeightSyncError, match="weight sync incomplete"):
            make_engine(server, micro_policy.model)


class TestSglangOnAPretendedServer(EngineContract, KeptSetContract):
    name = "sglang"
    noise = rescoring_noise = 1e-4
    test_tokens_are_drawn_as_often_as_their_log_probs_say = None  # they are drawn by the pretended server

    @pytest.fixture(autouse=True)
    def server(self, policy, tmp_path):
        self.tmp_path, self.pretended = tmp_path, PretendedServer(policy.model)
        with serving(self.pretended) as server:
            self.running = server
            yield

    def make(self, policy, **options):
        return make_engine(
            self.running, policy.model, max_new_tokens=NEW_TOKENS, folder=self.tmp_path / "weights", **options
        )

    def make_truncated(self, policy):
        return self.make(policy, sampling=TRUNCATED)

    def forgetful(self, policy, parameter):
        engine = self.make(policy)
        self.pretended.forgets = parameter
        return engine

    @pytest.mark.parametrize("status", [200, 400])
    def test_after_refused_weights_nothing_samples_until_an_update_is_whole(self, engine, policy, status):
        self.pretended.refuses = status
        with pytest.raises(WeightSyncError, match=r"weight sync incomplete.*shapes differ"):
            engine.update_weights(policy.model, version=1)
        assert engine.weight_version == 0
        for use in (lambda: engine.generate(PROMPTS, seed=0), engine.export_weights):
            with pytest.raises(EngineError, match=r"may not be used.*shapes differ.*Call update_weights"):
                use()
        self.pretended.refuses = None
        engine.update_weights(policy.model, version=2)
        assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 2

    def test_a_server_that_names_other_weights_is_an_incomplete_sync(self, engine, policy):
        self.pretended.mislabels = True
        with pytest.raises(WeightSyncError, match="SGLang says that it has weights '0', it was given '1'"):
            engine.update_weights(policy.model, version=1)

    def test_a_restarted_server_gets_its_weights_again(self, engine, policy):
        first = copy.deepcopy(self.pretended.model)
        change(policy)
        engine.update_weights(policy.model, version=2)
        before = engine.generate(PROMPTS, seed=0)

        def restart():
            self.pretended.model, self.pretended.label = copy.deepcopy(first), "default"
            self.running.requests.clear()

        restart()
        after = engine.generate(PROMPTS, seed=0)
        assert torch.equal(after.tokens.response_ids, before.tokens.response_ids)
        assert (after.policy_versions, after.sampling.policy_version) == (None, 2)
        assert [path for path, _ in self.running.requests].count("/update_weights_from_disk") == 1

        restart()
        assert torch.equal(engine.score(before.tokens), engine.score(after.tokens))

    def test_a_server_that_loses_its_weights_over_and_over_is_an_error(self, engine, policy):
        engine.update_weights(policy.model, version=2)
        self.pretended.mislabels, self.pretended.label = True, "default"
        with pytest.raises(WeightSyncError, match=r"weight sync incomplete.*was restarted"):
            engine.generate(PROMPTS, seed=0)
        with pytest.raises(EngineError, match="may not be used"):
            engine.generate(PROMPTS, seed=0)

    def test_spans_of_weight_versions_reach_their_tokens(self, engine, policy):
        """A second thread updates the weights during a request."""
        sample = self.pretended.generate

        def updated_at_5(body):
            if not body["sampling_params"]["max_new_tokens"]:
                return sample(body)
            self.pretended.generate = sample
            answer = sample(body)
            end = len(answer["output_ids"])
            spans = [{"version": "0", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": end}]
            answer["meta_info"]["weight_versions"] = spans
            engine.update_weights(policy.model, version=4)
            return answer

        self.pretended.generate = updated_at_5
        rollout = engine.generate([[1, 2, 3]], seed=0)
        length = int(rollout.tokens.response_mask.sum())
        assert rollout.policy_versions.tolist() == [[0] + [4] * (length - 1)]
        assert (rollout.sampling.policy_version, engine.weight_version) == (0, 4)

    def test_scores_of_other_tokens_or_no_scores_are_refused(self, engine):
        tokens = engine.generate(PROMPTS, seed=0).tokens
        score = self.pretended.score
        self.pretended.score = lambda ids: score([*ids[:-1], (ids[-1] + 1) % 256])
        with pytest.raises(EngineAnswerError, match="row 0: SGLang scored the tokens"):
            engine.score(tokens)

        def without_the_last(ids):
            answer = score(ids)
            answer["meta_info"]["input_token_logprobs"][-1][0] = None
            return answer

        self.pretended.score = without_the_last
        with pytest.raises(EngineAnswerError, match=r"the score of token 11 of row 0 is None"):
            engine.score(tokens)

    def test_a_prompt_token_outside_the_vocabulary_is_refused(self, engine):
        with pytest.raises(ValueError, match="prompt 1 has token id 258, outside the vocabulary 0 … 257"):
            engine.generate([[1], [258]], seed=0)
