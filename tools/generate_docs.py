"""Write the pages of docs/ that are made from tables in the code, and the stub that is.

    python tools/generate_docs.py            write every page
    python tools/generate_docs.py --check    write nothing; exit 1 and name the pages that are out of date

A page is a function that returns its text; add it to PAGES.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from api_pages import api_pages  # noqa: E402
from calibration_page import calibration_page  # noqa: E402
from conformance_page import conformance_page  # noqa: E402
from findings_page import findings_page  # noqa: E402
from laboratory_page import laboratory_page  # noqa: E402
from lines_page import lines_page  # noqa: E402
from option_types import option_types_stub  # noqa: E402
from options_page import options_page  # noqa: E402
from performance_page import performance_page  # noqa: E402
from references import linked, preset_source  # noqa: E402
from rollout_log_pages import dumps_page, schema_page  # noqa: E402
from written_parts import contributing_page, install_page  # noqa: E402

from rollcorr.config import RolloutCorrectionConfig  # noqa: E402
from rollcorr.config.presets import PRESETS, SHORT, START_WITH, VERL_2025_11, VERL_2025_12  # noqa: E402
from rollcorr.core.detail_rows import RELATIVE_ERROR, TOP  # noqa: E402
from rollcorr.core.health_ranges import HealthyRange  # noqa: E402
from rollcorr.core.lag_statistics import SLOW  # noqa: E402
from rollcorr.core.metric_names import OLDER_NAMES  # noqa: E402
from rollcorr.core.metric_registry import CRITERIA, METRICS, PREFIX, Metric, criterion_metrics, metric  # noqa: E402
from rollcorr.core.metric_tables import DIFFUSION_METRICS, LAG_METRICS  # noqa: E402

GENERATED = "<!-- Written by tools/generate_docs.py. Edit the table in the code, then run it again. -->"

TRAINER_METRICS = (
    (
        "`reward/mean`, `reward/std`, `reward/accuracy`",
        "reward, reward, share",
        "mean, standard deviation and share of correct answers over all sampled responses of the step, including those "
        "that `rollout.max_rounds` replaced",
    ),
    ("`rollout/rounds`", "rounds", "rounds of sampling in this step, at most `rollout.max_rounds`"),
    ("`rollout/differing_groups`", "share", "groups with unequal rewards, over all rounds"),
    ("`response/length_mean`", "tokens", "mean length of the responses, including the end token"),
    (
        "`actor/loss`, `actor/grad_norm`",
        None,
        "loss, and gradient norm before clipping: means over the optimizer steps",
    ),
    (
        "`actor/policy_kl`",
        "nats",
        "mean of log π_old − log π_θ (in bypass mode log μ − log π_θ) over tokens in the loss",
    ),
    ("`actor/clip_fraction_high`, `_low`, `_dual`", "share", "tokens where the clip binds and the gradient is 0"),
    ("`actor/entropy`, `actor/kl_ref`", "nats", "means over response tokens; `kl_ref` only with a reference policy"),
    (
        "`sampling/outside_fraction`",
        "share",
        "sampled tokens outside the trainer's kept set; 0 with `replay`; only with truncated sampling",
    ),
    (
        "`sampling/kept_mass`",
        "share",
        "mean mass of this kept set in the trainer's full softmax; only with truncated sampling",
    ),
    (
        "`actor/skipped_steps`",
        "optimizer steps",
        "steps skipped since the run began, because a loss or gradient was not finite or no token was kept",
    ),
    (
        "`engine/staleness`, `engine/staleness_max`",
        "policy versions",
        "mean and maximum age of the weights that sampled the response tokens",
    ),
    (
        "`perf/tokens_per_second`, `perf/…_seconds`",
        None,
        "response tokens per second; seconds of each phase of the step",
    ),
    (
        "`actor/kept_fraction`, `actor/kl_ref`",
        "share, nats per dimension",
        "in `flow_grpo`: share of denoising steps in the loss; KL to the reference policy",
    ),
    ("`picture/diversity`", "pixel value, 0 to 1", "standard deviation of a pixel among the pictures of one prompt"),
    ("`picture/color_accuracy`, `picture/shape_accuracy`", "share", "pictures with the prompt's color or shape"),
    (
        "`picture/background_noise`",
        "pixel value, 0 to 1",
        "root mean square deviation of the outermost pixels from the background",
    ),
    (
        "`perf/forward_passes`, `perf/images_per_second`",
        None,
        "in `flow_grpo`: forward passes of the trainer's transformer; pictures per second",
    ),
)
"""What `rollcorr train` logs besides the correction's metrics: name, unit, meaning."""


def presets_page() -> str:
    """docs/reference/presets.md: every preset with its exact values."""
    older = [name for name, preset in PRESETS.items() if preset.source in (VERL_2025_11, VERL_2025_12)]
    short = [name for name, preset in PRESETS.items() if preset.source == SHORT]
    current = [name for name in PRESETS if name not in older and name not in short]
    return f"""# Presets

{GENERATED}

Every preset (a named configuration) with its exact values and its source.

{START_WITH.replace("docs/guides/choosing.md", "[choosing.md](../guides/choosing.md)")}

`rollcorr presets` lists all presets, and `rollcorr presets NAME` prints one as YAML. The following three calls return
the same `RolloutCorrectionConfig`. Wherever a configuration is accepted, you can also pass the preset's name:
`rollcorr.correct(..., "decoupled_token_is")`.

```python
from rollcorr.config import RolloutCorrectionConfig

RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)
RolloutCorrectionConfig.preset("decoupled_token_is", threshold=2.0)
RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
```

Fields that the tables omit have their default values; a dash means null, or a threshold that is not used.

- The threshold of `rollout_is` is a ceiling on weights, or a band: outside the band, weights are 0.
- The threshold of a k1 criterion is a band on the ratio ρ = train / rollout. `0.5_2.0` keeps 0.5 ≤ ρ ≤ 2.0, a single
  number x keeps 1/x ≤ ρ ≤ x, and `0_2.0` and `0.5_inf` have one open side.
- The threshold of a k2 or k3 criterion is the largest divergence that is kept, in nats.

How much a band on a product of ratios rejects depends on the length of responses: first look at the rejected share.

## Values

{_value_table(current)}

## Arguments

{_argument_table(current)}

## Short names

Papers and other trainers use these names. A short name has the arguments of the preset that it stands for.

{_value_table(short)}

{_argument_table(short)}

## Older names

verl used these names in November and December 2025. Some have an argument for the lower end of the band.

{_value_table(older)}

{_argument_table(older)}

Where to go next: [choosing.md](../guides/choosing.md) for which preset fits your run, [options.md](options.md) for the
meaning of each field, [migration.md](../coming_from/migration.md) for configurations of verl.
"""


def _value_table(names: Sequence[str]) -> str:
    """One row a preset: the fields that any preset sets."""
    rows = []
    for name in names:
        config = RolloutCorrectionConfig.preset(name)
        other = {"apply_is": config.apply_is, "rollout_token_veto_threshold": config.rollout_token_veto_threshold}
        defaults = RolloutCorrectionConfig()
        changed = [f"`{key}={value}`" for key, value in other.items() if value != getattr(defaults, key)]
        rows.append(
            (
                f"`{name}`",
                config.rollout_is,
                config.rollout_is_threshold if config.rollout_is else None,
                config.rollout_rs,
                config.rollout_rs_threshold,
                "yes" if config.bypass_mode else "no",
                config.loss_type,
                ", ".join(changed) or None,
            )
        )
    header = ("preset", "rollout_is", "threshold", "rollout_rs", "threshold", "bypass", "loss", "other")
    return _table(header, rows)


def _argument_table(names: Sequence[str]) -> str:
    """One row a preset: its arguments with their defaults, and what it does."""
    rows = []
    for name in names:
        parameters = inspect.signature(getattr(RolloutCorrectionConfig, name)).parameters.values()
        arguments = ", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters)
        rows.append((f"`{name}({arguments})`", PRESETS[name].description, preset_source(name)))
    return _table(("call", "effect", "source"), rows)


def metrics_page() -> str:
    """docs/reference/metrics.md: every metric of the registry."""
    weights = [name for name in METRICS if name.startswith(("rollout_is_", "saturated_"))]
    weights = [name for name in weights if not _is_rejection(name)]
    rejection = [name for name in METRICS if _is_rejection(name)]
    detail = [name for name, row in METRICS.items() if row.finalizer.rows[0].startswith("histograms:")]
    weights = [name for name in weights if name not in detail]
    mismatch = [name for name in METRICS if name not in (*weights, *rejection, *detail)]
    return f"""# Metrics

{GENERATED}

Every metric with its unit, formula, healthy range and source.

`Correction.metrics()` returns the metrics with the prefix `{PREFIX}`. `rollcorr.core.metric(name)` and, on the command
line, `rollcorr explain METRIC` describe one metric.

[notation.md](notation.md) defines the symbols. V is the set of valid tokens, and tm the mean over V. R is the set of
sequences with a valid token, and sm the mean over R. The column "over" names the set that a metric summarizes. There,
"unit" means V if each token has its own weight (levels token and horizon), else R; "batch" means one number per batch.

- Sequences without a valid token are excluded. Standard deviations divide by n, not by n − 1.
- Counts, sums and moments are merged over micro-batches and ranks before any division, so no metric is an average of
  averages. Without data, a metric is 0.
- Means and shares exclude tokens with a missing log-prob (`nonfinite_count`); with `nonfinite="neutral"`, only the
  metrics of weights and criteria include them, as ratio 1. Means of log-ratios and log-probs also exclude tokens of
  probability zero (`zero_probability_count`). Shares of rejected tokens or sequences refer to all of V or R.

## Mismatch

Every configuration reports these metrics. d̂ and Ŝ_i are d and S_i clamped to ±20 nats, and `k3_kl` clamps d to at
most 20; `capped_fraction` and `chi2_seq_capped_fraction` are the shares beyond these limits. The other metrics of this
table use unclamped values.

{_metric_table(mismatch)}

## Importance weights

Configurations with `rollout_is` report these metrics, even if the loss ignores the weights (with `apply_is=False`, and
in bypass mode with `ppo_clip`). They describe the weights before batch normalization. The log weight ℓ is d, S_i or
G_i, depending on the level; ℓ̂ is ℓ clamped to ± `safety_bound`.

C and lo are the limits of the metrics `…_fraction_high` and `…_fraction_low`:

- With a ceiling, C is the ceiling, and lo is `rollout_is_floor` if set, else 1/C.
- With a band (IcePop), lo and C are its ends.
- With `rollout_is_threshold=None`, lo and C are the band of the k1 criterion at the weights' level. Without such a
  criterion, these metrics are absent.

`rollout_is_log_min` and `rollout_is_log_max` exist only at sequence and geometric level,
`rollout_is_low_weight_fraction` only with a threshold, `rollout_is_oob_ratio` only with a band, and
`rollout_is_batch_norm_factor` only with batch normalization.

{_metric_table(weights)}

## Rejection

A filter is a criterion, the veto, or the option `nonfinite`, which by default rejects tokens with a missing log-prob.
The `rollout_rs_*` metrics of this table describe all filters together, and every configuration reports them. The two
`rollout_is_*` metrics describe the veto, and exist only with `rollout_token_veto_threshold`.

{_metric_table(rejection)}

### Of each criterion

`CRITERION` is one of

{_wrapped(CRITERIA)}

x is the statistic of the criterion: k1 = −log ρ, k2 or k3 of a token (`token_*`), or their sum, mean or maximum over a
sequence (`seq_*`). x_i is the statistic of sequence i, which for `token_*` is the mean over its tokens. The bounds of
k1 apply to the ratio, so "above" means a large ratio; k2 and k3 have no lower bound.

{_criterion_table()}

## By the age of the weights

These metrics exist if the data record which version of the weights sampled each token (`policy_versions` in a rollout
log or in a batch for `Monitor.correct`), and if some tokens have lag 0. The lag of a token is the policy's version
minus the token's version. The policy of step s has version s − 1, or s if a token of version s was seen. If
versions rise without large jumps, by less than {SLOW:g} per training step, they number weight syncs: the
policy's version is the newest seen. `rollcorr check --json` lists k3 by lag with its standard error over the
steps. Look at this error too, because a few tokens can contribute most of k3.

{_metric_table(LAG_METRICS)}

## Denoising steps

[Diffusion models](../guides/diffusion.md) have denoising steps in place of tokens. `rollcorr.diffusion` reports the
metrics above for the steps of the sampler's window, except perplexities and differences of probabilities, because a
density has neither. The prefix is `rollout_corr/` in decoupled mode. In bypass mode it is `actor/rollout_corr/`, and
each step counts as a sequence.

Log-probs of a step are averages over the D latent dimensions. J = D · (log π − log μ) is its joint log-ratio. In the
metrics above, d is p · J; `reduction` sets the power p. m and m_μ are the means of the step's distribution under
trainer and sampler, and s is its standard deviation. `log_prob_abs_diff/t_VALUE` is the mean of |J / D| at one
timestep value. The metrics of each criterion also exist for `step_kl`, except shares rejected by this filter alone
or jointly.

{_metric_table(DIFFUSION_METRICS)}

## Quantiles

Only `correct(..., detail=True)` computes quantiles, because they need a second pass over the batch. They come from
histograms with fixed bins, so they merge exactly, with a relative error of at most 1/{round(1 / RELATIVE_ERROR)}.
S_i is −inf if the sequence contains a token of probability zero. With `detail=True`, `Correction.worst()` returns the
{TOP} tokens with the largest |d| and the {TOP} sequences with the largest |S_i|.

{_metric_table(detail)}

## Names of 2025

`rollcorr.integrations.verl.v2025_10` and `.v2025_11` report metrics under the names of verl's two older generations,
and `rollcorr explain` accepts these names. Metrics that are not in this table have no older name.

{_older_names()}

## Trainer

`rollcorr train` also logs the metrics of this table. In decoupled mode its `rollout_corr/…` metrics compare π_old with
μ, once per batch. In bypass mode they compare π_θ with μ in every forward pass of the update.

{_table(("metric", "unit", "meaning"), TRAINER_METRICS)}

## Healthy ranges

A value equal to a limit does not warn. [health.md](../guides/health.md) describes how the limits judge a run, and
[troubleshooting.md](../guides/troubleshooting.md) what to do in which order.

{_range_table()}

Where to go next: [health.md](../guides/health.md) for the verdict on a run, [notation.md](notation.md) for the symbols,
[presets.md](presets.md) for corrections of a mismatch.
"""


def _older_names() -> str:
    """One row a metric of today: its names of 2025, and the change of meaning."""
    rows: dict[tuple[str, str], list[str]] = {}
    for old, (newest, change) in OLDER_NAMES.items():
        rows.setdefault((newest, change), []).append(f"`{old}`")
    header = ("2025", "today", "change of meaning")
    return _table(header, [(", ".join(old), f"`{new}`", change or "none") for (new, change), old in rows.items()])


def _is_rejection(name: str) -> bool:
    return name.startswith("rollout_rs_") or name in (
        "rollout_is_veto_fraction",
        "rollout_is_catastrophic_token_fraction",
    )


def _metric_table(names: Iterable[str]) -> str:
    """One row a metric."""
    header = ("metric", "unit", "over", "formula", "healthy", "source")
    return _table(header, [_metric_row(f"`{name}`", metric(name)) for name in names])


def _metric_row(label: str, row: Metric, formula: str | None = None) -> tuple[str | None, ...]:
    over = {"tokens": "V", "sequences": "R"}.get(row.sample, row.sample)
    healthy = row.healthy.ideal if row.healthy else None
    return label, row.unit, over, (formula or row.formula).replace("|", "\\|"), healthy, linked(row.source)


def _criterion_table() -> str:
    """One row a suffix; the samples of a token criterion are given where they differ from those of the others."""
    rows = []
    token, sequence = criterion_metrics("token_k2"), criterion_metrics("seq_mean_k2")
    for name, row in sequence.items():
        suffix = name.removeprefix("rollout_rs_seq_mean_k2_")
        formula = row.formula.replace("seq_mean_k2", "x_i" if suffix.startswith("seq_") else "x")
        cells = _metric_row(f"`rollout_rs_CRITERION_{suffix}`", row, formula)
        if token[f"rollout_rs_token_k2_{suffix}"].sample != row.sample:
            cells = (*cells[:2], "V (`token_*`) or R", *cells[3:])
        rows.append(cells)
    return _table(("metric", "unit", "over", "formula", "healthy", "source"), rows)


def _wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names) + ".", 120, break_on_hyphens=False)


def _range_table() -> str:
    """One row a metric that has a healthy range."""
    template = {name.replace(CRITERIA[0], "CRITERION"): row for name, row in criterion_metrics(CRITERIA[0]).items()}
    rows = [
        (f"`{name}`", row.healthy.ideal, _limits(row.healthy), row.healthy.reason, row.healthy.fix)
        for name, row in (METRICS | template).items()
        if row.healthy
    ]
    return _table(("metric", "ideal", "warns", "reason", "remedy"), rows)


def _limits(healthy: HealthyRange) -> str | None:
    """The limits in words; a dash when nothing warns."""
    value = "absolute value " if healthy.absolute else ""
    limits = (("below", healthy.warn_below), ("above", healthy.warn_above))
    return value + " or ".join(f"{side} {limit:g}" for side, limit in limits if limit is not None) or None


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *([("–" if cell is None else str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: dict[str, Callable[[], str]] = {
    "docs/guides/calibration.md": lambda: calibration_page(GENERATED, _table),
    "docs/background/laboratory.md": lambda: laboratory_page(GENERATED, _table),
    "docs/reference/metrics.md": metrics_page,
    "docs/background/performance.md": lambda: performance_page(GENERATED, _table),
    "docs/reference/options.md": lambda: options_page(GENERATED, _table),
    "docs/reference/findings.md": lambda: findings_page(GENERATED, _table),
    "docs/reference/conformance.md": lambda: conformance_page(GENERATED, _table),
    "docs/coming_from/other_frameworks.md": lambda: lines_page(GENERATED),
    "docs/reference/dumps.md": lambda: dumps_page(GENERATED, _table),
    "docs/reference/presets.md": presets_page,
    "docs/reference/rollout_log_schema.md": lambda: schema_page(GENERATED, _table),
    "src/rollcorr/config/option_types.pyi": option_types_stub,
} | api_pages(GENERATED, _table)

WRITTEN_PARTS = {"CONTRIBUTING.md": contributing_page, "docs/install.md": install_page}
"""Pages that people write, of which a part is generated."""


def outdated() -> list[str]:
    """Pages whose file differs from what the code says now."""
    return [
        path
        for path, page in (PAGES | WRITTEN_PARTS).items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    """Write or check every page."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/ that are made from tables in the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = outdated()
    for path in stale:
        if not check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text((PAGES | WRITTEN_PARTS)[path](), encoding="utf-8")
        print(f"{path}: {'out of date; run python tools/generate_docs.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
