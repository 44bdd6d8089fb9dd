"""Every claim of the document on one page: `measured.py --page` and `trained.py --page` write it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from claims import CLAIMS, SECTIONS, Claim
from claims_verdicts import PARTLY, WORDS, Evidence, Verdict, committed_evidence, overall

HERE = Path(__file__).resolve().parent
FRAME = HERE / "claims_frame.md"
PAGE = HERE / "claims.md"


def claims_text(evidence: Evidence) -> str:
    """The page, from the tables and cells."""
    judged = [(claim, {source: judge(evidence) for source, judge in claim.judges.items()}) for claim in CLAIMS]
    verdicts = [overall(list(found.items())) for _, found in judged]
    lines = list(_summary(verdicts))
    section = ""
    for number, ((claim, found), verdict) in enumerate(zip(judged, verdicts, strict=True), 1):
        if claim.section != section:
            section = claim.section
            lines += ["", f"## {section} {SECTIONS[section]}"]
        lines += ["", *_block(number, claim, found, verdict)]
    return FRAME.read_text(encoding="utf-8") + "\n".join(lines) + "\n"


def write_claims_page() -> Path:
    """Write claims.md; its path."""
    PAGE.write_text(claims_text(committed_evidence()), encoding="utf-8")
    return PAGE


def _summary(verdicts: list[Verdict]) -> Iterator[str]:
    """The numbers of the claims by verdict."""
    yield "| verdict | claims | their numbers |"
    yield "| --- | --- | --- |"
    for word in WORDS:
        numbers = [str(number) for number, verdict in enumerate(verdicts, 1) if verdict.word == word]
        if numbers:
            yield f"| {word} | {len(numbers)} | {', '.join(numbers)} |"


def _block(number: int, claim: Claim, found: dict[str, Verdict | None], verdict: Verdict) -> Iterator[str]:
    """A claim, its verdict, and what each source saw."""
    place = claim.also if claim.also.startswith("figure") else f"also {claim.also}"
    yield f"**{number}.** {claim.text}" + (f" ({place})" if claim.also else "") + "  "
    yield f"→ **{verdict.word}**" + str(verdict)[len(verdict.word) :]
    bullets = [line for source, part in found.items() for line in _bullet(source, part, alone=len(found) == 1)]
    yield from ["", *bullets] if bullets else []


def _bullet(source: str, part: Verdict | None, *, alone: bool) -> Iterator[str]:
    """What a source saw; its own verdict too where it is one of several."""
    if part is None:
        yield f"- *{source}*: not measured yet"
    elif not alone:
        # Which part repeats is said above, in the verdict of the claim.
        own = part.word if part.word == PARTLY else str(part)
        yield f"- *{source}* ({own}): {_signs(part.seen)}".rstrip(": ")
    elif part.seen:
        yield f"- *{source}*: {_signs(part.seen)}" if source else f"- {_signs(part.seen)}"


def _signs(text: str) -> str:
    """Numbers with a minus sign, as in the formulas beside them."""
    return re.sub(r"(?<![\w^])-(?=\d)", "−", text)
