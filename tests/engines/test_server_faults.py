"""Every fault of a server, one at a time: the engine's error names it, and no part of the response is used.

The faults come over real connections from a server that otherwise answers as SGLang 0.5.23 did.
"""

import copy
import gzip
import json
import math
import socket
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from local_server import serving
from test_sglang import RAW, make_engine, replay

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineError, EngineUnavailableError
from rollcorr.engines.completions import rollout_from_completions
from rollcorr.engines.sglang import read_completion, read_scores
from rollcorr.engines.transport.http import JsonClient
from rollcorr.engines.vllm.answers import choice_of_text, completion, prompt_log_probs

PROMPTS = RAW["request"]["input_ids"]
EXIT_SECONDS = 300


def body(data, code=200, **headers):
    """Return a full response with other bytes."""

    def fault(handler, answer):
        handler.send_response(code)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return fault


def status(code, text="no", **headers):
    return body(text.encode(), code, **headers)


def drop(handler, answer):
    handler.close_connection = True
    handler.connection.close()


def reset(handler, answer):
    """An RST in place of an end."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    drop(handler, answer)


def cut_off(handler, answer):
    data = json.dumps(answer).encode()
    handler.send(200, data[: len(data) // 2], announced=len(data))
    drop(handler, answer)


def not_http(handler, answer):
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n" * 20)
    drop(handler, answer)


def endless_header(handler, answer):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 300_000)
    drop(handler, answer)


def endless(handler, answer):
    """A body without an announced length that goes on as long as someone reads."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    piece = b" " * 1_000_000
    while not handler.server.released.is_set():
        handler.wfile.write(piece)


def endless_refusal(handler, answer):
    handler.send_response(500)
    handler.send_header("Connection", "close")
    handler.end_headers()
    while not handler.server.released.is_set():
        handler.wfile.write(b"x" * 1_000_000)


def elsewhere(code):
    return lambda handler, answer: status(code, Location=f"http://user:s3cret@localhost:1{handler.path}?key=s3cret")(
        handler, answer
    )


def spoiled(change):
    """The recorded answer with one thing changed."""

    def fault(handler, answer):
        changed = copy.deepcopy(answer)
        other = change(changed)
        handler.send(200, json.dumps(changed if other is None else other).encode())

    return fault


def log_prob(value):
    return spoiled(lambda answer: answer["meta_info"]["output_token_logprobs"][3].__setitem__(0, value))


def token(value):
    def change(answer):
        answer["meta_info"]["output_token_logprobs"][3][1] = value
        answer["output_ids"][3] = value

    return spoiled(change)


def meta(**values):
    return spoiled(lambda answer: answer["meta_info"].update(values))


def bomb():
    """A gigabyte of zeros, from a thousand times the same packed piece; nobody may get as far as the check sum."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    first, again = (packer.compress(bytes(1_000_000)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + 999 * again + packer.flush()


BOMB = bomb()
UNAVAILABLE, REFUSED = EngineUnavailableError, EngineAnswerError
FAULTS = {
    **{
        f"status {code}": (status(code), REFUSED, f"refused, HTTP {code}: no")
        for code in (400, 401, 403, 404, 413, 422)
    },
    **{
        f"status {code}": (status(code), UNAVAILABLE, f"HTTP {code}: no")
        for code in (500, 501, 502, 503, 504, 408, 429)
    },
    "retry later than the budget": (status(429, Retry_After="86400"), UNAVAILABLE, "all of wait_minutes"),
    "dropped connection": (drop, UNAVAILABLE, "failed 1 times"),
    "reset connection": (reset, UNAVAILABLE, "failed 1 times"),
    "answer cut off": (cut_off, UNAVAILABLE, "peer closed"),
    "no HTTP at all": (not_http, UNAVAILABLE, "RemoteProtocolError"),
    "endless header": (endless_header, UNAVAILABLE, "failed 1 times"),
    "HTML": (body(b"<html><title>502</title>"), REFUSED, "did not answer in JSON .*<html>"),
    "empty body": (body(b""), REFUSED, "did not answer in JSON"),
    "no content": (status(204, ""), REFUSED, "did not answer in JSON"),
    "half of a JSON": (body(b'{"meta_info": {"id'), REFUSED, "did not answer in JSON"),
    "bytes of no text": (body(b'{"a": "\xff\xfe"}'), REFUSED, "did not answer in JSON"),
    "nested JSON": (body(b"[" * 100_000), REFUSED, "nested too deeply"),
    "a number": (body(b"7"), REFUSED, "row 1 is no answer of SGLang .*: 7"),
    "null": (body(b"null"), REFUSED, "no answer of SGLang .*: None"),
    "a list of answers": (spoiled(lambda answer: [answer]), REFUSED, "no answer of SGLang"),
    "log-prob NaN": (log_prob(math.nan), REFUSED, r"log_probs\[3\] of row 1 is nan"),
    "log-prob infinite": (log_prob(-math.inf), REFUSED, r"log_probs\[3\] of row 1 is -inf"),
    "log-prob null": (log_prob(None), REFUSED, r"log_probs\[3\] of row 1 is None"),
    "log-prob -9999": (log_prob(-9999.0), REFUSED, r"log_probs\[3\] of row 1 is -9999"),
    "log-prob above 0": (log_prob(0.5), REFUSED, r"log_probs\[3\] of row 1 is 0.5, a log-prob is at most 0"),
    "log-prob as text": (log_prob("-0.5"), REFUSED, r"log_probs\[3\] of row 1 is '-0.5', no number"),
    "log-prob true": (log_prob(True), REFUSED, r"log_probs\[3\] of row 1 is True, no number"),
    "log-prob of 400 digits": (log_prob(-(10**400)), REFUSED, r"log_probs\[3\] of row 1 is -1000"),
    "short list": (spoiled(lambda a: a["meta_info"]["output_token_logprobs"].pop() and None), REFUSED, "row 1 has 11"),
    "long list": (
        spoiled(lambda a: a["meta_info"]["output_token_logprobs"].append([-1.0, 5, None])),
        REFUSED,
        "row 1 has 13 output_token_logprobs",
    ),
    "no list": (meta(output_token_logprobs={"0": [-1.0, 5, None]}), REFUSED, "no list of"),
    "tokens of another answer": (spoiled(lambda a: a["output_ids"].__setitem__(0, 9)), REFUSED, "and output_ids"),
    "token outside the vocabulary": (
        token(999),
        REFUSED,
        r"token_ids\[3\] of row 1 is 999, no token id of the vocabulary",
    ),
    "token below 0": (token(-1), REFUSED, r"token_ids\[3\] of row 1 is -1"),
    "token of 30 digits": (token(10**30), REFUSED, "no token id of the vocabulary"),
    "token 3.0": (token(3.0), REFUSED, r"token_ids\[3\] of row 1 is 3.0, no token id"),
    "version 7": (
        meta(weight_versions=[{"version": "7", "start": 0, "end": 12}]),
        REFUSED,
        "token 0 of row 1 is of version 7 by SGLang's own account, and it was given version 0",
    ),
    "version main": (
        meta(weight_versions=[{"version": "main", "start": 0, "end": 12}]),
        REFUSED,
        "'main', which is no policy version",
    ),
    "spans with a float": (
        meta(weight_versions=[{"version": "default", "start": 0, "end": 12.0}]),
        REFUSED,
        "no list of spans",
    ),
    "spans with a gap": (
        meta(weight_versions=[{"version": "default", "start": 0, "end": 9}]),
        REFUSED,
        "do not cover its 12 tokens",
    ),
    "ended by the server": (meta(finish_reason={"type": "abort"}), REFUSED, "did not finish"),
    **{f"redirect {code}": (elsewhere(code), REFUSED, f"a redirect, HTTP {code}, to") for code in (301, 302, 307, 308)},
    "redirect to nowhere": (status(302), REFUSED, "to nowhere. Redirects are not followed"),
    "endless body": (endless, REFUSED, "more than 32 MB, unpacked.*raise max_answer_megabytes"),
    "endless refusal": (endless_refusal, UNAVAILABLE, "HTTP 500: xxx"),
    "packed 1000 times": (body(BOMB, Content_Encoding="gzip"), REFUSED, "more than 32 MB, unpacked"),
    "packed twice": (body(gzip.compress(BOMB), Content_Encoding="gzip, gzip"), REFUSED, "only gzip was offered"),
    "packed otherwise": (body(b"...", Content_Encoding="br"), REFUSED, "Content-Encoding 'br'"),
    "packed badly": (body(b"{}", Content_Encoding="gzip"), REFUSED, "no gzip"),
    "half of a gzip": (body(BOMB[:40], Content_Encoding="gzip"), REFUSED, "gzip that ends too early"),
    "lists without end": (body(b"[" + b"[]," * 3_000_000 + b"0]"), REFUSED, "more lists and mappings than that"),
}


class Faulty:
    """Answers as recorded; the second prompt gets the fault, if there is one."""

    def __init__(self):
        self.good = replay(RAW)
        self.fault = None

    def __call__(self, handler, request):
        is_second = request["input_ids"] == PROMPTS[1] and request["sampling_params"]["max_new_tokens"]
        if self.fault is None or not is_second:
            self.good(handler, request)
        else:
            self.fault(handler, RAW["response"][1])


@pytest.fixture(scope="module")
def setting():
    """An engine, its server, and the rollout without a fault."""
    faulty = Faulty()
    with serving(faulty) as server:
        engine = make_engine(server, wait_minutes=0, retries=0)
        yield engine, faulty, server, engine.generate(PROMPTS, seed=0)


def test_there_are_faults_of_every_kind():
    assert len(FAULTS) >= 33


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_that_names_the_server_and_nothing_of_the_batch_is_used(setting, name):
    engine, faulty, server, expected = setting
    fault, kind, message = FAULTS[name]
    faulty.fault = fault
    try:
        with pytest.raises(kind, match=message) as caught:
            engine.generate(PROMPTS, seed=0)
    finally:
        faulty.fault = None
    assert type(caught.value) is kind
    assert server.url in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2500

    # The engine is unchanged: the next batch is complete and correct.
    again = engine.generate(PROMPTS, seed=0)
    assert torch.equal(again.tokens.response_ids, expected.tokens.response_ids)
    assert torch.equal(again.rollout_log_prob, expected.rollout_log_prob)
    assert engine.weight_version == 0


def test_a_byte_now_and_then_is_no_answer(setting, clock):
    engine, faulty, server, _ = setting

    def drip(handler, answer):
        handler.send(200, b"[", announced=10**6)
        for _ in range(100):
            clock.now += 600
            handler.wfile.write(b"1,")
            if handler.server.released.wait(0.01):
                break
        handler.close_connection = True

    faulty.fault = drip
    try:
        with pytest.raises(
            EngineUnavailableError, match=f"{server.url} did not finish the batch within deadline_minutes"
        ):
            engine.generate(PROMPTS, seed=0)
    finally:
        faulty.fault = None


def test_a_redirect_takes_no_key_to_another_server_nor_to_another_place_on_this_one():
    reached = []

    def note(handler, request):
        reached.append((handler.path, handler.headers["Authorization"]))
        handler.send_json(1)

    with serving(note) as other, serving(None) as server:
        for place in (f"{other.url}/taken", f"{server.url}/moved", "/moved"):
            server.answer = lambda handler, request, to=place: status(307, Location=to)(handler, None)
            with (
                pytest.raises(EngineAnswerError, match=r"Redirects are not followed.*set url to"),
            ):
                JsonClient(server.url, headers={"Authorization": "Bearer s3cret"}).post("/generate", None)
        assert [path for path, _ in server.requests] == ["/generate"] * 3
    assert reached == []


def test_a_packed_answer_that_is_right_is_read():
    answer = {"echo": list(range(1000))}
    packed = body(gzip.compress(json.dumps(answer).encode()), Content_Encoding="gzip")
    with serving(packed) as server:
        client = JsonClient(server.url)
        assert client.post("/", None) == answer
        assert server.requests == [("/", None)]


def test_the_limit_of_an_answer_is_an_option_and_grows_with_the_responses_that_are_asked_for():
    with serving(replay(RAW)) as server:
        with pytest.raises(EngineAnswerError, match=r"more than 0\.001 MB"):
            make_engine(server, max_answer_megabytes=0.001).generate(PROMPTS, seed=0)
        assert make_engine(server)._client.max_answer_bytes == 32_000_000
        assert make_engine(server, max_new_tokens=200_000)._client.max_answer_bytes == 200_000 * 256


MEMORY = """
import sys
from pathlib import Path
from rollcorr.engines.base import EngineError
from rollcorr.engines.transport.http import JsonClient
client = JsonClient(sys.argv[1], retries=0, wait_minutes=0)
for path in sys.argv[2:]:
    try:
        client.post(path, None)
        print("answered", path)
    except EngineError as error:
        print("refused", path)
# Not ru_maxrss: that begins with the peak of the process that started this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def test_no_answer_takes_a_gigabyte_of_memory():
    """Run in a child process, so that the peak is the client's. Two of the responses are just within the limits."""
    largest = 32_000_000
    hostile = {
        "/gzip": body(BOMB, Content_Encoding="gzip"),
        "/twice": body(gzip.compress(BOMB), Content_Encoding="gzip, gzip"),
        "/endless": endless,
        "/refusal": endless_refusal,
        "/lists": body(b"[" + b"[]," * ((largest - 3) // 3) + b"0]"),
        "/mappings": body(b"[" + b'{"a":1},' * (1_900_000) + b"0]"),
        "/texts": body(b"[" + b'"ab",' * ((largest - 3) // 5) + b"0]"),
    }
    with serving(lambda handler, request: hostile[handler.path](handler, None)) as server:
        command = [sys.executable, "-c", MEMORY, server.url, *hostile]
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXIT_SECONDS, check=True)
    *outcomes, peak = done.stdout.splitlines()
    refused = [f"refused {path}" for path in hostile if path not in ("/mappings", "/texts")]
    assert outcomes == [*refused, "answered /mappings", "answered /texts"]
    assert int(peak) < 1e9


def deep(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


WRONG = [None, True, 1.5, -3, 10**30, 1e300, math.nan, -math.inf, "x", "", [], [[]], {}, {"a": []}, deep(900)]


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    inside = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)

    for key, item in inside:
        yield from places(item, (*path, key))


def altered(value, path, other):
    if not path:
        return other
    changed = copy.copy(value)
    changed[path[0]] = altered(value[path[0]], path[1:], other)
    return changed


def entry(token_id, log_prob, others=()):
    return {
        "token_id": token_id,
        "logprob": log_prob,
        "top_logprobs": [{"token_id": t, "logprob": p} for t, p in others],
    }


SPANS = [{"version": "0", "start": 0, "end": 1}, {"version": "0", "start": 1, "end": 2}]
TRUNCATED = SamplingSpec(temperature=0.7, top_p=0.9, top_k=20, logprobs="processed", policy_version=0)
SGLANG = {
    "output_ids": [3, 4],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "completion_tokens": 2,
        "output_token_logprobs": [[-1.0, 3, None], [-2.0, 4, None]],
        "output_token_sampling_logprobs": [-0.5, -1.5],
        "output_token_sampling_mask": [[3, 5], [4]],
        "weight_versions": SPANS,
        "weight_version": "0",
        "input_token_logprobs": [[None, 3, None], [-2.0, 4, None]],
    },
}
HALF = math.log(0.5)
VLLM = {
    "token_ids": [3, 4],
    "finish_reason": "length",
    "logprobs": {"content": [entry(3, HALF, [(3, HALF), (5, HALF)]), entry(4, 0.0, [(4, 0.0), (9, -9999.0)])]},
    "weight_versions": SPANS,
}
VLLM_TEXT = {
    "token_ids": [3, 4],
    "finish_reason": "length",
    "logprobs": {
        "tokens": ["token_id:3", "token_id:4"],
        "token_logprobs": [HALF, 0.0],
        "top_logprobs": [{"token_id:3": HALF, "token_id:5": HALF}, {"token_id:4": 0.0}],
    },
}
SCORES = [None, {"4": {"logprob": -0.5}}]


def as_rollout(completed):
    return rollout_from_completions([[1]], [completed], sampling=TRUNCATED, pad_token_id=0, vocabulary_size=20)


READERS = {
    "SGLang": (
        SGLANG,
        lambda answer: as_rollout(read_completion(answer, 0, masked=True, raw=False, initial=None)),
    ),
    "SGLang's scores": (SGLANG, lambda answer: read_scores(answer, 0, [3, 4], version=0, initial=None)),
    "vLLM": (VLLM, lambda choice: as_rollout(completion(choice, row=0, sampling=TRUNCATED, initial=None))),
    "vLLM's completions": (
        VLLM_TEXT,
        lambda choice: as_rollout(completion(choice_of_text(choice), row=0, sampling=TRUNCATED, initial=None)),
    ),
    "vLLM's scores": (SCORES, lambda found: prompt_log_probs(found, [3, 4])),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_value_of_another_kind_anywhere_in_an_answer_is_an_engine_error_or_changes_nothing(reader):
    good, read = READERS[reader]
    expected = read(good)
    tried = refused = 0
    for path in places(good):
        for other in WRONG:
            tried += 1
            try:
                found = read(altered(good, path, other))
            except EngineError:
                refused += 1
                continue

            # Unread fields may contain anything; scores are checked one level up, all together.
            if "scores" not in reader:
                assert torch.equal(found.tokens.response_ids, expected.tokens.response_ids), (path, other)
                assert torch.isfinite(found.rollout_log_prob).all(), (path, other)
                assert (found.rollout_log_prob <= 0).all(), (path, other)
                assert found.policy_versions is None, (path, other)
    assert refused > tried / 6  # the rest is not read
