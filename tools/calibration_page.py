"""docs/calibration.md: how thresholds are calibrated, and the table of what noise does to customary ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollcorr.diagnostics.advice.noise_table import NOISE_LENGTHS, SIGMAS, NoiseRow, noise_table
from rollcorr.diagnostics.advice.situations import FEW_TIMES, SEQUENCE_WEIGHTS_UNTIL, SITUATIONS
from rollcorr.diagnostics.advice.spliced_rows import FEWEST
from rollcorr.diagnostics.report.advice_text import share_text

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


def calibration_page(generated: str, table: Table) -> str:
    """The page, as Markdown."""
    rows = noise_table()
    sections = "\n\n".join(
        f"### T = {length:,}\n\n{_table_at(rows, place, table)}" for place, length in enumerate(NOISE_LENGTHS)
    )
    situations = table(
        ("mismatch", "signs", f"T × KL below {SEQUENCE_WEIGHTS_UNTIL:g}", "beyond"),
        [(one.name, one.signs, f"`{one.short}`", f"`{one.long}`") for one in SITUATIONS],
    )
    return f"""# Calibrated thresholds

{generated}

A threshold rejects noise and faults alike, and how much noise it rejects depends on the engine and on the length. So take it from a
[null](null.md), not from a table, and [remove what can be removed](remove_the_mismatch_first.md) before that.

```bash
rollcorr null first_rollouts/ -o null.json
rollcorr calibrate null.json --rate 0.05 --lengths 500,8000 -o thresholds.json
rollcorr advise rollouts/ --null null.json             # a preset, reasons and YAML; or what to repair first
rollcorr check rollouts/ --null null.json --what-if    # every preset side by side on this log
rollcorr calibrate --noise                             # the table below
```

In Python: `rollcorr.diagnostics.calibrate`, `advise`, `noise_table`, and `check_logs(…, what_if=True)`.

## What is calibrated

For each length a threshold that rejects the rate: of the sequences for `seq_*`, the veto and sequence or geometric weights, of the tokens
for `token_*` and token weights (there the length does not matter). A band has half of the rate on each side, a ceiling all of it. The
alarms on k3 and on the standard deviation of d are for a whole step of `--sequences` sequences.

- *Rows are the sampling unit.* Tokens of one response depend on each other, responses count as independent. Responses to one prompt are
  alike too: take many prompts.
- *Intervals* have a nominal coverage of 95 %. Where the null has {FEWEST} responses or more within a quarter of the length, and for extremes,
  they lie between order statistics; elsewhere whole responses are drawn anew. They are about the sampling of the null: another engine or
  model needs a null of its own.
- *Other lengths.* A shorter length is cut from the sample of the null's tokens (131,072 at most). A longer one is made of responses put
  end to end; the output then says that it is extrapolated, because it leaves out what a longer context changes.
- *How exact.* With n responses the rejected share has a standard error of √(0.05 · 0.95 / n): 0.5 points for 2,000. At a length that is
  spliced, the mean of the null counts as often as there are responses in a splice: take 4,000 responses or more.

## Advice

A named cause comes first: the answer is then "do not correct", and how to repair it. Weights of a recorded age are no fault. Else the
rules of [choosing.md](choosing.md):

{situations}

The threshold of `seq_mean_k3` is that of the null at the mean length of the log, or {FEW_TIMES:g} times the k3 of the log where that is
more. The band of `seq_sum_k1` is never narrower than the noise.

## What if

`rollcorr check --what-if` reads the log once. Presets that do the same to a log stand in one line.

| column | what it is |
|---|---|
| sequences rejected, tokens rejected | the shares that leave the loss; a weight of 0 counts as rejected |
| ESS | (Σ w)² / (N Σ w²) over all N tokens, rejected ones with weight 0 |
| gradient change | ‖after − before‖ / ‖before‖ of the coefficients w m A of the log-probs' gradients, each divided by the tokens that are left; these gradients count as orthogonal and of one length. Without the column `advantages`: not recorded |
| k3 beyond random | mean k3 of the log minus that of what is left, with the standard error that rejecting as many at random would have. A filter on k3 lowers it by construction; one that does not lower it by more than two standard errors rejects at random |

Whether a filter makes the gradient better is another question: [laboratory.md](laboratory.md) answers it where the exact one is known.

## What noise does to customary limits

The share that noise alone puts outside each limit of a preset or of [choosing.md](choosing.md), and the effective sample size that it
leaves. Tokens are independent and normal: d ~ N(−σ²/2, σ²), so k3 = σ²/2. The means of k2 and k3 count as normal, too.

{sections}
"""


def _table_at(rows: Sequence[NoiseRow], place: int, table: Table) -> str:
    """The table of one length: a row for each limit, a column for each σ."""
    shares: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        shares.setdefault((row.limit, row.shows), []).append(share_text(row.shares[place]))
    header = ("limit", "share", *(f"σ = {sigma:g}" for sigma in SIGMAS))
    return table(header, [(f"`{limit}`", shows, *cells) for (limit, shows), cells in shares.items()])
