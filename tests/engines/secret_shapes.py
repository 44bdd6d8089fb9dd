"""Shapes in which secrets stand in options and texts. Each value is random, so it can be searched for."""

from __future__ import annotations

import random
import string

LETTERS = string.ascii_letters + string.digits
_RANDOM = random.Random(20_241)


def _value(length: int = 24, *, signs: str = LETTERS) -> str:
    """Return a unique value that begins with a letter and a digit."""
    return "q7" + "".join(_RANDOM.choice(signs) for _ in range(length))


def _pem() -> tuple[str, str]:
    lines = [_value(62) for _ in range(3)]
    return "-----BEGIN RSA PRIVATE KEY-----\n" + "\n".join(lines) + "\n-----END RSA PRIVATE KEY-----\n", lines[1]


class Shapes:
    """Options and texts with secrets, and each secret by the shape's name."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        self.headers: dict[str, object] = {}
        self.queries: dict[str, str] = {}
        self.arguments: dict[str, object] = {}
        self.texts: dict[str, str] = {}
        self._fill()

    def _new(self, shape: str, prefix: str = "", length: int = 24, signs: str = LETTERS) -> str:
        self.secrets[shape] = prefix + _value(length, signs=signs)
        return self.secrets[shape]

    def _fill(self) -> None:
        new = self._new

        # Headers: the name does not matter.
        for name in ("X-Team", "X-Request-Source", "Ocp-Apim-Subscription", "cf-access-client", "X-Vault", "DD-Auth"):
            self.headers[name] = new(f"header {name}")
        self.headers["Authorization"] = "Bearer " + new("header Authorization")
        self.headers["Proxy-Authorization"] = "Basic " + new("header Proxy-Authorization")
        self.headers["Cookie"] = "theme=dark; sid=" + new("header Cookie")
        self.headers["X-Mixed"] = "${env:HOME} " + new("header with a reference")

        # Queries: the same.
        for name in ("k", "code", "subscription", "sv", "x", "id"):
            self.queries[f"https://host.example/v1?{name}={new(f'query {name}')}&page=2"] = name
        self.queries[f"https://host.example/v1?{new('query without a name')}"] = ""
        self.queries[f"https://user:{new('password in an address')}@host.example/v1"] = ""
        self.queries[f"https://{new('user in an address')}@host.example/v1"] = ""

        # Arguments of an engine: by their names, and by the looks of their values.
        for name in ("secretkey", "accesstoken", "APITOKEN", "apiKey", "hf_token", "AWS_SECRET_ACCESS_KEY", "passwd"):
            self.arguments[name] = new(f"argument {name}")
        for name in ("clientSecret", "private-key", "db_password_ro", "AccountKey", "GITHUBTOKEN"):
            self.arguments[name] = new(f"argument {name}")
        self.arguments["api_keys"] = [new("list of keys 1"), new("list of keys 2")]
        self.arguments["credentials"] = {"user": new("credentials, nested"), "deep": [{"x": new("credentials, deep")}]}
        self.arguments["variables"] = [
            {"name": "OPENAI_API_KEY", "value": new("name and value")},
            {"key": "DB_PASSWORD", "value": new("key and value")},
        ]
        self.arguments["arguments"] = ["--api-key", new("argument after its name"), "--port", "80"]
        self.arguments["curl"] = ["--header", "X-Team: " + new("header after its flag")]
        self.arguments["extra_headers"] = [{"name": "X-Own", "value": new("header as name and value")}]
        self.arguments["proxy"] = f"me:{new('proxy')}@proxy.example:8080"
        self.arguments["proxies"] = {"https": f"me:{new('proxies')}@proxy.example"}
        for name in ("azure_sas", "GITHUB_PAT", "webhook"):
            self.arguments[name] = new(f"argument {name}")
        self.arguments["slack"] = f"https://hooks.slack.com/services/T01/B02/{new('path of a Slack webhook')}"
        self.arguments["discord"] = f"https://discord.com/api/webhooks/12345/{new('path of a Discord webhook')}"
        pem, self.secrets["PEM in an argument"] = _pem()
        self.arguments["certificate"] = pem
        shaped = {
            "github_pat_": 60,
            "ghp_": 34,
            "xoxb-": 44,
            "AIza": 33,
            "glpat-": 18,
            "hf_": 32,
            "sk-": 40,
            "sk_live_": 22,
            "npm_": 34,
            "gsk_": 40,
            "nvapi-": 50,
            "ya29.": 60,
        }
        for prefix, length in shaped.items():
            self.arguments[f"plain_{len(self.arguments)}"] = f"see {new(f'shape {prefix}', prefix, length)} there"
        self.arguments["plain_aws"] = new("shape AKIA", "AKIA", 14, string.ascii_uppercase).upper()
        self.secrets["shape AKIA"] = str(self.arguments["plain_aws"])

        # Texts that nobody took apart: messages of servers, command lines, tracebacks.
        pem, self.secrets["PEM in a text"] = _pem()
        self.texts = {
            "query of a path": f"POST /v1/generate?k={new('query of a path')} failed",
            "override of a header": f"rollout.engine_options.headers.X-Team={new('override of a header')}",
            "override of headers": f"rollout.engine_options.headers={{X-Team: {new('override of headers')}, B: c",
            "list in a text": f"api_keys: [{new('list in a text')}, {new('list in a text, second')}]",
            "list of lines": f"api_keys:\n  - {new('list of lines')}\n  - {new('list of lines, second')}\nport: 80\n",
            "name and value in a text": f"- name: HF_TOKEN\n  value: {new('name and value in a text')}\n",
            "name and value in JSON": f'[{{"name": "X_KEY", "value": "{new("name and value in JSON")}"}}]',
            "flag and value": f"python -m server --api-key {new('flag and value')} --port 80",
            "flag and value in a list": f"['server', '--hf-token', '{new('flag and value in a list')}']",
            "curl header": f"curl -H 'X-Team: {new('curl header')}' http://host",
            "curl user": f"curl -u me:{new('curl user')} http://host",
            "proxy in a text": f"curl --proxy me:{new('proxy in a text')}@proxy:80 http://host",
            "proxies in a text": f"proxies={{'https': 'me:{new('proxies in a text')}@proxy'}} refused",
            "webhook in a text": f"at https://hooks.slack.com/services/T1/B1/{new('webhook in a text')}?w=1 failed",
            "netrc": f"machine host login me password {new('netrc')}",
            "traceback": f'  File "x.py", line 3\n    Client(secretkey="{new("traceback")}")\nKeyError: 3',
            "bytes": f"Illegal header value b'Bearer {new('bytes')}'",
            "PEM in a text": f"cannot parse {pem!r}",
            "JSON web token": f"got {new('JSON web token', 'eyJ' + _value(12) + '.', 20)}.{_value(20)}",
            "connection string": f"Endpoint=sb://h/;SharedAccessKey={new('connection string')}=;Path=q",
            "Redis": f"redis://:{new('Redis')}@host:6379/0 refused",
            "export": f"export APITOKEN={new('export')}",
        }

    @property
    def engine_options(self) -> dict[str, object]:
        """All options in one block."""
        return {"headers": self.headers, "urls": list(self.queries), "engine_args": self.arguments}

    def found_in(self, content: bytes) -> list[str]:
        """Return the shapes whose secret occurs in a file."""
        return [shape for shape, secret in self.secrets.items() if secret.encode() in content]
