"""Read the body of an answer and no more than was agreed: bytes are counted as they come and as they unpack."""

from __future__ import annotations

import json
import reprlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollcorr.config.secrets import redact_text
from rollcorr.engines.base import EngineAnswerError

if TYPE_CHECKING:
    import httpx

# How many characters of a server's text an error shows.
SHOWN = 500

# Of how many characters the secrets are hidden, before those that are shown are cut out. A secret that begins among the
# shown ones is recognized by its end, too.
READ_FOR_SECRETS = 16 * SHOWN

# A list or mapping of JSON takes up to 250 bytes in Python and 2 in the text. One per 16 bytes of the limit is more
# than answers of engines have, and bounds the memory.
BYTES_PER_CONTAINER = 16

# zlib's code for a gzip header.
_GZIP = 16 + zlib.MAX_WBITS


class _Brief(reprlib.Repr):
    """Shortens a value, and hides secrets before that."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact_text(x[:READ_FOR_SECRETS]), level)


_brief = _Brief()
_brief.maxlevel, _brief.maxstring, _brief.maxother, _brief.maxlong = 4, 300, 300, 40
_brief.maxlist = _brief.maxdict = _brief.maxtuple = 12


def brief(value: object) -> str:
    """A value of an answer as text for an error: never long, however large or deep the value is."""
    return _brief.repr(value)[: 2 * SHOWN]


def printable(text: str) -> str:
    """The beginning of a server's text, without its secrets and the characters that move a terminal's cursor."""
    shown = redact_text(text[:READ_FOR_SECRETS])[:SHOWN]
    return "".join(c if c.isprintable() else " " for c in shown).strip()


def read_body(response: httpx.Response, *, limit: int, between: Callable[[], None]) -> tuple[bytearray, str | None]:
    """Return the start of a streamed answer's unpacked body, and why it is not the whole body, or None.

    httpx unpacks a whole piece at a time, and repeatedly where several encodings are named: a megabyte of gzip becomes
    gigabytes. So the raw bytes are read here, and zlib is told how much it may give.

    Args:
        response: not read yet.
        limit: bytes that the body may have, packed or unpacked.
        between: called before each piece; raises to end the reading.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", ""):
        return bytearray(), (
            f"in Content-Encoding {printable(encoding)!r}, and only gzip was offered: turn compression off on the "
            "server, or on the proxy before it"
        )

    unpacker = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
    body, received = bytearray(), 0
    for piece in response.iter_raw():
        between()
        received += len(piece)
        try:
            body += piece if unpacker is None else unpacker.decompress(piece, limit + 1 - len(body))
        except zlib.error as error:
            return body, f"with a body that is no gzip: {error}"
        if max(len(body), received) > limit:
            return body[:limit], _too_long(limit)

    if unpacker is not None and not unpacker.eof:
        return body, "with gzip that ends too early"
    return body, None


def parse_json(body: bytearray, problem: str | None, *, limit: int, where: str) -> Any:  # noqa: ANN401 (any JSON)
    """Return the value of a body, both as `read_body` returns them.

    Raises:
        EngineAnswerError: the body is not whole or no JSON, is nested too deeply, or has too many lists and mappings
            for the memory.
    """
    if problem is None and body.count(b"[") + body.count(b"{") > limit // BYTES_PER_CONTAINER:
        problem = _too_long(limit)
    if problem is not None:
        raise EngineAnswerError(f"{where} was answered {problem}")
    try:
        return json.loads(body)
    except RecursionError:
        raise EngineAnswerError(f"{where} was answered with JSON that is nested too deeply") from None
    except ValueError as error:
        text = printable(body[:READ_FOR_SECRETS].decode("utf-8", "replace"))
        raise EngineAnswerError(f"{where} did not answer in JSON ({printable(str(error))}): {text!r}") from error


def _too_long(limit: int) -> str:
    return (
        f"with more than {limit / 1e6:g} MB, unpacked, or with more lists and mappings than that holds; nothing of it "
        "is used. If answers of this length are right, raise max_answer_megabytes"
    )
