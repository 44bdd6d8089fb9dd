"""Read the body of an answer up to a size limit, which counts both the received and the unpacked bytes."""

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

# Maximum number of characters of a server's text in an error.
SHOWN = 500

# Secrets are redacted in this many characters before the text is cut to the limit above. So a secret that begins
# inside the limit is recognized by its end as well.
READ_FOR_SECRETS = 16 * SHOWN

# A JSON list or mapping needs up to 250 bytes in Python and 2 in the text. One per 16 bytes of the limit exceeds
# any real answer of an engine, and bounds the memory.
BYTES_PER_CONTAINER = 16

# zlib's code for a gzip header.
_GZIP_WBITS = 16 + zlib.MAX_WBITS


class _RedactingRepr(reprlib.Repr):
    """Formatter that redacts secrets in a value, then shortens it."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact_text(x[:READ_FOR_SECRETS]), level)


_redacting_repr = _RedactingRepr()
_redacting_repr.maxlevel, _redacting_repr.maxstring, _redacting_repr.maxother, _redacting_repr.maxlong = 4, 300, 300, 40
_redacting_repr.maxlist = _redacting_repr.maxdict = _redacting_repr.maxtuple = 12


def brief(value: object) -> str:
    """Return a value of an answer as text for an error: always short, even for a large or deeply nested value."""
    return _redacting_repr.repr(value)[: 2 * SHOWN]


def printable(text: str) -> str:
    """Return the start of a server's text without secrets and terminal control characters."""
    shown = redact_text(text[:READ_FOR_SECRETS])[:SHOWN]
    return "".join(c if c.isprintable() else " " for c in shown).strip()


def read_body(response: httpx.Response, *, limit: int, between: Callable[[], None]) -> tuple[bytearray, str | None]:
    """Return the start of a streamed answer's unpacked body, and why it is incomplete, or None.

    httpx unpacks a full chunk at a time, and repeatedly if the answer names several encodings: a megabyte of gzip
    becomes gigabytes. So this function reads the raw bytes and limits the output of zlib.

    Args:
        response: an unread streamed response.
        limit: maximum size of the body in bytes, packed or unpacked.
        between: callback before each chunk; raises to stop the reading.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", ""):
        return bytearray(), (
            f"in Content-Encoding {printable(encoding)!r}, and only gzip was offered: turn compression off on the "
            "server, or on the proxy before it"
        )

    unpacker = zlib.decompressobj(_GZIP_WBITS) if encoding == "gzip" else None
    body, received = bytearray(), 0
    for piece in response.iter_raw():
        between()
        received += len(piece)
        try:
            body += piece if unpacker is None else unpacker.decompress(piece, limit + 1 - len(body))
        except zlib.error as error:
            return body, f"with a body that is no gzip: {error}"
        if max(len(body), received) > limit:
            return body[:limit], _too_long_message(limit)

    if unpacker is not None and not unpacker.eof:
        return body, "with gzip that ends too early"
    return body, None


def parse_json(body: bytearray, problem: str | None, *, limit: int, where: str) -> Any:  # noqa: ANN401 (any JSON)
    """Parse a body from `read_body` as JSON.

    Raises:
        EngineAnswerError: the body is incomplete or not JSON, is nested too deeply, or contains more lists and mappings
            than the memory limit allows.
    """
    if problem is None and body.count(b"[") + body.count(b"{") > limit // BYTES_PER_CONTAINER:
        problem = _too_long_message(limit)
    if problem is not None:
        raise EngineAnswerError(f"{where} was answered {problem}")
    try:
        return json.loads(body)
    except RecursionError:
        raise EngineAnswerError(f"{where} was answered with JSON that is nested too deeply") from None
    except ValueError as error:
        text = printable(body[:READ_FOR_SECRETS].decode("utf-8", "replace"))
        raise EngineAnswerError(f"{where} did not answer in JSON ({printable(str(error))}): {text!r}") from error


def _too_long_message(limit: int) -> str:
    return (
        f"with more than {limit / 1e6:g} MB, unpacked, or with more lists and mappings than that holds; nothing of it "
        "is used. If answers of this length are right, raise max_answer_megabytes"
    )
