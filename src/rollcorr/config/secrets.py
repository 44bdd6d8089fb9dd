"""Read passwords, tokens and keys from the environment, and redact them in files and output.

An option may contain `${env:NAME}`. It is resolved where the engine is built, so files only contain the reference.
A secret that is in the options nevertheless is written as `***`. Hidden by position, for any name:

- the user part of an address, and each value of its query: `http://user:password@host?k=value`, `user:password@host`
- the path of a webhook
- each value under `headers`

In other options, and in text:

- a value with a secret's name: `api_keys`, `password`, `HF_TOKEN`, `Authorization`, `{name: API_KEY, value: …}`
- `Bearer …` and `Basic …`, private keys in PEM, and known key formats of services (`hf_…`, `glpat-…`)
- in text, every value that was hidden in the options of this process: a server may send it back
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
"""Replacement text of a secret."""

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")

# Normalize names before comparison: `apiKey`, `API-Key` and `api_key` are equal.
_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_SECRET_NAME = re.compile(
    r"passw|passphrase|webhook|(?:^|_)pwd(?:_|$)|secret|credential|cookie|bearer|authorization"
    r"|(?:access|api|auth|refresh)_?tokens?_?\d*$|(?:access|account|api|auth|private|signing)_?keys?_?\d*$"
)

# A name with such a suffix is a secret's, except after a word that changes its meaning.
_SECRET_SUFFIX = re.compile(r"(?:token|(?:^|_)(?:key|auth|jwt|pat|sas|sig|signature))_?\d*$")
_HARMLESS_SUFFIX = re.compile(
    r"(?:^|_)(?:bos|cache|cls|data|end|eos|group|image|input|mask|output|pad|partition|per|primary|prompt|public|sep"
    r"|sort|special|start|stop|unk)_?(?:token|key)$"
)
_HEADERS = re.compile(r"(?:^|_)headers?$")
_AUTH_SCHEME = re.compile(r"(?i)^(?:bearer|basic|token|digest|apikey)\s+")

# In a text quoted inside a string, backslashes precede its quotes, and "\n" replaces its line ends.
_QUOTE = r"\\*[\"']?"
_COMMA = rf"{_QUOTE},?[\s=]+"

# An address up to a space or a quote; the rest is parsed by hand, because a password may contain any character.
_ADDRESS = re.compile(r"(?<![\w+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<rest>(?:(?!\\+n)[^\s\"'<>`])+)")
_SECRETS = tuple(
    re.compile(pattern)
    for pattern in (
        # Private keys: split into lines, joined by "\n", or truncated.
        r"(?P<before>-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?P<value>[\s\S]*?)(?=-----END|\Z)",
        # Headers; curl's headers and users; the lines of a .netrc.
        rf"(?P<before>(?i:\b(?:proxy-)?(?:authorization|(?:set-)?cookie){_QUOTE}\s*[:=]\s*{_QUOTE}))(?P<value>[^\"'\r\n]+)",
        rf"(?P<before>(?<![\w-])(?:-H|--header){_COMMA}{_QUOTE}[\w-]+:\s*)(?P<value>[^\"'\r\n]+)",
        rf"(?P<before>(?<![\w-])(?:-u|--user){_COMMA}{_QUOTE}[^\s:\"']{{1,200}}:)(?P<value>[^\s\"']+)",
        r"(?P<before>\blogin\s+\S{1,200}\s+password\s+)(?P<value>\S+)",
        # A proxy's user without "https://"; the path of a webhook, which is its password.
        r"(?P<before>(?i:prox(?:y|ies))[^\n@]{0,60}?[\s=:\"'][^\s:@\"'/]{1,200}:)(?P<value>[^\s@\"'/][^\s@\"']{0,200})(?=@)",
        r"(?P<before>://(?:hooks\.|[^\s\"'<>`?#]{0,200}?webhook)[^\s/\"'<>`]{0,200}/)(?P<value>[^\s?#\"'<>`]+)",
        # The query of an address, possibly without its start; and a query that is one value.
        r"(?P<before>[?&][^\s?&=#\"'<>`]{1,200}=)(?P<value>[^\s&#\"'<>`]+)",
        r"(?P<before>://[^\s?#\"'<>`]{1,1000}\?)(?P<value>[^\s=&#\"'<>`]{8,})(?![=&])",
        # Values with the format of a secret.
        r"\b(?P<before>[Bb]earer\s+)(?P<value>[A-Za-z0-9._~+/=-]{6,})",
        r"\b(?P<before>[Bb]asic\s+)(?P<value>(?=[a-z]*[A-Z0-9+/=])[A-Za-z0-9+/]{6,}={0,2})",
        r"(?P<before>(?<![\w-]))(?P<value>(?:hf|gh[pousr]|npm|gsk|[sr]k_live)_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
        r"|ya29\.[\w-]{10,}|(?:sk|glpat|nvapi|xapp|xox[a-z])-[\w-]{10,}|AIza[\w-]{24,}|A[KS]IA[A-Z0-9]{16}"
        r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    )
)
_NAME = re.compile(rf"(?<![\w.-])(?:(?P<flag>--[\w-]+){_COMMA}|(?P<name>[\w.-]+)(?P<sign>{_QUOTE}\s*[:=](?:\s|\\+n)*))")
_NAME_AS_VALUE = re.compile(rf"{_QUOTE}([\w.-]+)")
_VALUE = re.compile(
    r"\\+(?P<quote>[\"']).*?\\+(?P=quote)|\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|[\[{(](?:[^\n]*[\]})]|[^\n]*)"
    # YAML: lines of a list, and a multi-line string.
    r"|(?:-[ \t]+(?:(?!\\+n)[^\n])*(?:(?:\n|\\+n)[ \t]*|$))+|[|>][-+]?[ \t]*\n(?:[ \t]+[^\n]*\n?)+"
    r"|(?:(?:Bearer|Basic|Token)\s+)?(?:\$\{[^}]*\}|(?!\\+n)[^\s&,;\"'<>()\[\]{}])+"
)

_MIN_SECRET_CHARACTERS = 4
"""A hidden value with fewer characters is not searched for in other texts: it would match every word."""
_MIN_DISTINCT_CHARACTERS = 8
"""A hidden value of at least this length is searched for within words, and in other options."""

_hidden_values: dict[str, bool] = {}
"""Hidden value → whether it is certainly a secret; a header's value may also be the value of an option."""


def is_secret_name(name: str) -> bool:
    """Return whether an option, a header or a variable of this name contains a secret."""
    words = _split_words(name)
    named = _SECRET_SUFFIX.search(words) is not None and _HARMLESS_SUFFIX.search(words) is None
    return named or _SECRET_NAME.search(words) is not None


def redact(value: Any, name: str = "") -> Any:  # noqa: ANN401 (any plain value)
    """Return the value with `***` for each secret in it; later texts are redacted for the same secrets.

    Args:
        value: mappings, lists, strings, numbers.
        name: the option that contains it.
    """
    return _redact(value, name, name, [])


def secret_places(value: Any, name: str = "") -> list[str]:  # noqa: ANN401 (any plain value)
    """Return the dotted names of the options that contain a secret and not a reference."""
    places: list[str] = []
    _redact(value, name, name, places)
    return places


def redact_text(text: str) -> str:
    """Return a text with `***` for each secret in it: an error message, a progress line, a traceback."""
    return _redact_text(_without_hidden_values(text), {})


def remember(secret: object, *, certain: bool = True) -> None:
    """Hide a value in every later text, including its form in an address, in JSON and in a `Basic` header.

    Args:
        secret: the value.
        certain: True hides it in other options as well. False means that it may be an ordinary word: hide it only
            in texts, and only from 8 characters on. Defaults to True.
    """
    plain = _AUTH_SCHEME.sub("", str(secret).strip())
    encoded = base64.b64encode(plain.encode()).decode()
    forms = {plain, unquote(plain), quote(plain, safe=""), json.dumps(plain)[1:-1], repr(plain)[1:-1], encoded}
    for form in forms:
        if len(form) >= (_MIN_SECRET_CHARACTERS if certain else _MIN_DISTINCT_CHARACTERS) and HIDDEN not in form:
            _hidden_values[form] = certain or _hidden_values.get(form, False)


def resolve_references(value: Any, name: str = "") -> Any:  # noqa: ANN401 (any plain value)
    """Return the value with its references replaced from the environment. Errors name the option, never its value.

    Raises:
        ValueError: a variable is not set, a reference is malformed, or a `***` is in place of a secret.
    """
    resolved = _resolve_references(value, name)
    redact(resolved)  # errors must not contain a secret, such as the password of an address
    return resolved


def header_values(headers: Mapping[str, str] | None, headers_env: Mapping[str, str] | None) -> dict[str, str]:
    """Return all headers of a request.

    Args:
        headers: name → value.
        headers_env: name → environment variable that contains the value.

    Raises:
        ValueError: a variable is not set, a header is given twice, or a value has a line break.
    """
    values = {str(name): str(value) for name, value in (headers or {}).items()}
    for name, variable in (headers_env or {}).items():
        if name in values:
            raise ValueError(f"the header {name} is given twice, in headers and in headers_env; leave one out")
        values[name] = _read_environment(str(variable), f"headers_env.{name}")
        remember(values[name])

    redact({"headers": values})
    for name, value in values.items():
        if any(sign in value for sign in "\r\n\0"):
            raise ValueError(f"the value of the header {name} has a line break; remove it (a file often ends with one)")
    return values


def hide_in_log(name: str) -> None:
    """Hide secrets in the log records of the logger `name`. Repeated calls are safe."""
    logging.getLogger(name).addFilter(_redact_record)


def _redact_record(record: logging.LogRecord) -> bool:
    """Redact the message and the traceback of a record; every record passes the filter."""
    record.msg, record.args = redact_text(record.getMessage()), ()
    if record.exc_info:
        record.exc_text = redact_text(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    return True


def _split_words(name: str) -> str:
    return _BETWEEN_WORDS.sub("_", name).lower()


def _redact(value: Any, name: str, path: str, places: list[str], *, inside: bool | None = None) -> Any:  # noqa: ANN401
    """Redact, and append the place of each secret to `places`. `inside` is None outside secrets and headers."""
    if is_secret_name(name.rpartition(".")[2]):
        inside = True
    elif inside is None and _HEADERS.search(_split_words(name)):
        inside = False

    if isinstance(value, Mapping):
        if name == "headers_env":
            return {key: _redact_variable_name(item, f"{path}.{key}", places) for key, item in value.items()}
        # `{name: API_KEY, value: …}`
        called = {"value": str(value.get("name", value.get("key", "value")))}
        return {
            key: _redact(item, called.get(key, str(key)), f"{path}.{key}".lstrip("."), places, inside=inside)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        # `["--api-key", "value"]`: an argument names the one after it.
        names = [""] + [item.lstrip("-") if str(item).startswith("-") else "" for item in map(str, value)]
        return [
            _redact(item, before, f"{path}.{index}", places, inside=inside)
            for index, (item, before) in enumerate(zip(value, names, strict=False))
        ]
    if value is None or isinstance(value, bool) or (inside is None and not isinstance(value, str)):
        return value

    hidden = value
    if inside is None:
        hidden = _without_hidden_values(_redact_option(value, name), in_option=True)
    elif not _only_references(str(value)):
        # A cookie contains several values, and a server may send one of them back.
        remember(value, certain=inside)
        for part in re.split(r"[;,\s=]+", str(value)):
            remember(part, certain=False)
        hidden = HIDDEN
    if hidden != value:
        places.append(path)
    return hidden


def _redact_option(value: str, name: str) -> str:
    """Hide the secrets in one option's text, and remember them."""
    found: dict[str, bool] = {}

    # In an option that is an address, also without "https://", the user part ends at the last "@", for any password.
    scheme, mark, rest = value.rpartition("://")
    user_part, at, host = rest.rpartition("@")
    begins = re.fullmatch(r"\s*[A-Za-z][\w+.-]*", scheme) or name in ("url", "uri", "address", "endpoint")
    is_address = begins or re.fullmatch(r"\s*[^\s/:@]*:\S+@[\w.-]+(:\d+)?/?\s*", value)
    if at and is_address and _is_user_part(user_part):
        value = f"{scheme}{mark}{_hide_user(user_part, found)}@{host}"
    hidden = _redact_text(value, found)
    for secret, certain in found.items():
        remember(secret, certain=certain)
    return hidden


def _redact_variable_name(variable: object, path: str, places: list[str]) -> object:
    """Return the name of an environment variable; hide a secret that is there by mistake."""
    name = str(variable)
    if name == HIDDEN or re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) or name in os.environ:
        return variable
    remember(name)
    places.append(path)
    return HIDDEN


def _redact_text(text: str, found: dict[str, bool]) -> str:
    """Return a text with `***` for each secret. Add each to `found`, and whether it is certainly a secret."""
    text = _ADDRESS.sub(lambda match: _hide_in_address(match, found), text)
    for pattern in _SECRETS:
        text = pattern.sub(lambda match: _hide_value(match, found), text)
    return _hide_assigned(text, found)


def _hide_in_address(match: re.Match[str], found: dict[str, bool]) -> str:
    """Return an address without its user part, unless the password is a reference."""
    rest = match["rest"]
    authority = re.split(r"[/?#]", REFERENCE.sub(lambda found: "r" * len(found[0]), rest), maxsplit=1)[0]

    # A "/" in the password ends the authority early. But a text may contain `http://host:80/path@version`.
    end = rest.rfind("@", 0, len(authority))
    if end < 0 and ":" in authority and not authority.rpartition(":")[2].isdigit():
        end = rest.rfind("@")
    if end < 0 or not _is_user_part(rest[:end]):
        return match[0]
    return f"{match['scheme']}{_hide_user(rest[:end], found)}{rest[end:]}"


def _is_user_part(user_part: str) -> bool:
    """Return True if a user part contains a secret: a password, or a user without one."""
    user, _, password = user_part.partition(":")
    return REFERENCE.sub("", password or user) not in ("", HIDDEN)


def _hide_user(user_part: str, found: dict[str, bool]) -> str:
    found |= {user_part: True, user_part.partition(":")[2]: True}
    return HIDDEN


def _hide_value(match: re.Match[str], found: dict[str, bool]) -> str:
    if _only_references(match["value"]):
        return match[0]
    is_query = match["before"][:1] in ("?", "&", ":")
    found |= dict.fromkeys(match["value"].split("/"), False) | found  # a server may send a part of a path back
    found[match["value"]] = not is_query or is_secret_name(match["before"].strip("?&="))
    return match["before"] + HIDDEN


def _hide_assigned(text: str, found: dict[str, bool]) -> str:
    """Hide the value in `name=value`, `name: value` and `--name value` if the name is a secret's."""
    shown, position, called = [], 0, ""
    while named := _NAME.search(text, position):
        # Continue the search at the value, which may contain further names: `http://host?token=…`.
        shown.append(text[position : named.end()])
        position = named.end()

        # `{name: API_KEY, value: …}`
        *blocks, name = (named["flag"] or named["name"]).split(".")
        beside = _NAME_AS_VALUE.match(text, position) if name in ("name", "key") else None
        called = beside[1] if beside else called
        secret = _secret_value_pattern(blocks, called if name == "value" else name, named["sign"])
        given = _VALUE.match(text, position) if secret else None
        value = given[0].strip("\\\"' \n") if given else ""
        if given and re.fullmatch(secret, value) and not _only_references(value):
            found[value] = True
            shown.append(given[0].replace(value, HIDDEN))
            position = given.end()
    return "".join([*shown, text[position:]])


def _secret_value_pattern(blocks: Sequence[str], name: str, sign: str | None) -> str:
    """Return the pattern of the values that are secrets after a name; empty if there are no such values."""
    if any(_HEADERS.search(_split_words(block)) for block in blocks):
        return r"[\s\S]+"
    if _HEADERS.search(_split_words(name)):
        return r"[\[{][\s\S]*"
    if not is_secret_name(name):
        return ""
    if sign is None:  # a flag, in a command line or in a sentence
        return r"(?![a-z]+\Z|-)[\s\S]+"

    # In this library a token is usually a model's sample: "token=17" and "key: value" are ordinary words.
    if re.fullmatch(r"-*(?:auth|jwt|key|pat|sas|sig|signature|token)", name.lower()):
        return "" if ":" in sign else r"(?!(?:[-+.\d\s,()\[\]]+|True|False|None|null)\Z)[\s\S]+"
    return r"[\s\S]+"


def _without_hidden_values(text: str, *, in_option: bool = False) -> str:
    for value in sorted(_hidden_values, key=len, reverse=True):
        if value not in text or (in_option and (len(value) < _MIN_DISTINCT_CHARACTERS or not _hidden_values[value])):
            continue
        pattern = re.escape(value)
        text = re.sub(rf"(?<!\w){pattern}(?!\w)" if len(value) < _MIN_DISTINCT_CHARACTERS else pattern, HIDDEN, text)
    return text


def _only_references(value: str) -> bool:
    """Return True for a value without a secret: references, `***`, and the word before a token (`Bearer`)."""
    rest = REFERENCE.sub("", _AUTH_SCHEME.sub("", value.strip())).replace(HIDDEN, "")
    return not rest.strip(" :}")


def _resolve_references(value: Any, name: str, *, in_headers: bool = False) -> Any:  # noqa: ANN401 (any plain value)
    # A header's value is a secret, whatever its variable is called.
    if isinstance(value, Mapping):
        headers = in_headers or _HEADERS.search(_split_words(name)) is not None
        return {
            key: _resolve_references(item, f"{name}.{key}".lstrip("."), in_headers=headers)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_resolve_references(item, f"{name}.{index}", in_headers=in_headers) for index, item in enumerate(value)]
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
        text = _read_environment(match[1], name)
        if in_headers or is_secret_name(match[1]):
            remember(text)
        return text

    return REFERENCE.sub(found, value)


def _read_environment(variable: str, option: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise ValueError(
            f"the environment variable {_redact_variable_name(variable, option, [])} is not set, and {option} needs "
            "it; set it and start again"
        )
    return value


def advice(places: Sequence[str]) -> str:
    """Return one line of advice about secrets in the options, from `secret_places`."""
    return (
        f"{', '.join(places)} {'holds a secret' if len(places) == 1 else 'hold secrets'}: files and messages show "
        f"{HIDDEN}. Write ${{env:NAME}} instead, or a run cannot go on from its config.yaml alone"
    )
