"""A server that goes away in the middle of a run and comes back without its weights, behind real connections."""

import copy
import errno
import json
import os
import signal
import time

import fake_vllm
import pytest
import torch
from engine_contract import PROMPTS, change
from local_server import serving
from micro_policy import make_micro_policy
from safetensors import SafetensorError
from test_sglang import PretendedServer
from test_vllm_server import make_engine as make_vllm_engine
from test_vllm_server import start_llm
from vllm_doubles import serving as serving_vllm

from rollcorr.engines import remote_engine
from rollcorr.engines.base import EngineAnswerError, EngineError
from rollcorr.engines.transport import waiting
from rollcorr.train import load_config, train
from rollcorr.train.grpo import grpo_trainer
from rollcorr.train.grpo.policy import save_policy
from rollcorr.train.grpo.tasks import Reward

STEPS, ROWS = 3, 4
RUN = (
    f"steps={STEPS}",
    "rollout.engine=sglang",
    "rollout.dtype=float32",
    "rollout.prompts_per_step=2",
    f"rollout.group_size={ROWS // 2}",
    "rollout.max_new_tokens=4",
    "optim.lr=0.01",
    "log.tensorboard=false",
    "log.rollouts=false",
    "log.evaluate=0",
    "log.null=0",
    "checkpoint.every=0",
)


@pytest.fixture
def low_byte_reward(monkeypatch):
    """Differs within a group, so that every step moves the weights."""

    def reward(response_ids, answer, tokenizer, *, bonus_length):
        return Reward(sum(token < 128 for token in response_ids) / len(response_ids), correct=False)

    monkeypatch.setattr(grpo_trainer, "hard_gated_reward", reward)


class Mortal:
    """A pretended SGLang server that dies at one of its sampling requests, and is started again minutes later.

    It dies as a process does: the port is closed, and so is every connection. It comes back as it was first started.
    """

    def __init__(self, model, clock, *, dies_at=None, away=0.0):
        self.first = model
        self.clock, self.dies_at, self.away = clock, dies_at, away
        self.sampled = 0
        self.lives = []

    def start(self, port=0):
        pretended = PretendedServer(self.first)

        def answer(handler, body):
            if handler.server.released.is_set():
                handler.close_connection = True
                return
            if body.get("sampling_params", {}).get("max_new_tokens"):
                self.sampled += 1
                if self.sampled == self.dies_at:
                    self.dies_at = None
                    self.die()
                    handler.close_connection = True
                    return
            pretended(handler, body)

        life = serving(answer, port=port)
        self.lives.append((life, life.__enter__()))

    def die(self):
        life, server = self.lives[-1]
        port = server.server_port
        life.__exit__(None, None, None)
        self.clock.alarms.append((self.clock.now + self.away, lambda: self.start(port)))

    @property
    def requests(self):
        return [path for _, server in self.lives for path, _ in server.requests]

    def close(self):
        self.lives[-1][0].__exit__(None, None, None)


def run(tmp_path, name, mortal, *options):
    """Run a few steps on the server; return summary, metrics without seconds, and output."""
    from rich.console import Console

    policy = tmp_path / "policy"
    if not policy.exists():
        save_policy(make_micro_policy(), policy)
    shown = (tmp_path / f"{name}.txt").open("w+", encoding="utf-8")
    mortal.start()
    url, folder = mortal.lives[0][1].url, tmp_path / name / "weights"
    changes = [f"run_dir={tmp_path / name / 'run'}", f"model.path={policy}", *RUN, *options]
    changes.append(f'rollout.engine_options={{url: "{url}", folder: "{folder}", concurrency: 2, engine_version: "0"}}')
    with shown:
        try:
            summary = train(load_config(None, changes), console=Console(file=shown, width=400))
        finally:
            mortal.close()
        shown.seek(0)
        text = shown.read()
    lines = (tmp_path / name / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [{k: v for k, v in json.loads(line).items() if not k.startswith(("perf/", "time"))} for line in lines]
    return summary, metrics, text


def test_a_run_outlives_a_server_that_is_away_for_minutes_and_gives_it_its_weights_again(
    tmp_path, clock, low_byte_reward
):
    model = make_micro_policy().model
    whole = Mortal(model, clock)
    _, expected, _ = run(tmp_path, "whole", whole)

    # In the second step, whose weights are not those that the server starts with.
    mortal = Mortal(model, clock, dies_at=ROWS + 2, away=700.0)
    summary, metrics, shown = run(tmp_path, "mortal", mortal)
    assert (summary.step, summary.failure, summary.interrupted) == (STEPS, None, False)
    assert len(mortal.lives) == 2
    assert clock.now > 700

    # Step 1 got its weights at the start; then one update a step, and one more for the server that came back.
    assert whole.requests.count("/update_weights_from_disk") == STEPS
    assert mortal.requests.count("/update_weights_from_disk") == STEPS + 1
    assert len(metrics) == STEPS
    assert metrics == expected
    assert [step["engine/staleness"] for step in metrics] == [0.0] * STEPS
    assert "has been away for" in shown
    assert "SGLang lost the weights of version 1" in shown


def test_a_run_whose_server_stays_away_saves_and_says_why(tmp_path, clock, low_byte_reward):
    mortal = Mortal(make_micro_policy().model, clock, dies_at=ROWS + 1, away=3600.0)
    summary, metrics, shown = run(tmp_path, "lost", mortal)
    assert (summary.step, len(metrics)) == (1, 1)
    assert "all of wait_minutes" in summary.failure
    assert mortal.lives[0][1].url in summary.failure
    assert "saved" in shown


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("in_rust", [True, False])
def test_a_disk_that_fails_while_weights_are_handed_over_costs_one_step(
    tmp_path, clock, low_byte_reward, monkeypatch, number, in_rust
):
    mortal, write, written = Mortal(make_micro_policy().model, clock), remote_engine.write_checkpoint, []
    reason = os.strerror(number)

    def write_twice(*arguments, **options):
        written.append(arguments)
        if len(written) < 3:
            return write(*arguments, **options)
        if in_rust:
            raise SafetensorError(f"Error while serializing: I/O error: {reason} (os error {number})")
        raise OSError(number, reason)

    monkeypatch.setattr(remote_engine, "write_checkpoint", write_twice)
    summary, metrics, shown = run(tmp_path, "full", mortal)
    assert (summary.step, len(metrics), summary.engine_failed) == (2, 2, True)
    assert f"{str(tmp_path / 'full' / 'weights')!r} could not be written or read: {reason}" in summary.failure
    assert "saved" in shown


def test_weights_that_cannot_be_read_from_their_folder_do_not_cost_the_checkpoint(
    tmp_path, clock, low_byte_reward, monkeypatch
):
    def fail(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(remote_engine, "checkpoint_weights", fail)
    mortal = Mortal(make_micro_policy().model, clock)
    summary, _, shown = run(tmp_path, "unread", mortal, "rollout.refresh_every=5", "checkpoint.every=1")
    assert (summary.step, summary.failure) == (STEPS, None)
    assert "the engine's weights, version 0, are lost (" in shown


def test_ctrl_c_while_the_server_is_away_ends_the_wait_and_saves_the_run(tmp_path, clock, low_byte_reward):
    mortal = Mortal(make_micro_policy().model, clock, dies_at=ROWS + 1, away=900.0)

    def ctrl_c():
        signal.raise_signal(signal.SIGINT)
        while not waiting.should_stop():  # until the main thread has heard of it
            time.sleep(0.01)

    clock.alarms.append((100.0, ctrl_c))
    summary, metrics, shown = run(tmp_path, "stopped", mortal)
    assert (summary.step, len(metrics), summary.interrupted) == (1, 1, True)
    assert (summary.failure, summary.engine_failed) == (None, False)
    assert 100 <= clock.now < 110
    assert "saved" in shown
    assert "asked to stop before the engine was back" in shown


@pytest.mark.parametrize("api", ["/inference/v1/generate", "/v1/completions"])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_vllm_server_that_was_restarted_gets_its_weights_again(micro_policy, tmp_path, clock, api, noticed):
    """Also when no request failed meanwhile; `/v1/completions` does not even name the weights of an answer."""
    llm = start_llm(micro_policy, tmp_path / "served")
    answer = fake_vllm.served(llm)
    if api == "/v1/completions":
        answer.paths.remove("/inference/v1/generate")
    first, broken, asked = copy.deepcopy(llm.model.state_dict()), [], []

    def serve(path, body):
        asked.append(path)
        return broken.pop() if broken else answer(path, body)

    with serving_vllm(serve) as url:
        engine = make_vllm_engine(url, micro_policy, folder=tmp_path / "weights", tokens=2)
        change(micro_policy)
        engine.update_weights(micro_policy.model, version=1)
        before = engine.generate(PROMPTS[:2], seed=0)

        llm.model.load_state_dict(first)
        llm.model.lm_head.quant_method.process_weights_after_loading(llm.model.lm_head)
        llm.version = "default"
        if noticed:
            broken.append((503, {"error": "loading"}))
        asked.clear()
        after = engine.generate(PROMPTS[:2], seed=0)
    assert asked.count("/collective_rpc") == 1
    assert torch.equal(after.tokens.response_ids, before.tokens.response_ids)
    assert torch.equal(after.rollout_log_prob, before.rollout_log_prob)
    assert (after.policy_versions, after.sampling.policy_version) == (None, 1)


def test_a_vllm_server_that_comes_back_with_other_log_probs_is_refused(micro_policy, tmp_path, clock):
    llm = start_llm(micro_policy, tmp_path / "served")
    answer, broken = fake_vllm.served(llm), []
    with serving_vllm(lambda path, body: broken.pop() if broken else answer(path, body)) as url:
        engine = make_vllm_engine(url, micro_policy, tokens=2)
        llm.processed = True
        broken.append((503, {"error": "loading"}))
        with pytest.raises(EngineAnswerError, match=r"came back with other options: .*returns processed log-probs"):
            engine.generate(PROMPTS[:2], seed=0)


def test_a_server_without_a_folder_that_comes_back_with_other_weights_is_refused(micro_policy, tmp_path, clock):
    llm = start_llm(micro_policy, tmp_path / "served")
    answer, broken = fake_vllm.served(llm), []
    with serving_vllm(lambda path, body: broken.pop() if broken else answer(path, body)) as url:
        engine = make_vllm_engine(url, micro_policy, tokens=2)
        with torch.no_grad():
            llm.model.model.norm.weight.mul_(1.5)
        broken.append((503, {"error": "loading"}))
        with pytest.raises(EngineError, match="weight sync incomplete"):
            engine.generate(PROMPTS[:2], seed=0)


def test_a_server_that_dies_during_an_update_gets_all_of_the_update_again(micro_policy, tmp_path, clock):
    """The server restarts between load and check: the loaded weights are lost."""
    llm = start_llm(micro_policy, tmp_path / "served")
    answer, asked, first = fake_vllm.served(llm), [], copy.deepcopy(llm.model.state_dict())

    def serve(path, body):
        asked.append(path)
        if path == "/resume" and asked.count("/resume") == 2:
            llm.model.load_state_dict(first)
            llm.model.lm_head.quant_method.process_weights_after_loading(llm.model.lm_head)
            llm.version = "default"
            return 503, {"error": "loading"}
        return answer(path, body)

    with serving_vllm(serve) as url:
        engine = make_vllm_engine(url, micro_policy, folder=tmp_path / "weights", tokens=2)
        change(micro_policy)
        engine.update_weights(micro_policy.model, version=1)
        assert asked.count("/collective_rpc") == 3
        assert engine.generate(PROMPTS[:2], seed=0).policy_versions is None
