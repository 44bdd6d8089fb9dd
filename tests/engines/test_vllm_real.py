"""vLLM itself, on the CPU: `make test-vllm`. Figures are printed; docs/gallery.md quotes them.

Starting vLLM is slow, so several tests share each engine and pass it the weights that they need.
"""

import copy
import dataclasses
import importlib.util
import os
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from engine_contract import NEW_TOKENS, EngineContract, change
from stories import StoriesTokenizer, load_stories_with_wide_heads
from vllm_server_process import CPU, running_server

from rollcorr.config import SamplingSpec
from rollcorr.core.logprobs import kept_log_prob
from rollcorr.engines.base import EngineUnavailableError, GenerationSettings, WeightSyncError
from rollcorr.engines.response_scoring import response_logits
from rollcorr.engines.vllm.offline import VllmEngine, VllmOptions
from rollcorr.engines.vllm.server import VllmServerEngine, VllmServerOptions
from rollcorr.train.grpo.policy import Policy, load_policy, make_tiny_policy
from rollcorr.train.grpo.tasks import ArithmeticTask

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; `make test-vllm` makes an environment with it and runs this file",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of packages that vLLM's environment brings
]
TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs": "processed"}
HERE = Path(__file__).parent


def make_engine(policy, *, cls=VllmEngine, sampling=None, tokens=NEW_TOKENS, engine_args=None, **options):
    return cls(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(**(sampling or {})),
            max_new_tokens=tokens,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        VllmOptions(
            engine_args={"enforce_eager": True, "max_model_len": 512, **(engine_args or {})},
            env={**CPU, "PYTHONPATH": f"{HERE}:{os.environ['PYTHONPATH']}"},
            **options,
        ),
    )


def small_policy():
    """The engines' micro policy with heads of 32, which vLLM's attention needs on the CPU."""
    return make_tiny_policy(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )


@pytest.fixture(scope="module")
def demo():
    return load_policy("demo")


@pytest.fixture(scope="module")
def demo_engine(demo):
    begun = time.monotonic()
    with closing(make_engine(demo, sampling=TRUNCATED, tokens=48, engine_args={"block_size": 32})) as engine:
        say(f"vLLM {engine.sampling.engine_version} started and verified in {time.monotonic() - begun:.0f} s")
        yield engine


@pytest.fixture
def fresh(demo, demo_engine):
    """The engine with the demo policy's own weights again."""
    saved = {name: value.clone() for name, value in demo.model.state_dict().items()}
    yield demo_engine
    demo.model.load_state_dict(saved)
    demo_engine.update_weights(demo.model, version=0)


def say(text):
    print(f"\n  {text}", flush=True)  # noqa: T201 (figures that the page quotes)


def gap(log_prob, rollout):
    """k3, mean ratio and largest |log-ratio| of a trainer's log-probs against the rollout's."""
    d = (log_prob - rollout.rollout_log_prob)[rollout.tokens.response_mask].double()
    return float((d.exp() - 1 - d).mean()), float(d.exp().mean()), float(d.abs().max())


def compare(name, policy, rollout, temperature=0.7):
    """The gap of full scoring and of replay; said."""
    tokens, mask = rollout.tokens, rollout.tokens.response_mask
    with torch.no_grad():
        logits = response_logits(policy.model, tokens).float()
    full = (logits / temperature).log_softmax(-1).gather(-1, tokens.response_ids[..., None])[..., 0]
    replayed, outside = kept_log_prob(logits, tokens.response_ids, rollout.kept.padded(mask), temperature=temperature)
    assert not outside[mask].any()
    gaps = gap(full, rollout), gap(replayed, rollout)
    for kind, (k3, ratio, largest) in zip(("full", "replay"), gaps, strict=True):
        say(f"{name}, {int(mask.sum())} tokens, {kind}: k3 {k3:.2e}, mean ratio {ratio:.4f}, largest {largest:.3f}")
    return gaps


class TestVllm(EngineContract):
    """The contract in float32, by one engine."""

    name = "vllm"
    noise = rescoring_noise = 1e-4
    started = None

    @pytest.fixture(scope="class", autouse=True)
    def one(self):
        cls = type(self)
        cls.started = make_engine(small_policy(), cls=Forgetful, dtype="float32")
        yield
        cls.started.close()

    @pytest.fixture
    def policy(self):
        return small_policy()

    def make(self, policy):
        type(self).started.forgotten = None
        type(self).started.update_weights(policy.model, version=0)
        return type(self).started

    def forgetful(self, policy, parameter):
        engine = self.make(policy)
        engine.old = dict(engine.export_weights())
        engine.forgotten = parameter
        return engine


class Forgetful(VllmEngine):
    """Load all parameters of the policy but one, which comes from an older policy."""

    forgotten = None

    def _load(self, version):
        if self.forgotten is not None:
            from safetensors.torch import load_file, save_file

            file = self._folder / "model.safetensors"
            save_file({**load_file(file), self.forgotten: self.old[self.forgotten]}, file)
        super()._load(version)


def prompts_of(policy, count=128):
    task = ArithmeticTask()
    return [policy.encode(problem.prompt) for problem in task.problems(count, seed=0, step=0)]


def test_replaying_the_kept_sets_brings_the_demo_policy_to_the_noise_floor(demo, fresh):
    rollout = fresh.generate(prompts_of(demo), seed=0)
    _, (k3, ratio, _) = compare("demo policy", demo, rollout)
    assert k3 <= 1e-4
    assert abs(ratio - 1) <= 1e-3


def test_replaying_corrects_a_policy_that_a_truncation_distorts(demo, fresh):
    """The demo's model before any training: T 0.7, top-p 0.9 and top-k 20 cut a lot from it."""
    policy = make_tiny_policy()
    with torch.no_grad():  # neither flat nor certain
        policy.model.model.norm.weight.mul_(2)
    fresh.update_weights(policy.model, version=1)
    rollout = fresh.generate(prompts_of(demo), seed=0)
    (full, _, _), (k3, ratio, _) = compare("untrained policy", policy, rollout)
    assert full > 1e-2
    assert k3 <= 5e-5
    assert abs(ratio - 1) <= 1e-3
    assert rollout.sampling.policy_version == 1


def test_kept_sets_hold_all_logits_that_tie_at_the_boundary(demo, fresh):
    with torch.no_grad():
        demo.model.model.norm.weight.mul_(0.1)
    fresh.update_weights(demo.model, version=2)
    sizes = fresh.generate(prompts_of(demo), seed=0).kept.offsets.diff()
    assert sizes.max() > 10  # top-p did not stop earlier


def test_prefixes_of_older_weights_are_forgotten(demo, fresh):
    prompts = [list(range(1, 200)), list(range(30, 229))]  # longer than several blocks of the cache
    fresh.generate(prompts, seed=0)
    old = copy.deepcopy(demo)
    change(demo, by=0.01)
    fresh.update_weights(demo.model, version=3)
    rollout = fresh.generate(prompts, seed=0)
    (_, _, of_new), _ = compare("after an update", demo, rollout)
    (_, _, of_old), _ = compare("after an update, by the old policy", old, rollout)
    assert of_new < 0.5 < 2 < of_old


def test_an_engine_that_was_killed_comes_back_with_its_weights(demo, fresh):
    change(demo, by=0.01)
    fresh.update_weights(demo.model, version=5)
    prompts = prompts_of(demo, 8)
    expected = fresh.generate(prompts, seed=3)
    os.kill(fresh._worker._process.pid, 9)
    again = fresh.generate(prompts, seed=3)
    assert torch.equal(again.tokens.response_ids, expected.tokens.response_ids)
    assert again.sampling.policy_version == 5


def test_an_engine_that_does_not_answer_in_time_is_unavailable(demo, demo_engine, monkeypatch):
    impatient = dataclasses.replace(demo_engine.options, timeout=0.01, restarts=0)
    monkeypatch.setattr(demo_engine, "options", impatient)
    with pytest.raises(EngineUnavailableError, match=r"did not answer 'generate' within 0\.01 s"):
        demo_engine.generate(prompts_of(demo, 8), seed=0)
    monkeypatch.undo()
    demo_engine.restart()
    assert len(demo_engine.generate(prompts_of(demo, 8), seed=0).tokens) == 8


def test_the_old_head_of_a_tied_model_is_caught(demo, monkeypatch):
    """vLLM's own reload: on the CPU the head goes on with the weights that the engine started with."""
    monkeypatch.setattr("rollcorr.engines.vllm.offline.WORKER_EXTENSION", "vllm_naive_reload.NaiveReloader")
    with pytest.raises(WeightSyncError, match="weight sync incomplete: a probe batch differs by") as error:
        make_engine(demo)
    say(f"reload without the head: {str(error.value)[:100]}")


def test_a_pretrained_model_replays_to_its_noise_floor():
    policy = Policy(load_stories_with_wide_heads(), StoriesTokenizer)
    prompts = [[1], [1, 403, 407], [1, 410], [1, 404]] * 8
    with closing(make_engine(policy, sampling=TRUNCATED, tokens=128)) as engine:
        begun = time.monotonic()
        rollout = engine.generate(prompts, seed=1)
        say(f"{int(rollout.tokens.response_mask.sum())} tokens in {time.monotonic() - begun:.1f} s")
        _, (k3, ratio, largest) = compare("stories260K", policy, rollout)
        begun = time.monotonic()
        engine.update_weights(policy.model, version=1)
        say(f"weight update and verification in {time.monotonic() - begun:.2f} s")
    assert k3 <= 5e-4
    assert abs(ratio - 1) <= 1e-3
    assert largest < 0.4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with reloadable weights, of a policy that the first test replaces."""
    folder, policy = tmp_path_factory.mktemp("served"), small_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    extension = ["--worker-extension-cls", "rollcorr.engines.vllm.weight_receiver.WeightReloader"]
    options = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "64", "--enable-scale-out", *extension]
    with running_server(folder, *options, env={"VLLM_SERVER_DEV_MODE": "1"}) as url:
        yield url


@pytest.mark.parametrize("tokens_in_and_out", [True, False])
def test_a_server_takes_weights_and_gives_kept_sets_both_ways(server, tmp_path, monkeypatch, tokens_in_and_out):
    if not tokens_in_and_out:
        monkeypatch.setattr("rollcorr.engines.vllm.server.GENERATE", "/no/such/path")
    policy = small_policy()
    with torch.no_grad():  # neither flat nor certain
        policy.model.model.norm.weight.mul_(2)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]] * 8
    server_engine = VllmServerEngine(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(**TRUNCATED),
            max_new_tokens=32,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        VllmServerOptions(url=server, folder=tmp_path / "weights"),
    )
    with closing(server_engine) as engine:
        (full, _, _), (k3, ratio, _) = compare("server", policy, engine.generate(prompts, seed=0))
        change(policy, by=0.01)
        engine.update_weights(policy.model, version=7)
        rollout = engine.generate(prompts, seed=0)
        _, (updated, _, _) = compare("server after an update", policy, rollout)
        assert rollout.sampling.policy_version == 7
        assert rollout.policy_versions is None
        assert torch.equal(engine.generate(prompts, seed=0).tokens.response_ids, rollout.tokens.response_ids)
    assert full > 1e-2
    assert k3 <= 5e-5
    assert abs(ratio - 1) <= 1e-3
    assert updated <= 2e-4
