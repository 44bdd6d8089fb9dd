"""Secrets are hidden in options and texts; ordinary words are not; references are resolved or named."""

import base64
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.config import secrets
from rollcorr.config.secrets import (
    advice,
    header_values,
    hide_in_log,
    is_secret_name,
    redact,
    redact_text,
    remember,
    resolve_references,
    secret_places,
)

SECRET = "s3cr3t-V4lue"


@pytest.mark.parametrize("sign", ["'", '"', "<", ">", "`", " ", "/"])
def test_a_password_may_hold_what_ends_an_address_in_a_text(sign):
    url = f"http://user:pa{sign}{SECRET}@host:80/path"
    shown = secrets.redact({"url": url})
    assert SECRET not in str(shown)
    assert shown["url"].endswith("@host:80/path")
    assert secrets.secret_places({"url": url}) == ["url"]
    assert SECRET not in redact_text(f"cannot connect to {url}")


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{SECRET}@host:80/path",
        f"http://user:p@{SECRET}@host",
        f"http://user:p/{SECRET}@host",
        f"http://{SECRET}@host",
        f"https://host/generate?api_key={SECRET}&x=1",
        f"https://host/generate?x=1&access_token={SECRET}#end",
        f"Authorization: Bearer {SECRET}",
        f"authorization={SECRET}",
        f"{{'Authorization': 'Bearer {SECRET}'}}",
        f'{{"X-API-Key": "{SECRET}", "n": 3}}',
        f'said {{\\"api_key\\": \\"{SECRET}\\"}}',
        f"Cookie: a=b; session={SECRET}",
        f"set-cookie: session={SECRET}; Path=/",
        f"Illegal header value b'Bearer {SECRET}'",
        f"HF_TOKEN={SECRET} python -m x",
        f"python -m server --api-key={SECRET}",
        f"password: {SECRET}",
        f"rollout.engine_options.headers={{Authorization: Bearer {SECRET}}}: not a YAML document",
        f"Proxy-Authorization: Basic {SECRET}",
        "Basic dXNlcjpzM2NyM3QtVjRsdWU=",
        "it said hf_s3cr3tV4lues3cr3tV4lue to me",
    ],
)
def test_a_secret_is_hidden_by_where_it_stands(text):
    shown = redact_text(text)
    assert secrets.HIDDEN in shown
    for part in (SECRET, "dXNlcjpzM2NyM3QtVjRsdWU", "s3cr3tV4lue"):
        assert part not in shown
    assert redact_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "log_probs[0] of row 1 is -9999: a sampled token has a finite log-prob above -9999.0",
        "token=17 is outside the vocabulary of 9 tokens",
        "unknown key: foo; the token: is missing",
        "pad_token_id=0, eos_token=<eos>, max_tokens=48",
        "the Bearer token is missing, Basic authentication is not",
        "http://127.0.0.1:8000/path@v2 failed 4 times",
        "http://user:${env:PASSWORD}@host/?api_key=${env:KEY}",
        "Authorization: Bearer ${env:KEY}",
        "checkpoints/step_000050 user@host",
        "missing_keys=['lm_head.weight'], unexpected_keys=[]: name: lm_head, value: 3",
        "write --api-key again, or --tokens 48 --max-tokens 48 -u origin",
        "illegal header: Content-Length; headers: none; keys: a, b; monkey=3",
        "cannot load x.yaml? It is new; a && b=3; --key-bytes 12 key=[1, 2, 3]",
    ],
)
def test_ordinary_words_and_references_stay(text):
    assert redact_text(text) == text
    if "/path@" not in text:  # in an option this may be a password
        assert redact(text) == text


def test_names_of_secrets():
    for name in (
        "token",
        "api_key",
        "apiKey",
        "X-API-Key",
        "HF_TOKEN",
        "password",
        "Authorization",
        "Set-Cookie",
        "key",
        "secretkey",
        "accesstoken",
        "APITOKEN",
        "api_keys",
        "AccountKey",
        "db_password_ro",
        "api_key_2",
    ):
        assert is_secret_name(name), name
    for name in (
        "max_tokens",
        "pad_token_id",
        "eos_token",
        "tokenizer",
        "cache_key",
        "keep",
        "monkey",
        "",
        "authors",
        "unexpected_keys",
        "eostoken",
    ):
        assert not is_secret_name(name), name


def test_options_are_hidden_by_name_and_by_form():
    options = {
        "url": f"http://user:{SECRET}@host:80",
        "headers": {"Authorization": f"Bearer {SECRET}", "X-Trace": "on", "Cookie": "${env:COOKIE}"},
        "headers_env": {"X-API-Key": "MY_KEY", "X-Other": SECRET},
        "engine_args": {"hf_token": SECRET, "password": 12345, "args": ["--api-key", SECRET], "max_tokens": 3},
        "credentials": {"user": "me", "empty": "", "none": None, "on": True},
        "eos_token": "<eos>",
        "timeout": 3.0,
        "copy": f"the same again: {SECRET}",
    }
    assert redact(options) == {
        "url": "http://***@host:80",
        "headers": {"Authorization": "***", "X-Trace": "***", "Cookie": "${env:COOKIE}"},
        "headers_env": {"X-API-Key": "MY_KEY", "X-Other": "***"},
        "engine_args": {"hf_token": "***", "password": "***", "args": ["--api-key", "***"], "max_tokens": 3},
        "credentials": {"user": "***", "empty": "", "none": None, "on": True},
        "eos_token": "<eos>",
        "timeout": 3.0,
        "copy": "the same again: ***",
    }
    assert redact(redact(options)) == redact(options)
    assert secret_places({"a": options}) == [
        "a.url",
        "a.headers.Authorization",
        "a.headers.X-Trace",
        "a.headers_env.X-Other",
        "a.engine_args.hf_token",
        "a.engine_args.password",
        "a.engine_args.args.1",
        "a.credentials.user",
        "a.copy",
    ]
    assert secret_places(redact(options)) == []
    assert "a.url holds a secret: files" in advice(["a.url"])
    assert "a.url, a.x hold secrets: files" in advice(["a.url", "a.x"])


def test_an_address_without_a_scheme_is_hidden_too():
    assert redact({"url": f"user:{SECRET}@host"}) == {"url": "***@host"}


@given(password=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="\"'<>`"), min_size=4))
def test_no_password_survives_in_an_address(password):
    if secrets.REFERENCE.search(password):
        return
    shown = redact(f"http://user:{password}@host.example")
    assert shown == "http://***@host.example"


def test_what_was_hidden_once_is_hidden_in_every_text_in_every_form():
    redact({"url": f"http://user:{SECRET}@host", "headers": {"X-API-Key": "line\nkey"}})
    encoded = base64.b64encode(f"user:{SECRET}".encode()).decode()
    for text in (SECRET, f"x{SECRET}y", encoded, "line\\nkey", repr("line\nkey"), "line%0Akey"):
        assert redact_text(f"the server said {text}").count("***") == 1, text
    remember("abcd")
    assert redact_text("abcd abcde xabcd") == "*** abcde xabcd"
    remember("abc")  # too short to look for
    assert redact_text("abc") == "abc"


def test_references_are_resolved_and_what_they_bring_is_hidden(monkeypatch):
    monkeypatch.setenv("PW", SECRET)
    monkeypatch.setenv("API_KEY", "another-key")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    options = {"url": "http://u:${env:PW}@h", "n": 3, "args": ["${env:API_KEY}"], "folder": "${env:SCRATCH}/w"}
    resolved = {"url": f"http://u:{SECRET}@h", "n": 3, "args": ["another-key"], "folder": "/scratch/me/w"}
    assert resolve_references(options) == resolved
    assert redact(options) == options
    assert redact_text(f"{SECRET} another-key /scratch/me") == "*** *** /scratch/me"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${env:NOT_SET}", r"^the environment variable NOT_SET is not set, and a\.b needs it; set it"),
        ("x ${oc.env:HOME}", r"^a\.b has a reference of another form than \$\{env:NAME\}"),
        ("${HOME}", r"^a\.b has a reference of another form"),
        ("http://***@host", r"^a\.b holds \*\*\*, which stands for a secret.*Write \$\{env:NAME\} there, or give"),
    ],
)
def test_what_cannot_be_resolved_names_the_option(value, message):
    with pytest.raises(ValueError, match=message):
        resolve_references({"b": value}, "a")


def test_headers_come_from_the_options_and_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    assert header_values({"X-Trace": "on"}, {"X-API-Key": "MY_KEY"}) == {"X-Trace": "on", "X-API-Key": SECRET}
    assert redact_text(f"refused {SECRET}") == "refused ***"

    # A variable contains a secret, however short and whatever the header's name.
    monkeypatch.setenv("TRACE", "k7Qz9w")
    header_values(None, {"X-Trace": "TRACE"})
    assert redact_text("refused k7Qz9w") == "refused ***"
    assert header_values(None, None) == {}
    with pytest.raises(ValueError, match=r"variable NOT_SET is not set, and headers_env\.X-API-Key needs it"):
        header_values(None, {"X-API-Key": "NOT_SET"})
    with pytest.raises(ValueError, match="X-API-Key is given twice"):
        header_values({"X-API-Key": "x"}, {"X-API-Key": "MY_KEY"})
    monkeypatch.setenv("MY_KEY", f"{SECRET}\n")
    with pytest.raises(ValueError, match="header X-API-Key has a line break") as error:
        header_values(None, {"X-API-Key": "MY_KEY"})
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a.",
        "a-",
        "http",
        "eyJ-",
        "key ",
        "://",
        "sk-",
        "'",
        "\\\\",
        "${env:",
        "u:@",
        "token:",
        "key:",
        "name:value:",
        "api_key=[",
        "--key ",
        "-H a",
        "?a=",
        "://a?b",
        "login a password ",
        "- a\n",
        "api_key: |\n ",
        "-----BEGIN PRIVATE KEY-----",
    ],
)
def test_a_long_text_takes_no_longer_than_its_length_allows(piece):
    """A search that went back over the text from each of its places would take hours here."""
    assert len(redact_text(piece * (50_000 // len(piece)))) > 0


def test_a_log_is_hidden_as_well(caplog):
    hide_in_log("somebody.else")
    hide_in_log("somebody.else")
    with caplog.at_level(logging.INFO):
        logging.getLogger("somebody.else").info("POST %s", f"http://h?token={SECRET}")
    assert caplog.messages == ["POST http://h?token=***"]
