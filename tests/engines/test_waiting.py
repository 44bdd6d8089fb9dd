"""A client of a server that is away for minutes, which a pretended clock passes at once."""

import signal
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from local_server import serving

from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transport import waiting
from rollcorr.engines.transport.http import AWAY, JsonClient
from rollcorr.engines.transport.waiting import retry_after_seconds, while_waiting

EXIT_SECONDS = 300


def busy(status, retry_after=None):
    def answer(handler, body):
        handler.send_response(status)
        handler.send_header("Content-Length", "4")
        if retry_after is not None:
            handler.send_header("Retry-After", retry_after)
        handler.end_headers()
        handler.wfile.write(b"busy")

    return answer


def until(clock, seconds, before, after=lambda handler, body: handler.send_json("here")):
    """Switch the behavior at a given second of the clock."""
    return lambda handler, body: (before if clock.now < seconds else after)(handler, body)


def hang(handler, body):
    handler.server.released.wait(EXIT_SECONDS)
    handler.close_connection = True


@pytest.mark.parametrize("status", sorted(AWAY))
def test_a_server_that_says_not_now_is_asked_again(clock, status):
    with serving(until(clock, 20, busy(status))) as server:
        client = JsonClient(server.url, retries=0)
        assert client.post("/", None) == "here"
        assert (len(server.requests), client.faults) == (7, 6)


def test_a_server_that_is_away_for_twenty_minutes_is_waited_for(clock):
    lines = []
    with serving(until(clock, 1200, busy(503))) as server:
        client = JsonClient(server.url, retries=0)
        with while_waiting(say=lines.append, stop_requested=lambda: False):
            assert client.post("/", None) == "here"

        # Delays of 0.5, 1, 2, … 16 s, then 39 of 30 s.
        assert len(server.requests) == 1 + 6 + 39
        assert client.faults == len(server.requests) - 1
    assert lines[0] == (
        f"the engine at {server.url} has been away for 5 s (HTTP 503: busy); waiting up to 30 min, the option "
        "wait_minutes. Ctrl-C ends the wait"
    )
    assert len(lines) == 1 + 19 + 1
    assert lines[-1] == f"the engine at {server.url} answers again, after 20 min"


def test_a_server_that_stays_away_ends_the_call_after_wait_minutes(clock):
    with serving(busy(503)) as server:
        client = JsonClient(server.url, wait_minutes=7)
        with pytest.raises(
            EngineUnavailableError, match=r"HTTP 503: busy; the engine has been away for 7 minutes, all"
        ):
            client.post("/", None)
        assert clock.now == pytest.approx(420, abs=1)
        clock.now += 3600
        with pytest.raises(EngineUnavailableError):
            client.post("/", None)
        assert clock.now == pytest.approx(420 + 3600 + 420, abs=2)  # each call has the full time


def test_a_dead_server_that_comes_to_life_at_its_old_address_is_waited_for(clock):
    with serving(busy(200)) as server:
        port = server.server_port
    revived = []

    def revive():
        revived.append(serving(lambda handler, body: handler.send_json("here"), port=port))
        revived[0].__enter__()

    clock.alarms.append((600.0, revive))
    try:
        client = JsonClient(server.url)
        assert client.post_all("/", [1, 2, 3]) == ["here"] * 3
    finally:
        revived[0].__exit__(None, None, None)
    assert client.faults > 3


def test_an_answer_to_one_request_ends_the_absence_for_all(clock):
    """A server that accepts some requests and is busy for the rest is working, however long it needs."""
    turns = iter(range(10**6))

    def every_fifth(handler, body):
        (busy(429) if next(turns) % 5 else lambda handler, body: handler.send_json(body))(handler, body)

    with serving(every_fifth) as server:
        client = JsonClient(server.url, wait_minutes=0.5, concurrency=1)
        assert client.post_all("/", list(range(8))) == list(range(8))
    assert clock.now > 30


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_retry_after_is_followed(clock, form):
    later = datetime.now(timezone.utc) + timedelta(seconds=601)
    told = "600" if form == "seconds" else format_datetime(later, usegmt=True)
    with serving(until(clock, 500, busy(429, told))) as server:
        client = JsonClient(server.url)
        assert client.post("/", None) == "here"
        assert len(server.requests) == 2
    assert 300 < clock.now < 610


def test_a_retry_after_is_cut_to_the_time_that_is_left(clock):
    with serving(busy(503, "86400")) as server:
        client = JsonClient(server.url, wait_minutes=10)
        with pytest.raises(EngineUnavailableError, match="failed 2 times"):
            client.post("/", None)
        assert clock.now == pytest.approx(600, abs=1)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        (" 17 ", 17.0),
        ("9" * 1000, float("inf")),
        ("-5", 0.0),
        ("1.5", 0.0),
        ("soon", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Sun, 06 Nov 99999 08:49:37 GMT", 0.0),
        ("٣", 0.0),
    ],
)
def test_what_a_retry_after_header_means(header, seconds):
    assert retry_after_seconds(header) == seconds


def test_what_a_server_breaks_over_is_not_sent_for_half_an_hour(clock):
    """A broken connection or an HTTP 500 may be the fault of this very request."""
    with serving(busy(500, "86400")) as server:
        client = JsonClient(server.url, retries=3)
        with pytest.raises(EngineUnavailableError, match="failed 4 times, at last with HTTP 500: busy"):
            client.post("/", None)
        assert len(server.requests) == 4
    assert clock.now == pytest.approx(0.5 + 1 + 2, abs=0.1)


def test_a_drip_of_bytes_does_not_outlast_the_deadline(clock):
    def drip(handler, body):
        handler.send(200, b"[", announced=10**6)
        for _ in range(100):
            clock.now += 600
            handler.wfile.write(b"1,")
            handler.wfile.flush()
            if handler.server.released.wait(0.01):
                break
        handler.close_connection = True

    with (
        serving(drip) as server,
        pytest.raises(EngineUnavailableError, match=f"{server.url} did not finish .* within deadline_minutes, 60;"),
    ):
        JsonClient(server.url, deadline_minutes=60).post("/", None)


def test_silence_does_not_outlast_the_deadline_either(clock):
    def silent(handler, body):
        clock.now += 7200
        hang(handler, body)

    with (
        serving(silent) as server,
        pytest.raises(EngineUnavailableError, match="deadline_minutes, 120"),
    ):
        JsonClient(server.url).post_all("/", [1, 2])


def test_waits_count_against_the_deadline(clock):
    with (
        serving(busy(503)) as server,
        pytest.raises(EngineUnavailableError, match="deadline_minutes, 5"),
    ):
        JsonClient(server.url, deadline_minutes=5).post("/", None)
    assert clock.now == pytest.approx(300, abs=1)


def test_a_request_to_stop_ends_the_wait_and_nothing_else(clock):
    stopping = threading.Event()
    clock.alarms.append((100.0, stopping.set))
    with (
        serving(until(clock, 1200, busy(503))) as server,
        while_waiting(say=lambda line: None, stop_requested=stopping.is_set),
    ):
        client = JsonClient(server.url)
        with pytest.raises(EngineUnavailableError, match="the run was asked to stop before the engine was back"):
            client.post_all("/", [1, 2, 3])
        assert clock.now < 110

        # A server that answers finishes the step.
        clock.now = 1200
        assert client.post_all("/", [1, 2, 3]) == ["here"] * 3


def test_outside_a_run_a_wait_is_told_to_the_log(clock, caplog):
    with serving(until(clock, 30, busy(503))) as server:
        client = JsonClient(server.url)
        client.post("/", None)
    assert [record.name for record in caplog.records] == ["rollcorr.engines"] * 2
    assert "has been away for" in caplog.text


def test_one_error_cuts_off_the_requests_that_hang():
    arrived = threading.Barrier(5)

    def one_refuses(handler, body):
        arrived.wait(EXIT_SECONDS)
        if body == 0:
            handler.send(400, b"zero")
        else:
            hang(handler, body)

    with serving(one_refuses) as server:
        client = JsonClient(server.url, concurrency=5)
        with pytest.raises(EngineAnswerError, match="HTTP 400: zero"):
            client.post_all("/", list(range(5)))
        for thread in threading.enumerate():
            if thread.name.startswith("rollcorr-engine"):
                thread.join(EXIT_SECONDS / 2)  # the server still hangs: only the cut connections end them
                assert not thread.is_alive()
        assert not server.released.is_set()

        server.answer = lambda handler, body: handler.send_json(body)
        assert client.post_all("/", [1, 2]) == [1, 2]


INTERRUPTED = """
import sys
from rollcorr.engines.transport import waiting
from rollcorr.engines.transport.http import JsonClient
waiting.FIRST_LINE = 0
with waiting.while_waiting(say=lambda line: print(line, flush=True), stop_requested=lambda: False):
    for path in ("/away", "/hang"):
        try:
            JsonClient(sys.argv[1]).post_all(path, list(range(8)))
        except KeyboardInterrupt:
            print("interrupted", path, flush=True)
raise SystemExit(7)
"""


def test_ctrl_c_ends_a_wait_and_the_process_although_no_request_ever_ends():
    everyone = threading.Barrier(9)

    def never(handler, body):
        if handler.path == "/away":
            busy(503)(handler, body)
        else:
            everyone.wait(EXIT_SECONDS)
            hang(handler, body)

    with serving(never) as server:
        command = [sys.executable, "-c", INTERRUPTED, server.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert "has been away for 0 s" in process.stdout.readline()
        process.send_signal(signal.SIGINT)

        everyone.wait(EXIT_SECONDS)  # all eight are under way
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=EXIT_SECONDS / 2)  # before the server lets go of anything
        assert process.returncode == 7
        assert [line for line in output.splitlines() if "interrupted" in line] == [
            "interrupted /away",
            "interrupted /hang",
        ]
        assert not server.released.is_set()


def test_the_clock_of_a_wait_is_that_of_the_machine():
    before = waiting.monotonic()
    batch = waiting.RequestBatch("here", deadline_minutes=1.0, wait_minutes=1.0)
    assert batch.pause(0.02)
    assert waiting.monotonic() - before >= 0.02
    batch.ended.set()
    assert not batch.pause(1e9)
