"""One ranked list of what may be wrong, from everything that looked at a log.

Three sources name causes: the pairs of log-probs (`provenance`), the comparison with a null (`null.excess`) and the
series of steps. One fault shows in several of them. So a cause that explains another finding takes it as its
consequence, and what is left is sorted: most likely first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rollcorr.config.finding import Finding

NOT_A_CAUSE = frozenset({"matched", "processed", "ordinary_noise", "unexplained", "excess"})
"""Codes that say that nothing, or nothing known, was found."""
COURSE_OF_A_CAUSE = frozenset({"changed_at_step", "growing_mismatch", "token_share_rose", "above_null"})
"""Codes that say when or by how much the mismatch changed: they go under whatever says why."""
SETTINGS_AGREE = "the sampling settings agree"
"""What "matched" says where the weights have a finding of their own."""
WEAK = 0.5
"""Confidence of a cause whose own is not known."""

_EXPLAINED_BY: Mapping[str, frozenset[str]] = {
    "weights_differ": frozenset({"stale_by_lag", "frozen_sampler", "moe_routing_differs"}),
    "stochastic_trainer": frozenset({"moe_routing_differs"}),
    "zeros": frozenset({"placeholder", "foreign_tokens", "truncated"}),
    "sentinel": frozenset({"placeholder", "foreign_tokens"}),
    "contradicted_zeros": frozenset({"placeholder", "foreign_tokens", "truncated", "zeros"}),
}
"""Consequence → the causes that explain it, besides the rules of `rank_hypotheses`."""


def in_one_message(
    pairs: Sequence[Finding], profile: Sequence[Finding], *, judged_against: str
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """The findings of the pairs and of the null, without what one says and the other has overtaken.

    The pairs see the settings alone, so "matched" says that the weights are not judged. Where a null judged them too,
    one message says both; where a cause was found, "matched" is left with the settings.

    Args:
        pairs: findings of provenance.
        profile: findings of the comparison with a null, or of the token ids.
        judged_against: what the weights were compared with; empty without a null.

    Returns:
        The findings of the pairs, and those of the profile.
    """
    if not profile or not any(finding.code == "matched" for finding in pairs):
        return tuple(pairs), tuple(profile)

    if any(_is_cause(finding) for finding in profile):
        settings_alone = [
            replace(finding, title=SETTINGS_AGREE, reason="no pattern of a setting in the log-ratios", confirm="")
            if finding.code == "matched"
            else finding
            for finding in pairs
        ]
        return tuple(settings_alone), tuple(profile)

    both = f"{SETTINGS_AGREE}, and the mismatch is the ordinary noise of {judged_against}"
    return (
        tuple(finding for finding in pairs if finding.code != "matched"),
        tuple(replace(finding, title=both) if finding.code == "ordinary_noise" else finding for finding in profile),
    )


def rank_hypotheses(
    *, pairs: Sequence[Finding] = (), profile: Sequence[Finding] = (), series: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """What may be wrong, most likely first; consequences follow their cause and name it in `follows_from`.

    Two settings of sampling, or log-probs of other tokens, change every number behind the other two sources. So a
    cause that the pairs show, for at least half of the rows, explains what the null and the series show.

    Args:
        pairs: findings of provenance, of the recorded settings and of the log's validation.
        profile: findings of the comparison with a null.
        series: findings of the steps and versions.

    Returns:
        Each finding once for each code: causes first, then what is unexplained, then notes. A finding that another
        source explains has `follows_from`.
    """
    distinct: dict[str, Finding] = {}
    for finding in (*pairs, *profile, *series):
        first = distinct.setdefault(finding.code, finding)
        # What one source sees in a few rows and another in the whole log is a fault of the log.
        if _is_cause(finding) and _concerns_most_rows(finding) and not _concerns_most_rows(first):
            distinct[finding.code] = finding

    main = _first_of(pairs, lambda finding: _is_cause(finding) and _concerns_most_rows(finding))
    behind_noise = _first_of((*series, *profile), _is_cause)
    # Pairs see that a mismatch fades, and take it for another prompt. A null tells a stale prefix cache from that.
    first_behind = next((finding.code for finding in profile if _is_cause(finding)), None)
    cache = first_behind == "stale_prefix_cache"
    if cache and main is not None and main.code == "template":
        main = None

    behind = {finding.code for finding in (*profile, *series)}
    why = _first_of((*series, *profile), lambda finding: _is_cause(finding) and finding.code not in COURSE_OF_A_CAUSE)

    ranked = []
    for code, finding in distinct.items():
        cause = finding.follows_from
        if cause is None and cache and code == "template" and finding in pairs:
            cause = "stale_prefix_cache"
        if cause is None and main is None and why is not None and code in COURSE_OF_A_CAUSE:
            cause = why.code
        if cause is None and finding.severity != "note":
            cause = _cause_of(code, main=main, other=behind_noise, present=distinct, from_null=code in behind)
        ranked.append(replace(finding, follows_from=cause))
    return tuple(sorted(ranked, key=_order))


def _cause_of(
    code: str, *, main: Finding | None, other: Finding | None, present: Mapping[str, Finding], from_null: bool
) -> str | None:
    """The code of the finding that explains this one."""
    for cause in sorted(_EXPLAINED_BY.get(code, ())):
        if cause in present and _is_cause(present[cause]):
            return cause
    if main is not None and from_null and code != main.code:
        return main.code

    # A large difference without a pattern is what other weights look like to a pair.
    if code in ("unexplained", "excess"):
        return next((cause.code for cause in (main, other) if cause is not None), None)
    return None


def _is_cause(finding: Finding) -> bool:
    return finding.severity != "note" and finding.code not in NOT_A_CAUSE


def _concerns_most_rows(finding: Finding) -> bool:
    return finding.row_share is None or finding.row_share >= 0.5


def _first_of(findings: Iterable[Finding], accepts: object) -> Finding | None:
    accepted = [finding for finding in findings if accepts(finding)]  # type: ignore[operator]
    return min(accepted, key=_order) if accepted else None


def _order(finding: Finding) -> tuple[bool, bool, bool, float, float]:
    """Sort key: causes, then consequences, then the unexplained, then notes; the most certain first."""
    confidence = WEAK if finding.confidence is None else finding.confidence
    share = 1.0 if finding.row_share is None else finding.row_share
    return (
        finding.severity == "note",
        finding.follows_from is not None,
        finding.code in NOT_A_CAUSE,
        -share,
        -confidence,
    )
