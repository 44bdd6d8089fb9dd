"""The tokens of a page: which rows it shows, what it sums over all of them, and its size."""

import base64
import json
import zlib

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow", reason="the extra log is not installed")

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.diagnostics.log_check import token_rows
from rollcorr.diagnostics.log_check.token_rows import packed_tokens, read_tokens
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

TOKEN_IS = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)


def unpack(text):
    kind, _, packed = text.partition(":")
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(np.dtype(kind).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()


def write(path, rows):
    with RolloutLogWriter(path) as log:
        log.write(RolloutBatch.from_rows(rows))
    return path


def row(rollout, d, **more):
    train = (np.array(rollout) + np.array(d)).tolist()
    return {"response_ids": list(range(5, 5 + len(d))), "rollout_log_prob": rollout, "old_log_prob": train, **more}


def test_weights_shares_and_states_by_hand(tmp_path):
    rows = [
        row([-1.0, -1.0], [0.0, 1.0], step=3, reward=0.5, prompt_ids=[7, 8]),
        row([-2.0, -2.0, -2.0], [-1.0, 0.0, 0.5], step=4, response_mask=[True, False, True]),
    ]
    found = read_tokens([write(tmp_path / "log.parquet", rows)], TOKEN_IS)
    shown = packed_tokens(found, "log")
    assert unpack(shown["d"]).tolist()[:2] == [0.0, 1.0]
    assert unpack(shown["mu"]).tolist() == [-1, -1, -2, -2, -2]
    np.testing.assert_allclose(unpack(shown["weight"]), [1, 2, np.exp(-1), 0, np.exp(0.5)], rtol=1e-3)
    assert unpack(shown["state"]).tolist() == [1, 3, 1, 0, 1], "kept, truncated, kept, masked, kept"
    k3 = [0, np.e - 2, np.exp(-1), 0, np.exp(0.5) - 1.5]
    np.testing.assert_allclose(shown["kl"], sum(k3), rtol=1e-5)
    np.testing.assert_allclose(unpack(shown["rowKl"]), [sum(k3[:2]), sum(k3[2:])], rtol=1e-5)
    assert (shown["sequences"], shown["shown"], shown["count"]) == (2, 2, 4)
    assert shown["prompts"] == [[7, 8], ()]
    assert (unpack(shown["step"]).tolist(), unpack(shown["length"]).tolist()) == ([3, 4], [2, 3])


def test_breakdowns_by_hand(tmp_path):
    spans = [{"start": 0, "length": 1, "version": 2}, {"start": 1, "length": 3, "version": 0}]
    rows = [row([-1.0] * 4, [1.0] * 4, step=2, policy_versions=spans, response_mask=[True, False, True, True])]
    found = read_tokens([write(tmp_path / "log.parquet", rows)], None)
    tokens = {name: sums[0][:4].tolist() for name, sums in found.breakdowns.items()}
    assert tokens["version lag"] == [1, 0, 2, 0]
    assert tokens["turn"] == [1, 2, 0, 0]
    assert tokens["position"] == [1, 0, 2, 0], "bins 0, 1, 2 to 3, 4 to 7"
    assert all(sums[0].sum() == 3 for sums in found.breakdowns.values())
    assert all(counts.sum(axis=1).tolist() == [3, 3] for counts in found.histograms.values())


def test_tokens_of_the_newest_weights_have_lag_0(tmp_path):
    spans = [{"start": 0, "length": 1, "version": 1}, {"start": 1, "length": 3, "version": 0}]
    found = read_tokens(
        [write(tmp_path / "log.parquet", [row([-1.0] * 4, [1.0] * 4, step=2, policy_versions=spans)])], None
    )
    lags = packed_tokens(found, "log")["breakdowns"]["version lag"]
    assert lags["edges"] == list(range(15))
    assert lags["sums"][0][:3] == [1, 3, 0], "step 2 trains the policy of version 1"


def test_the_worst_rows_and_a_sample_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(token_rows, "MOST_SEQUENCES", 20)
    rows = [row([-1.0], [3.0 if index in (13, 77) else 0.01], step=1) for index in range(100)]
    found = read_tokens([write(tmp_path / "log.parquet", rows)], None)
    places = [kept.place for kept in found.rows]
    assert len(places) == 20
    assert {13, 77} <= set(places)
    assert places == sorted(places)
    assert max(places) > 60, "the sample is spread over the log"
    assert (found.sequences, found.tokens) == (100, 100)
    assert found.breakdowns["position"][0].sum() == 100, "sums are over all rows"


def test_without_text_nothing_sampled_is_shown(tmp_path):
    rows = [row([-1.0, -1.0], [0.0, 0.0], prompt="a secret", prompt_ids=[123, 124])]
    log = write(tmp_path / "log.parquet", rows)
    assert "a secret" in json.dumps(packed_tokens(read_tokens([log], None), "log"))
    shown = packed_tokens(read_tokens([log], None, text=False), "log", decode=str)
    assert "a secret" not in json.dumps(shown)
    assert shown["prompts"] == [()]
    assert shown["texts"] == {}
    assert set(unpack(shown["id"]).tolist()) == {-1}


def test_token_text_comes_from_the_decoder(tmp_path):
    log = write(tmp_path / "log.parquet", [row([-1.0, -1.0], [0.0, 0.0], prompt_ids=[9])])
    shown = packed_tokens(read_tokens([log], None), "log", decode=lambda token: f"<{token}>")
    assert shown["texts"] == {5: "<5>", 6: "<6>", 9: "<9>"}


def test_denoising_steps_show_their_exact_kl(tmp_path):
    steps = {"dimensions": 10, "timestep": [900.0, 500.0], "exact_kl": [0.25, 4.0], "prompt": "a red square"}
    found = read_tokens([write(tmp_path / "log.parquet", [row([-1.0, -1.0], [0.1, 0.0], **steps)])], None)
    shown = packed_tokens(found, "log")
    assert shown["diffusion"]
    assert "probability" not in shown["breakdowns"], "a density is no probability"
    assert unpack(shown["stepKl"]).tolist() == [0.25, 4.0]
    assert unpack(shown["time"]).tolist() == [900, 500]
    np.testing.assert_allclose(unpack(shown["d"]), [1.0, 0.0], atol=1e-3)
    assert shown["prompts"] == ["a red square"]


def test_decoded_predictions_with_the_largest_kl(tmp_path, monkeypatch):
    """Only base64 passes: the page puts it into an address."""
    monkeypatch.setattr(token_rows, "MOST_PICTURES", 10)
    texts = {0.25: "AAAA", 4.0: "BBBB", 2.0: "CC==", 8.0: "DDDD) url(http://x", 0.5: None}
    steps = {"dimensions": 10, "timestep": [900.0]}
    rows = [row([-1.0], [0.1], exact_kl=[kl], predictions=text, **steps) for kl, text in texts.items()]
    log = write(tmp_path / "log.parquet", rows)
    assert packed_tokens(read_tokens([log], None), "log")["pictures"] == {1: "BBBB", 2: "CC=="}
    assert packed_tokens(read_tokens([log], None, text=False), "log")["pictures"] == {}


def test_a_million_tokens_fit_into_15_mb(tmp_path):
    torch.manual_seed(0)
    rows, length = 2000, 500
    rollout = torch.empty(rows * length).exponential_(1.2).neg()
    batch = RolloutBatch.from_packed(
        torch.ones(rows * length, dtype=torch.bool),
        cu_seqlens=torch.arange(rows + 1) * length,
        rollout_log_prob=rollout,
        old_log_prob=rollout + 0.02 * torch.randn(rows * length),
        response_ids=torch.randint(150_000, (rows * length,)),
        step=1,
    )
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        log.write(batch)
    shown = packed_tokens(read_tokens([tmp_path / "log.parquet"], TOKEN_IS), "log")
    assert shown["shown"] == rows
    assert len(json.dumps(shown)) < 14_000_000, "the page adds less than 1 MB"
