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
        "over the step's responses, with those that `rollout.max_rounds` replaced; population deviation",
    ),
    ("`rollout/rounds`", "rounds", "of sampling in this step, at most `rollout.max_rounds`"),
    ("`rollout/differing_groups`", "share", "groups whose rewards are not all equal, of every round"),
    ("`response/length_mean`", "tokens", "with the end token"),
    ("`actor/loss`, `actor/grad_norm`", None, "mean over optimizer steps; norm before clipping"),
    (
        "`actor/policy_kl`",
        "nats",
        "mean of log π_old − log π_θ (in bypass mode log μ − log π_θ) over tokens in the loss",
    ),
    ("`actor/clip_fraction_high`, `_low`, `_dual`", "share", "tokens where the clip binds and the gradient is 0"),
    ("`actor/entropy`, `actor/kl_ref`", "nats", "over response tokens; `kl_ref` with a reference policy"),
    (
        "`sampling/outside_fraction`",
        "share",
        "sampled tokens outside the trainer's support; 0 with `replay`; only under a truncation",
    ),
    (
        "`sampling/kept_mass`",
        "share",
        "mean mass of that support in the trainer's whole softmax; only under a truncation",
    ),
    (
        "`actor/skipped_steps`",
        "optimizer steps",
        "skipped since the run began: a loss or gradient not finite, or no token kept",
    ),
    (
        "`engine/staleness`, `engine/staleness_max`",
        "policy versions",
        "age of the weights behind the response tokens: mean and maximum",
    ),
    ("`perf/tokens_per_second`, `perf/…_seconds`", None, "response tokens per second of the step; seconds by phase"),
    (
        "`actor/kept_fraction`, `actor/kl_ref`",
        "share, nats per dimension",
        "`flow_grpo`: steps in the loss; KL to the reference",
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
        "`flow_grpo`: forward passes of the trainer's transformer; pictures per second",
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

Every named configuration with its exact values and its source.

{START_WITH.replace("docs/guides/choosing.md", "[choosing.md](../guides/choosing.md)")}

A preset is a `RolloutCorrectionConfig` with a name. `rollcorr presets` lists them, and `rollcorr presets NAME`
prints one as YAML. The three spellings below mean the same; a fourth is the name,
wherever a configuration is accepted: `rollcorr.correct(..., "decoupled_token_is")`.

```python
from rollcorr.config import RolloutCorrectionConfig

RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)
RolloutCorrectionConfig.preset("decoupled_token_is", threshold=2.0)
RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
```

Fields that a table leaves out have their defaults; a dash is null, or an unused threshold. Thresholds of k1
criteria are bands on the ratio ρ = train / rollout: `0.5_2.0` keeps 0.5 ≤ ρ ≤ 2.0, a single number x means [1/x, x],
`0_2.0` and `0.5_inf` leave a side open. Thresholds of k2 and k3 are the largest divergence kept, in nats. A
`rollout_is` threshold is a ceiling on weights, or a band outside which they are 0. Bands around 1 depend on the length
of responses: look at the rejected share first.

## Values

{_value_table(current)}

## Arguments

{_argument_table(current)}

## Short names

What papers and other trainers call them. A short name takes the arguments of the preset that it stands for.

{_value_table(short)}

{_argument_table(short)}

## Older names

The names of November and December 2025. Their thresholds may be given as the two ends of the band.

{_value_table(older)}

{_argument_table(older)}

Where to go next: [choosing.md](../guides/choosing.md) for which preset fits your run, [options.md](options.md) for what
each field means, [migration.md](../coming_from/migration.md) for configurations of verl.
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
    return _table(("call", "what it does", "source"), rows)


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

Unit, formula, healthy range and source of every metric.

`Correction.metrics()` returns these under the prefix `{PREFIX}`; `rollcorr.core.metric(name)` looks one up, and so does
`rollcorr explain METRIC` on the command line.
Symbols follow [notation.md](notation.md): tm is the mean over V, the valid tokens, sm the mean over R, the
sequences with at least one. "over" is the sample; "unit" stands for V or R, whichever the level of the weights
counts; "batch" is one number for all.

- Rows without a valid token never count. Every standard deviation is the population one.
- Counts, sums and moments merge over micro-batches and ranks before a ratio is taken, so no number here is an
  average of averages. Without data a metric is 0.
- Means and shares leave out missing log-probs, and means in log space also tokens of probability zero; both are
  counted. Rejected shares are of all of V or R.

## Mismatch

Always there, whatever is done about it. d̂ and Ŝ_i are cut at ±20 nats, and `k3_kl` takes d up to +20; the shares
beyond are `capped_fraction` and `chi2_seq_capped_fraction`. Nothing else here is clamped.

{_metric_table(mismatch)}

## Importance weights

There when `rollout_is` is set, also with `apply_is=False` and in bypass PPO, where they change no loss. ℓ is d, S_i
or G_i by level, ℓ̂ the same clamped to ± `safety_bound`. They describe the weights before batch normalization. C and
lo are the ceiling and 1/C when truncating, the ends of the band for IcePop, and without a threshold the band of the
level's k1 criterion; without that too, the shares beyond them are absent. `rollout_is_log_min` and
`rollout_is_log_max` need a sequence or geometric level, `rollout_is_low_weight_fraction` a threshold,
`rollout_is_oob_ratio` a band, `rollout_is_batch_norm_factor` batch normalization.

{_metric_table(weights)}

## Rejection

The `rollout_rs_*` metrics are always there, because missing log-probs are rejected even without a criterion; those
of the veto when `rollout_token_veto_threshold` is set. The `rollout_rs_*` metrics of this table take criteria, veto
and non-finite policy together. Metrics that separate one filter from several count each of the three as a filter.

{_metric_table(rejection)}

### Of each criterion

`CRITERION` is one of

{_wrapped(CRITERIA)}

x is its statistic: k1 = −log ρ, k2 or k3, of a token (`token_*`) or as sum, mean or maximum of a sequence. x_i is
the statistic of a sequence; for `token_*`, the sequence's mean. For k1, "above" and "below" refer to ρ; k2 and k3
have no lower bound.

{_criterion_table()}

## By the age of the weights

There when the versions of the weights that sampled are known (`policy_versions` of a rollout log, or in the columns of
`Monitor.correct`), and some tokens have lag 0. The lag is the policy's version minus the token's. The policy of step s
has version s − 1, or s if a token of that version was seen. Versions that rise in small steps, and by less than
{SLOW:g} per training step, count weight syncs: then the policy's version is the newest one seen.
`rollcorr check --json` lists k3 by lag, with its standard error over the steps. A few tokens can carry most of k3, so
read a part together with its error.

{_metric_table(LAG_METRICS)}

## Denoising steps

Of [diffusion models](../guides/diffusion.md): a step of the sampler's window stands for a token, and
`rollcorr.diffusion` reports the metrics above of steps, but for perplexities and differences of probability, which
densities do not have. Prefix: `rollout_corr/` in decoupled mode, `actor/rollout_corr/` in bypass mode, where every step
is a sequence of its own. J = D · (log π − log μ) is the joint log-ratio of a step, from log-probs averaged over the D
latent dimensions; d above is p · J, with the power p that `reduction` names. `log_prob_abs_diff/t_VALUE` is the mean of
|J / D| at one timestep value. The metrics of each criterion also exist for `step_kl`; shares of tokens rejected by
one criterion only, and by several, are not counted.

{_metric_table(DIFFUSION_METRICS)}

## Quantiles

There when asked for, because they take a second read of the batch: `correct(..., detail=True)`. They come from
histograms with fixed bins, so they merge exactly, and are off by at most 1/{round(1 / RELATIVE_ERROR)} of
themselves. S_i is −inf with a token of probability zero. `Correction.worst()` then names the {TOP} tokens with the
largest |d| and the {TOP} sequences with the largest |S_i|.

{_metric_table(detail)}

## Names of 2025

The names of verl's two older generations, as `rollcorr.integrations.verl.v2025_10` and `.v2025_11` report them.
`rollcorr explain` takes them too. A name of today that is not here is newer.

{_older_names()}

## Trainer

`rollcorr train` logs these besides. In decoupled mode its `rollout_corr/…` metrics describe the batch once, π_old
against μ. In bypass mode they describe every forward pass of the update, π_θ against μ.

{_table(("metric", "unit", "what"), TRAINER_METRICS)}

## Healthy ranges

Limits are exclusive. [health.md](../guides/health.md) describes how they judge a run,
[troubleshooting.md](../guides/troubleshooting.md) what to do in which order.

{_range_table()}

Where to go next: [health.md](../guides/health.md) for the verdict on a run, [notation.md](notation.md) for the symbols,
[presets.md](presets.md) for what is done about a mismatch.
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
