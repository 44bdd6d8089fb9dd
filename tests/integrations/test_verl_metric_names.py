"""The table of metric names: each name that a function of 2025 reports has a row, and `explain` answers for it."""

import pytest
import torch

from rollcorr.core.metric_names import OLDER_NAMES
from rollcorr.core.metric_registry import METRICS, metric
from rollcorr.diagnostics.metric_explanation import explain_metric
from rollcorr.integrations import verl
from rollcorr.integrations.verl import v2025_10, v2025_11

DATA = torch.tensor([[-0.1, -0.9], [-0.4, -0.2]]), torch.tensor([[-0.3, -0.2], [-0.4, -0.8]]), torch.ones(2, 2)


def reported_names(verl_parity):
    """Names that the functions of both older generations return, over their levels and modes."""
    names = set()
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "mask"):
            names |= v2025_10.compute_rollout_importance_weights(
                *DATA, level, mode, 2.0, rollout_is_veto_threshold=1e-4, verl_parity=verl_parity
            )[2].keys()
        names |= v2025_11.compute_rollout_correction_and_rejection_mask(
            *DATA, "sequence", rollout_rs=level, rollout_token_veto_threshold=1e-4, verl_parity=verl_parity
        )[2].keys()
    return names


def is_newest(name):
    try:
        return bool(metric(name))
    except KeyError:
        return False


def test_table_covers_names_of_both_releases():
    reported = reported_names(verl_parity=True)
    assert reported <= OLDER_NAMES.keys()
    # Masked fractions of October under the prefix of November are in the table only.
    assert {name.rpartition("_is_")[2] for name in OLDER_NAMES.keys() - reported} == {
        "masked_fraction", "seq_masked_fraction",
    }  # fmt: skip


def test_own_functions_report_table_or_registry():
    for name in reported_names(verl_parity=False):
        assert name in OLDER_NAMES or is_newest(name), name


def test_newest_function_reports_registry_names():
    _, _, metrics = verl.compute_rollout_correction_and_rejection_mask(
        *DATA, rollout_is="sequence", rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2,0.1"
    )
    assert all(is_newest(name) for name in metrics)


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_explain_answers_for_older_name(name):
    found = explain_metric(name)
    assert found["metric"] == f"rollout_corr/{OLDER_NAMES[name].newest}"
    if name.removeprefix("rollout_corr/") not in METRICS:
        assert found["older name"] == name
        assert found["change"] == (OLDER_NAMES[name].change or "none")


def test_changed_mean_is_where_table_says():
    """`rollout_is_mean` of the release is `rollout_is_raw_mean` of today."""
    release = v2025_10.compute_rollout_importance_weights(*DATA, rollout_is_threshold=1.1, verl_parity=True)[2]
    _, _, today = verl.compute_rollout_correction_and_rejection_mask(
        *DATA, rollout_is="token", rollout_is_threshold=1.1
    )
    assert release["mismatch/rollout_is_mean"] == pytest.approx(today["rollout_corr/rollout_is_raw_mean"], rel=1e-5)
    assert today["rollout_corr/rollout_is_mean"] < today["rollout_corr/rollout_is_raw_mean"]
