"""Passwords, tokens and keys: taken from the environment, and never written or shown.

An option may say `${env:NAME}`. It is resolved where the engine is built, so files hold the reference, not the value.
A secret that stands in the options all the same is written as `***`. What counts as one:

- the user part of an address: `http://user:password@host`
- a value whose name says so: `api_key`, `password`, `HF_TOKEN`, `X-API-Key`, `Authorization`, `Cookie`; in a block of
  options, in an address (`?token=…`), and in text (`api_key=…`)
- `Bearer …` and `Basic …`, and a few shapes that services give to their keys (`hf_…`, `sk-…`)
- in text, every value that was hidden in the options of this process, wherever it appears: a server may send it back
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

HIDDEN = "***"
"""What stands for a secret."""

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")

# A name with one of these words is a secret's.
_ALWAYS = {"password", "passwd", "passphrase", "pwd", "secret", "secrets", "authorization", "cookie", "apikey"}
_ALWAYS |= {"credential", "credentials", "bearer"}

# A name that ends in one of these is a secret's, except after a word that makes it another thing.
_AT_THE_END: dict[str, set[str]] = {
    "token": {"stop", "eos", "bos", "pad", "unk", "mask", "sep", "cls", "image", "special", "end", "start", "per"},
    "key": {"cache", "sort", "group", "partition", "primary", "public", "prompt", "image", "data", "input", "output"},
    "auth": set(),
    "jwt": set(),
    "sig": set(),
    "signature": set(),
}
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_SCHEME = re.compile(r"(?i)^(?:bearer|basic|token|digest|apikey)\s+")

# An address up to a space or a quote; the rest is taken apart by hand, for a password may hold any sign.
_ADDRESS = re.compile(r"(?<![\w+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<rest>[^\s\"'<>`]+)")

# An option that is an address as a whole, whose user part holds what would end an address in a text.
_ADDRESS_WITH_QUOTES = re.compile(
    r"\s*(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>.*[\s\"'<>`].*)@(?P<host>.*)", re.DOTALL
)
_HEADER = re.compile(
    r"(?i)(?P<before>\b(?:proxy-)?(?:authorization|(?:set-)?cookie)\\?[\"']?\s*[:=]\s*\\?[\"']?)(?P<value>[^\"'\r\n]+)"
)
_NAME = re.compile(r"(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>\\?[\"']?\s*[:=]\s*)")
_VALUE = re.compile(
    r"\\\".*?\\\"|\"(?:[^\"\\]|\\.)*\"|'[^']*'|(?:(?:Bearer|Basic|Token)\s+)?(?:\$\{[^}]*\}|[^\s&,;\"'<>()\[\]{}])+"
)
_BEARER = re.compile(r"\b(?P<before>[Bb]earer\s+)(?P<value>[A-Za-z0-9._~+/=-]{6,})")
_BASIC = re.compile(r"\b(?P<before>[Bb]asic\s+)(?P<value>(?=[a-z]*[A-Z0-9+/=])[A-Za-z0-9+/]{6,}={0,2})")
_SHAPED = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)

_SHORTEST = 4
"""A hidden value with fewer characters is not looked for in other texts: it would be found in every word."""
_DISTINCT = 8
"""A hidden value with as many is looked for within words, and in other options."""

_hidden_values: set[str] = set()


class Address(NamedTuple):
    """An HTTP address without what must not be shown.

    Attributes:
        url: scheme, host, port and path.
        auth: user and password, or None.
        query: names and values after the `?`.
    """

    url: str
    auth: tuple[str, str] | None
    query: dict[str, str]


def is_secret_name(name: str) -> bool:
    """Whether what an option, a header or a variable holds is a secret, by its name."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if _ALWAYS.intersection(words):
        return True
    others = _AT_THE_END.get(words[-1])
    return others is not None and (len(words) == 1 or words[-2] not in others)


def redact(value: Any, name: str = "") -> Any:  # noqa: ANN401 (any plain value)
    """The same value with `***` for each secret in it; what is hidden here is hidden in every text from now on.

    Args:
        value: mappings, lists, texts, numbers.
        name: the option that holds it.
    """
    return _redact(value, name, name, [])


def secret_places(value: Any, name: str = "") -> list[str]:  # noqa: ANN401 (any plain value)
    """The dotted names of the options that hold a secret and not a reference."""
    places: list[str] = []
    _redact(value, name, name, places)
    return places


def redact_text(text: str) -> str:
    """A text for people with `***` for each secret in it: an error message, a progress line, a traceback."""
    return _redact_text(_without_hidden_values(text, _SHORTEST), _ignore)


def remember(secret: object) -> None:
    """Hide a value in every text from now on, also as it looks in an address, in JSON and in a `Basic` header."""
    plain = _SCHEME.sub("", str(secret).strip())
    encoded = base64.b64encode(plain.encode()).decode()
    forms = {plain, unquote(plain), quote(plain, safe=""), json.dumps(plain)[1:-1], repr(plain)[1:-1], encoded}
    _hidden_values.update(form for form in forms if len(form) >= _SHORTEST and HIDDEN not in form)


def resolve_references(value: Any, name: str = "") -> Any:  # noqa: ANN401 (any plain value)
    """The same value with the environment's values for its references. Errors name the option, never its value.

    Raises:
        ValueError: a variable is not set, a reference has another form, or a `***` stands where a secret was.
    """
    resolved = _resolve(value, name)
    redact(resolved)  # the password of an address, say, must not appear in an error
    return resolved


def header_values(headers: Mapping[str, str] | None, headers_env: Mapping[str, str] | None) -> dict[str, str]:
    """All headers of a request.

    Args:
        headers: name → value.
        headers_env: name → environment variable that holds the value.

    Raises:
        ValueError: a variable is not set, a header is given twice, or a value has a line break.
    """
    values = {str(name): str(value) for name, value in (headers or {}).items()}
    for name, variable in (headers_env or {}).items():
        if name in values:
            raise ValueError(f"the header {name} is given twice, in headers and in headers_env; leave one out")
        values[name] = _environment(str(variable), f"headers_env.{name}")
        remember(values[name])

    redact({"headers": values})
    for name, value in values.items():
        if any(sign in value for sign in "\r\n\0"):
            raise ValueError(f"the value of the header {name} has a line break; remove it (a file often ends with one)")
    return values


def read_address(url: str) -> Address:
    """Take an HTTP address apart, so that its user, password and query are sent but not shown.

    Raises:
        TypeError: it is no text.
        ValueError: it is no HTTP address.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a text such as 'http://localhost:8000', got one of type {type(url).__name__}")
    try:
        parts = urlsplit(url)
        is_usable = parts.hostname is not None and parts.port != 0 and url.startswith(("http://", "https://"))
    except ValueError:
        is_usable = False
    if not is_usable:
        shown = redact_text(redact(url, "url"))
        raise ValueError(f"url must begin with http:// or https:// and name a host, got {shown!r}")

    user_part, _, host = parts.netloc.rpartition("@")
    user, _, password = user_part.partition(":")
    return Address(
        url=urlunsplit((parts.scheme, host, parts.path, "", "")),
        auth=(unquote(user), unquote(password)) if user_part else None,
        query=dict(parse_qsl(parts.query, keep_blank_values=True)),
    )


class RedactingFilter(logging.Filter):
    """Lets every record of a logger pass, with its secrets hidden."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the message by what may be shown."""
        record.msg, record.args = redact_text(record.getMessage()), ()
        return True


_LOG_FILTER = RedactingFilter()


def hide_in_log(name: str) -> None:
    """Hide secrets in what a package logs under `name`. May be called twice."""
    logging.getLogger(name).addFilter(_LOG_FILTER)


Learn = Callable[[object], None]


def _ignore(secret: object) -> None:
    """A text may quote anything, so what is found there by its look is not looked for elsewhere."""


def _redact(value: Any, name: str, path: str, places: list[str], *, inside_secret: bool = False) -> Any:  # noqa: ANN401
    """`redact`; adds the place of each secret to `places`."""
    secret = inside_secret or is_secret_name(name.rpartition(".")[2])
    if isinstance(value, Mapping):
        if name == "headers_env":
            return {key: _redact_variable(item, f"{path}.{key}", places) for key, item in value.items()}
        return {
            key: _redact(item, str(key), f"{path}.{key}".lstrip("."), places, inside_secret=secret)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        # `["--api-key", "value"]`: an argument names the one after it.
        names = [""] + [item.lstrip("-") if str(item).startswith("-") else "" for item in map(str, value)]
        return [
            _redact(item, before, f"{path}.{index}", places, inside_secret=secret)
            for index, (item, before) in enumerate(zip(value, names, strict=False))
        ]
    if value is None or isinstance(value, bool) or (not secret and not isinstance(value, str)):
        return value

    hidden, given = value, value
    if isinstance(value, str):
        # `user:password@host`, where the scheme was forgotten.
        quoted = _ADDRESS_WITH_QUOTES.fullmatch(value)
        if quoted is not None and not _only_references(quoted["user"]):
            for part in (quoted["user"], quoted["user"].partition(":")[2]):
                remember(part)
            value = f"{quoted['scheme']}{HIDDEN}@{quoted['host']}"
        forgotten = name in ("url", "uri", "address", "endpoint") and "://" not in value and "@" in value
        hidden = _redact_text(f"http://{value}" if forgotten else value, remember)
        hidden = hidden.removeprefix("http://") if forgotten else hidden
    if secret and not _only_references(str(value)):
        remember(value)
        hidden = HIDDEN
    elif isinstance(hidden, str):
        hidden = _without_hidden_values(hidden, _DISTINCT)
    if hidden != given:
        places.append(path)
    return hidden


def _redact_variable(variable: object, path: str, places: list[str]) -> object:
    """The name of an environment variable; a secret that stands there by mistake is hidden."""
    name = str(variable)
    if name == HIDDEN or re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) or name in os.environ:
        return variable
    remember(name)
    places.append(path)
    return HIDDEN


def _redact_text(text: str, learn: Learn) -> str:
    text = _ADDRESS.sub(lambda match: _hide_user(match, learn), text)
    text = _HEADER.sub(lambda match: _hide_value(match, learn), text)
    text = _hide_assigned(text, learn)
    text = _BEARER.sub(lambda match: _hide_value(match, learn), text)
    text = _BASIC.sub(lambda match: _hide_value(match, learn), text)
    return _SHAPED.sub(lambda match: _hide_shaped(match, learn), text)


def _hide_user(match: re.Match[str], learn: Learn) -> str:
    """An address without its user part, unless the password is a reference."""
    rest = match["rest"]
    authority = re.split(r"[/?#]", REFERENCE.sub(lambda found: "r" * len(found[0]), rest), maxsplit=1)[0]

    # A "/" within the password ends the authority too early. In an option every "@" counts, for the password's sake; a
    # text may speak of `http://host:80/path@version`.
    end, in_option = rest.rfind("@", 0, len(authority)), learn is remember
    is_cut_off = ":" in authority and (in_option or (end < 0 and not authority.rpartition(":")[2].isdigit()))
    if is_cut_off or (in_option and end >= 0):
        end = rest.rfind("@")
    if end < 0:
        return match[0]

    user_part = rest[:end]
    user, colon, password = REFERENCE.sub("\0", user_part).partition(":")
    decisive = password if colon and password else user
    if not decisive.strip("\0") or user_part == HIDDEN:
        return match[0]
    for secret in (user_part, user_part.partition(":")[2] or user):
        learn(secret)
    return f"{match['scheme']}{HIDDEN}{rest[end:]}"


def _hide_value(match: re.Match[str], learn: Learn) -> str:
    if _only_references(match["value"]):
        return match[0]
    learn(match["value"])
    return match["before"] + HIDDEN


def _hide_assigned(text: str, learn: Learn) -> str:
    """`name=value` and `name: value` where the name is a secret's."""
    shown, position = [], 0
    while named := _NAME.search(text, position):
        # The next search begins at the value, which may hold names itself: `http://host?token=…`.
        shown.append(text[position : named.end()])
        position = named.end()
        if not is_secret_name(named["name"].rpartition(".")[2]):
            continue
        found = _VALUE.match(text, position)
        if found is None:
            continue
        value = found[0].strip("\\\"'")
        if value and _is_assigned_secret(named, value):
            learn(value)
            shown.append(found[0].replace(value, HIDDEN))
            position = found.end()
    return "".join([*shown, text[position:]])


def _is_assigned_secret(named: re.Match[str], value: str) -> bool:
    if _only_references(value):
        return False

    # In this library a token is mostly what a model samples: "token=17", "key: value" are ordinary words.
    is_number = re.fullmatch(r"[-+.\d]+|True|False|None|null", value) is not None
    is_ordinary = named["name"].rpartition(".")[2].strip("-").lower() in _AT_THE_END
    return not (is_ordinary and (":" in named["sign"] or is_number))


def _hide_shaped(match: re.Match[str], learn: Learn) -> str:
    learn(match[0])
    return HIDDEN


def _without_hidden_values(text: str, shortest: int) -> str:
    for value in sorted(_hidden_values, key=len, reverse=True):
        if len(value) >= shortest and value in text:
            whole_word = len(value) < _DISTINCT
            pattern = rf"(?<!\w){re.escape(value)}(?!\w)" if whole_word else re.escape(value)
            text = re.sub(pattern, HIDDEN, text)
    return text


def _only_references(value: str) -> bool:
    """Whether a value has no secret of its own: references, `***`, and the word before a token (`Bearer`)."""
    rest = REFERENCE.sub("", _SCHEME.sub("", value.strip())).replace(HIDDEN, "")
    return not rest.strip(" :}")


def _resolve(value: Any, name: str, *, in_headers: bool = False) -> Any:  # noqa: ANN401 (any plain value)
    if isinstance(value, Mapping):
        headers = in_headers or name.rpartition(".")[2] == "headers"
        return {key: _resolve(item, f"{name}.{key}".lstrip("."), in_headers=headers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve(item, f"{name}.{index}", in_headers=in_headers) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if HIDDEN in value:
        raise ValueError(
            f"{name} holds {HIDDEN}, which stands for a secret that is not written to files. Write ${{env:NAME}} "
            f"there, or give the secret again: {name}=…"
        )
    if "${" in REFERENCE.sub("", value):
        raise ValueError(f"{name} has a reference of another form than ${{env:NAME}}; correct it")

    def found(match: re.Match[str]) -> str:
        text = _environment(match[1], name)
        if in_headers or is_secret_name(match[1]):
            remember(text)
        return text

    return REFERENCE.sub(found, value)


def _environment(variable: str, option: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        shown = _redact_variable(variable, option, [])
        raise ValueError(f"the environment variable {shown} is not set, and {option} needs it; set it and start again")
    return value


def advice(places: Sequence[str]) -> str:
    """One line about secrets that stand in the options, from `secret_places`."""
    verb = "holds a secret" if len(places) == 1 else "hold secrets"
    return (
        f"{', '.join(places)} {verb}: files and messages show {HIDDEN}. Write ${{env:NAME}} instead, or a run cannot "
        "go on from its config.yaml alone"
    )
