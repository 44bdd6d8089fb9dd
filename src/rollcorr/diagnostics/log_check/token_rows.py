"""Tokens of a page: the rows of rollout logs with the largest k3 and a random sample, packed for the page's script.

One pass over a log keeps a bounded number of rows, and computes histograms and breakdowns over all rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.correction.rollout_correction import correct
from rollcorr.diagnostics.log_check.denoising import DENOISING_COLUMNS, exact_kl, has_exact_kl
from rollcorr.diagnostics.log_check.tally import version_spans, without_sentinels
from rollcorr.diagnostics.null.token_ratios import TokenRatios, turns_of
from rollcorr.diagnostics.report.curves import pack
from rollcorr.rollout_log import RolloutBatch, log_shards, read_shard
from rollcorr.rollout_log.reader import Paths

MOST_SEQUENCES, MOST_TOKENS = 10_000, 1_250_000
"""Maximum number of sequences and tokens in a page."""
RULE = (
    f"Above {MOST_SEQUENCES:,} sequences or {MOST_TOKENS:,} tokens, half of the place goes to the sequences with the "
    "largest k3, and half to a random sample of the others."
)
MASKED, KEPT, REJECTED, TRUNCATED = 0, 1, 2, 3
MOST_PICTURES = 3_000_000
"""Maximum number of characters of decoded predictions in a page."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
COLUMNS = (
    *("step", "reward", "response_mask", "rollout_log_prob", "old_log_prob", "log_prob", "policy_versions"),
    *DENOISING_COLUMNS,
)
PROMPT_IDS = 64
"""Number of final prompt token ids that the page shows."""

D_EDGES = np.concatenate([-np.logspace(1.5, -4, 34), np.logspace(-4, 1.5, 34)])
WEIGHT_EDGES = np.logspace(-3, 3, 49)
POWERS = np.concatenate([[0], 2.0 ** np.arange(18)])
BREAKDOWNS: Mapping[str, NDArray[np.float64]] = {
    "position": POWERS,
    "length": POWERS,
    "probability": np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999]),
    "turn": np.arange(16.0),
    "version lag": np.arange(16.0),
}
"""Variable of the breakdown → lower edges of its bins; the last bin has no upper edge."""


class TokenRow(NamedTuple):
    """A sequence for the page: its position in the log, its sums, and its tokens."""

    place: int
    step: int
    kl: float
    reward: float
    prompt: Sequence[int] | str
    tokens: NDArray[Any]


@dataclass
class TokenRows:
    """Rows and sums of a pass over a log.

    Attributes:
        rows: sequences to show.
        files: (name, rows, first row) of the parts of the log, in order.
        config: correction of which the weights and rejections are shown.
        sequences: number of sequences in the log.
        tokens: number of valid tokens in the log.
        kl: Σ k3 over all valid tokens, nats. For denoising steps, Σ exact KL, or Σ |J| if the KL is not recorded.
        breakdowns: name → (5, bins): tokens, their Σ k3, kept tokens, their Σ k3 and Σ weight.
        histograms: name → (2, bins) counts, raw and applied.
        diffusion: True if the tokens are denoising steps.
        pictures: position in the log → the row's Σ exact KL and its decoded predictions; the largest KL first.
    """

    rows: list[TokenRow] = field(default_factory=list)
    files: Sequence[tuple[str, int, int]] = ()
    config: RolloutCorrectionConfig | None = None
    sequences: int = 0
    tokens: int = 0
    kl: float = 0.0
    breakdowns: dict[str, NDArray[Any]] = field(default_factory=dict)
    histograms: dict[str, NDArray[Any]] = field(default_factory=dict)
    diffusion: bool = False
    pictures: dict[int, tuple[float, str]] = field(default_factory=dict)

    def prune(self, share: float = 1.0) -> None:
        """Drop rows beyond a share of the page's limits by `RULE`, and pictures with the smallest KL."""
        by_kl = sorted(self.pictures.items(), key=lambda item: -item[1][0])
        ends = np.cumsum([len(picture) for _, (_, picture) in by_kl])
        self.pictures = dict(by_kl[: int(np.searchsorted(ends, MOST_PICTURES * share, side="right"))])
        sequences, tokens = MOST_SEQUENCES * share, MOST_TOKENS * share
        if len(self.rows) <= sequences and sum(len(row.tokens) for row in self.rows) <= tokens:
            return
        by_size = sorted(self.rows, key=lambda row: (-row.kl, row.place))
        largest = _prefix_within(by_size, sequences / 2, tokens / 2)

        # A pseudo-random order that depends on the place in the log alone.
        others = sorted(by_size[len(largest) :], key=lambda row: (row.place * 2654435761 + 12345) % (1 << 32))
        self.rows = sorted(largest + _prefix_within(others, sequences - len(largest), tokens / 2))


def _prefix_within(rows: Sequence[TokenRow], sequences: float, tokens: float) -> list[TokenRow]:
    """Return the longest prefix of rows within the limits; at least one row if `sequences` ≥ 1."""
    ends = np.cumsum([len(row.tokens) for row in rows]) if rows else np.zeros(0)
    return list(rows[: min(int(sequences), max(1, int(np.searchsorted(ends, tokens, side="right"))))])


TOKEN = np.dtype([(name, "f4") for name in ("mu", "d", "weight", "kl", "time")] + [("state", "u1"), ("id", "i4")])
"""Fields of a token: log μ, log π − log μ (for a denoising step, J), and the weight that the loss applies."""


def read_tokens(
    paths: Paths,
    config: RolloutCorrectionConfig | None,
    *,
    text: bool = True,
    share: float = 1.0,
    on_rows: Callable[[int, int], None] | None = None,
) -> TokenRows:
    """Read the tokens that a page shows, in memory bounded by the page and a batch.

    Args:
        paths: files, folders or glob patterns.
        config: correction whose weights and rejections to show; None shows weights of 1.
        text: include token ids and prompts. Without them, the page does not reveal the sampled text.
        share: share of the page's limits, if several runs share a page; default: all of it.
        on_rows: progress callback: receives the rows read since the last call, and the total rows of the log.

    Returns:
        The rows to show and the sums over all rows.

    Raises:
        RolloutLogError: a log cannot be read, or lacks the log-probs of a side.
    """
    shards, found = log_shards(paths), TokenRows(config=config)
    found.files = [(re.split(r"[/\\]", shard.file)[-1], shard.rows, shard.first_row) for shard in shards]
    total = sum(shard.rows for shard in shards)
    columns = (*COLUMNS, *(("prompt", "prompt_ids", "response_ids", "predictions") if text else ()))
    for shard in shards:
        for batch in read_shard(shard, columns=columns):
            _add(found, batch, config, text=text)
            too_many = sum(len(row.tokens) for row in found.rows) > MOST_TOKENS or len(found.rows) > 2 * MOST_SEQUENCES
            if too_many or found.pictures:
                found.prune(share)
            if on_rows is not None:
                on_rows(len(batch), total)
    found.prune(share)
    return found


def _add(found: TokenRows, batch: RolloutBatch, config: RolloutCorrectionConfig | None, *, text: bool) -> None:
    """Add the sums and the rows of a batch."""
    column = next((name for name in ("old_log_prob", "log_prob") if batch.has(name)), "old_log_prob")
    rollout, train = (without_sentinels(batch.packed(name).float()) for name in ("rollout_log_prob", column))
    mask, lengths = batch.packed("response_mask"), batch.lengths
    found.diffusion = batch.has("dimensions")
    if found.diffusion:
        # Log-probs of pictures are averages over D, so multiply by D to get joint log-ratios.
        size = batch.values("dimensions").float().repeat_interleave(lengths)
        rollout, train = rollout * size, train * size
    ratios = TokenRatios.of(train.numpy(), rollout.numpy(), mask.numpy(), lengths.numpy())

    # Show the weights that the loss applies; a loss without weights uses 1 for each token.
    weights, kept = torch.ones_like(train), mask
    if config is not None:
        settings = replace(config, nonfinite="reject_token")
        correction = correct(train, rollout, mask, settings, cu_seqlens=batch.cu_seqlens, densities=True)
        kept = correction.loss_mask
        weights = weights if correction.loss_weights is None else correction.loss_weights.float()

    tokens = np.zeros(len(ratios.d), dtype=TOKEN)
    tokens["mu"], tokens["weight"] = -ratios.surprise, weights.numpy()
    tokens["d"] = np.where(ratios.valid, ratios.d, np.nan)
    tokens["state"] = np.where(kept.numpy() & ratios.valid, KEPT, np.where(ratios.mask, REJECTED, MASKED))
    if config is not None and config.is_upper is not None and not config.rollout_is_batch_normalize:
        tokens["state"][(tokens["state"] == KEPT) & (tokens["weight"] >= np.float32(config.is_upper))] = TRUNCATED
    tokens["time"] = batch.packed("timestep").numpy() if batch.has("timestep") else np.nan
    tokens["id"] = batch.packed("response_ids").numpy() if text and batch.has("response_ids") else -1
    tokens["kl"] = ratios.k3
    if found.diffusion:
        tokens["kl"] = exact_kl(batch).nan_to_num().numpy() if has_exact_kl(batch) else np.abs(ratios.d)

    _sum_up(found, batch, tokens, ratios.valid)
    _keep_rows(found, batch, tokens, text=text)


def _keep_rows(found: TokenRows, batch: RolloutBatch, tokens: NDArray[Any], *, text: bool) -> None:
    """Append the rows of a batch; a missing step is −1, a missing reward NaN."""
    count, ends = len(batch), np.cumsum(batch.lengths.numpy())
    steps = batch.values("step").tolist() if batch.has("step") else [-1] * count
    rewards = batch.values("reward").tolist() if batch.has("reward") else [np.nan] * count
    column = next((name for name in ("prompt", "prompt_ids") if text and batch.has(name)), None)
    prompts = batch.objects(column) if column else [None] * count
    pictures = batch.objects("predictions") if text and batch.has("predictions") else [None] * count
    for row, part in enumerate(np.split(tokens, ends[:-1])):
        kl = float(part["kl"][np.isfinite(part["d"])].sum())
        prompt = prompts[row] or ()
        prompt = prompt if isinstance(prompt, str) else prompt[-PROMPT_IDS:]
        # Copy the tokens: a view would keep the batch in memory.
        found.rows.append(TokenRow(found.sequences + row, steps[row], kl, rewards[row], prompt, part.copy()))
        picture = pictures[row] or ""
        if BASE64.fullmatch(picture):  # a log may be untrusted, and the page embeds this in a URL
            found.pictures[found.sequences + row] = kl, picture
    found.sequences += count


def _sum_up(found: TokenRows, batch: RolloutBatch, tokens: NDArray[Any], valid: NDArray[np.bool_]) -> None:
    """Add the tokens of a batch to the totals, the histograms and the breakdowns."""
    lengths = batch.lengths.numpy()
    kept, kl, d = np.isin(tokens["state"], (KEPT, TRUNCATED)), tokens["kl"].astype(np.float64), tokens["d"]
    found.tokens += int(valid.sum())
    found.kl += float(kl[valid].sum())
    shown = {
        "log π − log μ": (D_EDGES, d[valid], d[kept]),
        "weight": (WEIGHT_EDGES, np.exp(np.clip(d[valid], -20, 20)), tokens["weight"][kept]),
    }
    for name, (edges, raw, applied) in shown.items():
        inside = [np.histogram(np.clip(x, edges[0], edges[-1]), edges)[0] for x in (raw, applied)]
        found.histograms[name] = found.histograms.get(name, 0.0) + np.stack(inside)

    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    spans = version_spans(batch)
    values: dict[str, NDArray[Any] | None] = {
        "position": np.arange(len(d)) - starts,
        "length": np.repeat(lengths, lengths),
        "probability": None if found.diffusion else np.exp(np.minimum(tokens["mu"], 0)),  # a density is none
        "turn": turns_of(tokens["state"] != MASKED, lengths) - 1,
        "version lag": None if spans is None else np.repeat(spans[0] - spans[1], spans[2]),
    }
    for name, value in values.items():
        if value is None:
            continue
        edges = BREAKDOWNS[name]
        bins = np.clip(np.digitize(value, edges) - 1, 0, len(edges) - 1)
        columns = (valid, kl * valid, kept, kl * kept, tokens["weight"] * kept)
        sums = np.stack([np.bincount(bins, column, len(edges)) for column in columns])
        found.breakdowns[name] = found.breakdowns.get(name, 0.0) + sums


def packed_tokens(found: TokenRows, name: str, decode: Callable[[int], str] | None = None) -> dict[str, Any]:
    """Return the tokens of a run in the format of the page's script.

    Args:
        found: result of `read_tokens`.
        name: name of the run.
        decode: token id → text; default: show ids.

    Returns:
        A JSON-compatible dictionary with base64-packed arrays.
    """
    tokens = np.concatenate([row.tokens for row in found.rows]) if found.rows else np.zeros(0, TOKEN)
    ids = np.unique(tokens["id"])
    prompts = [row.prompt for row in found.rows]
    asked = {token for prompt in prompts if not isinstance(prompt, str) for token in prompt}
    texts = {} if decode is None else {int(i): decode(int(i)) for i in sorted(asked.union(ids[ids >= 0].tolist()))}

    # Step s trains the policy of version s − 1, unless a token has version s: then the first bin of lags is not empty.
    shift = {key: int(key == "version lag" and not sums[0, 0]) for key, sums in found.breakdowns.items()}
    arrays = {key: pack(np.clip(tokens[key], -6e4, 6e4), "f2") for key in ("mu", "d", "weight")}
    if found.diffusion:
        arrays |= {"time": pack(tokens["time"], "f4"), "stepKl": pack(tokens["kl"], "f4")}
    return {
        "run": name,
        "diffusion": found.diffusion,
        "files": found.files,
        "applied": found.config is not None and found.config.weights_reach_loss,
        "config": None if found.config is None else found.config.to_dict(),
        "sequences": found.sequences,
        "shown": len(found.rows),
        "count": found.tokens,
        "kl": found.kl,
        "prompts": prompts,
        "texts": texts,
        "pictures": {place: picture for place, (_, picture) in found.pictures.items()},
        **arrays,
        "state": pack(tokens["state"], "u1"),
        "id": pack(tokens["id"], "i4"),
        "length": pack([len(row.tokens) for row in found.rows], "i4"),
        "row": pack([row.place for row in found.rows], "i4"),
        "step": pack([row.step for row in found.rows], "i4"),
        "reward": pack([row.reward for row in found.rows], "f4"),
        "rowKl": pack([row.kl for row in found.rows], "f4"),
        "breakdowns": {
            key: {
                "edges": BREAKDOWNS[key][: len(BREAKDOWNS[key]) - shift[key]].tolist(),
                "sums": sums[:, shift[key] :].tolist(),
            }
            for key, sums in found.breakdowns.items()
        },
        "histograms": {
            key: {"edges": {"weight": WEIGHT_EDGES}.get(key, D_EDGES).tolist(), "counts": counts.tolist()}
            for key, counts in found.histograms.items()
        },
    }
