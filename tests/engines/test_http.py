"""The client against a real server on this machine that misbehaves as servers do."""

import threading
from contextlib import contextmanager

import pytest
from local_server import serving

from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transport.answer_body import brief
from rollcorr.engines.transport.http import JsonClient, read_address

PASSWORD = "s3cr3t-V4lue"


def echo(handler, body):
    handler.send_json({"echo": body})


def status(code, text):
    return lambda handler, body: handler.send(code, text.encode())


def drop(handler, body):
    handler.close_connection = True
    handler.connection.close()


def drop_all_but_the_probe(handler, body):
    """A request that breaks a server which lives."""
    if handler.command == "GET":
        handler.send(404, b"")
    else:
        drop(handler, body)


def half_a_body(handler, body):
    handler.send(200, b'{"echo": [1, 2', announced=400)
    drop(handler, body)


def hang(handler, body):
    handler.server.released.wait(300)
    drop(handler, body)


@contextmanager
def client_of(*behaviors, **options):
    """A client, and a server that plays a list of behaviors, one per request; the last one repeats."""
    left = list(behaviors)

    def play(handler, body):
        with handler.server.lock:
            behavior = left.pop(0) if len(left) > 1 else left[0]
        behavior(handler, body)

    options = {"timeout": 60.0, "retries": 2, "backoff": 0.001} | options
    with serving(play) as server:
        client = JsonClient(f"{server.url}/", **options)
        yield client, server


def test_json_goes_there_and_back():
    with client_of(echo) as (client, server):
        assert client.post("/generate", {"ids": [1, 2]}) == {"echo": {"ids": [1, 2]}}
        assert client.get("/info") == {"echo": None}
        assert server.requests == [("/generate", {"ids": [1, 2]}), ("/info", None)]


@pytest.mark.parametrize("fault", [status(500, "boom"), status(503, "loading"), half_a_body])
def test_a_passing_fault_is_retried(fault):
    with client_of(fault, fault, echo) as (client, server):
        assert client.post("/", 7) == {"echo": 7}
        assert server.requests.count(("/", 7)) == 3


def test_a_connection_that_breaks_once_is_retried():
    with client_of(drop, echo) as (client, server):
        assert client.post("/", 7) == {"echo": 7}
        assert server.requests == [("/", 7), ("/", None), ("/", 7)]


def test_a_server_that_hangs_once_is_asked_again():
    with client_of(hang, echo, timeout=0.5, retries=8) as (client, _):
        assert client.post("/", 7) == {"echo": 7}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(500, "out of memory"), "HTTP 500: out of memory"),
        (drop_all_but_the_probe, "Protocol|Read"),
        (half_a_body, "peer closed"),
    ],
)
def test_a_lasting_fault_says_what_was_tried(fault, reason):
    with client_of(fault) as (client, server):
        with pytest.raises(EngineUnavailableError, match=f"failed 3 times.*({reason})"):
            client.post("/generate", None)
        assert [path for path, _ in server.requests].count("/generate") == 3


def test_a_proxy_whose_server_is_dead_is_waited_for_as_an_absent_server(clock):
    """Accept every connection and close it, like `ssh -L`."""
    with client_of(drop, wait_minutes=30, retries=0) as (client, server):
        clock.alarms.append((600.0, lambda: setattr(server, "answer", echo)))
        assert client.post("/generate", 7) == {"echo": 7}
        assert clock.now >= 600


def test_a_proxy_whose_server_stays_dead_is_given_up_after_the_wait(clock):
    with (
        client_of(drop, wait_minutes=30, retries=0) as (client, _),
        pytest.raises(EngineUnavailableError, match="away for 30 minutes, all of wait_minutes"),
    ):
        client.post("/generate", None)
    assert 1800 <= clock.now < 1900


def test_a_server_that_speaks_no_http_is_not_waited_for(clock):
    def not_http(handler, body):
        handler.wfile.write(b"220 mail.example ESMTP\r\n\r\n")
        drop(handler, body)

    with (
        client_of(not_http, wait_minutes=30, retries=0) as (client, _),
        pytest.raises(EngineUnavailableError, match=r"failed 1 times.*check that the engine lives"),
    ):
        client.post("/generate", None)
    assert clock.now == 0


def test_a_server_that_hangs_is_unavailable_after_its_timeouts():
    with (
        client_of(hang, timeout=0.05, retries=1) as (client, _),
        pytest.raises(EngineUnavailableError, match="ReadTimeout"),
    ):
        client.post("/generate", None)


def test_a_dead_engine_is_unavailable():
    with client_of(echo) as (client, _):
        url = client.url
    with (
        pytest.raises(EngineUnavailableError, match="ConnectError"),
    ):
        JsonClient(url, wait_minutes=0).get("/health")


def test_a_refusal_is_shown_and_not_repeated():
    with client_of(status(400, "logprobs must be <= 20")) as (client, server):
        with pytest.raises(EngineAnswerError, match="refused, HTTP 400: logprobs must be <= 20"):
            client.post("/generate", None)
        assert len(server.requests) == 1


@pytest.mark.parametrize("text", ['{"echo": [1, 2', "", "<html>"])
def test_a_whole_answer_that_is_no_json_is_not_repeated(text):
    with client_of(status(200, text)) as (client, server):
        with pytest.raises(EngineAnswerError, match="did not answer in JSON"):
            client.post("/generate", None)
        assert len(server.requests) == 1


def test_answers_come_in_the_order_of_their_requests():
    with client_of(echo, concurrency=4) as (client, _):
        assert client.post_all("/", list(range(40))) == [{"echo": number} for number in range(40)]
        assert client.post_all("/", []) == []


def test_requests_are_under_way_at_the_same_time_but_no_more_than_allowed():
    gathered, lock, waiting = threading.Barrier(3), threading.Lock(), []

    def together(handler, body):
        with lock:
            waiting.append(body)
            crowd = len(waiting)
        gathered.wait(300)  # passes only when three are here at once
        with lock:
            waiting.pop()
        handler.send_json(crowd)

    with client_of(together, concurrency=3) as (client, _):
        assert max(client.post_all("/", list(range(6)))) == 3


def test_one_failure_fails_the_batch_and_stops_what_has_not_begun():
    def refuse_seven(handler, body):
        (status(400, "seven") if body == 7 else echo)(handler, body)

    with client_of(refuse_seven, concurrency=1) as (client, server):
        with pytest.raises(EngineAnswerError, match="seven"):
            client.post_all("/", list(range(100)))
        assert len(server.requests) < 100


def test_a_key_is_sent_and_not_shown():
    def refuse(handler, body):
        handler.send(401, handler.headers["Authorization"].split()[0].encode())

    with client_of(refuse, headers={"Authorization": "Bearer secret"}) as (client, _):
        with pytest.raises(EngineAnswerError, match="HTTP 401: Bearer") as caught:
            client.get("/")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout must be"),
        ({"retries": -1}, "retries must be"),
        ({"backoff": -1.0}, "backoff must be"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"url": "localhost:30000"}, "url must begin with http"),
        ({"url": "http://"}, "and name a host"),
        ({"url": "http://host:99999"}, "and name a host"),
        ({"wait_minutes": -1.0}, "wait_minutes must be"),
        ({"wait_minutes": float("inf")}, "wait_minutes must be"),
        ({"deadline_minutes": 0.0}, "deadline_minutes must be"),
        ({"max_answer_bytes": 0}, "max_answer_bytes must be"),
        ({"headers": {"Authorization": "Bearer s3cret\n"}}, "the header 'Authorization' has a character"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        JsonClient(**({"url": "http://localhost:1"} | options))


SECRET = "hf_" + "s3cretKey" * 5


@pytest.mark.parametrize("before", [400, 440, 470, 490])
def test_a_secret_that_the_cut_of_a_text_would_halve_is_hidden(before):
    text = f"{'x ' * (before // 2)}{SECRET}"
    with client_of(status(400, text)) as (client, _):
        with pytest.raises(EngineAnswerError) as refused:
            client.post("/", None)
        assert "s3cret" not in str(refused.value)
    with client_of(status(200, text)) as (client, _):
        with pytest.raises(EngineAnswerError) as no_json:
            client.post("/", None)
        assert "s3cret" not in str(no_json.value)


@pytest.mark.parametrize("before", [100, 130, 200, 900])
def test_a_secret_that_a_shortened_value_would_halve_is_hidden(before):
    text = f"{'x ' * (before // 2)}{SECRET}{' x' * 100}"
    assert "s3cret" not in brief({"message": [text]})
    assert "s3cret" not in brief("x " * 60 + SECRET + " x" * 10**6)


def test_an_address_is_taken_apart():
    address = read_address(f"http://me%40home:{PASSWORD}@host:80/api/?api_key=k&x=1")
    assert (address.username, address.password) == ("me@home", PASSWORD)
    assert dict(address.params) == {"api_key": "k", "x": "1"}
    assert JsonClient(str(address)).url == "http://host/api"
    assert read_address("http://[::1]:80").host == "::1"


@pytest.mark.parametrize("url", ["ftp://u:{}@h", "u:{}@h", "http://u:{}/x@h", "http://h:{}", "ws://h?token={}"])
def test_a_wrong_address_is_refused_without_its_secret(url):
    with pytest.raises(ValueError, match="url") as error:
        read_address(url.format(PASSWORD))
    assert "http://" in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    if "@" in url or "?" in url:
        assert PASSWORD not in str(error.value)
