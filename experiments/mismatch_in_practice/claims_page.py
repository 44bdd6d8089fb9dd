"""Every claim of the document on one page: `measured.py --page` and `trained.py --page` write it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from claims import CLAIMS, SECTIONS, Claim
from claims_verdicts import WORDS, Evidence, Verdict, committed_evidence, overall

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
    yield f"**{number}.** {claim.text}" + (f" ({claim.also})" if claim.also else "") + "  "
    yield f"→ **{verdict.word}**" + str(verdict)[len(verdict.word) :]
    yield ""
    for source, part in found.items():
        yield from _bullet(source, part, alone=len(found) == 1)


def _bullet(source: str, part: Verdict | None, *, alone: bool) -> Iterator[str]:
    """What a source saw; its own verdict too where it is one of several."""
    if part is None:
        yield f"- *{source}*: not measured yet"
    elif not alone:
        yield f"- *{source}* {part}. {part.seen}".rstrip()
    elif part.seen:
        yield f"- *{source}*: {part.seen}" if source else f"- {part.seen}"
