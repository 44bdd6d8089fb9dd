"""A correction in thirty lines, written from `rollcorr conformance --help` alone, before the suite existed."""

import torch


def correct_batch(
    train_log_prob, rollout_log_prob, response_mask, *, level="token", ceiling=2.0, geometric_band=None, veto=None
):
    mask = response_mask.float()
    log_ratio = train_log_prob - rollout_log_prob
    ratio = torch.exp(log_ratio)
    mean_log_ratio = (log_ratio * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True)

    keep = mask.clone()
    if geometric_band is not None:
        low, high = geometric_band
        perplexity_ratio = torch.exp(-mean_log_ratio)
        keep = keep * (perplexity_ratio >= low) * (perplexity_ratio <= high)
    if veto is not None:
        keep = keep * (ratio >= veto)
    if level is None:
        return {"loss_mask": keep.bool(), "k3": ((ratio - 1 - log_ratio) * mask).sum() / mask.sum()}

    weights = ratio if level == "token" else torch.exp(mean_log_ratio).expand_as(ratio)
    weights = torch.clamp(weights, max=ceiling)
    ess = weights.sum() ** 2 / (weights**2).sum()
    k3 = ((ratio - 1 - log_ratio) * mask).sum() / mask.sum()
    return {"weights": weights * keep, "loss_mask": keep.bool(), "ess": ess / mask.sum(), "k3": k3}
