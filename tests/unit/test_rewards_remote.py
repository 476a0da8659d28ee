"""Scorers behind HTTP, on loopback: what they get, what is tried again, and every way in which they fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from podium import RewardStage
from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import RewardSettings
from podium.rewards.fusion import check_columns
from podium.rewards.loading import load_reward
from podium.rewards.remote import HttpReward


class Scorer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer):
        self.answer, self.calls, self.headers, self.running, self.most = answer, [], [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.calls.append(call)
            server.headers.append(dict(self.headers))
            number = len(server.calls)
            server.running += 1
            server.most = max(server.most, server.running)
        status, body = server.answer(call, number, self)
        with server.lock:
            server.running -= 1
        if status is None:
            return
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Scorer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def lengths(call, number, handler):
    return 200, {"scores": [len(r) for r in call["responses"]]}


def batch_of(n, **columns):
    data = {f"data.{name}": values for name, values in columns.items()}
    texts = ["x" * i for i in range(n)]
    return Batch({"prompt": ["p"] * n, "response": texts, "row_index": list(range(n)), **data})


def test_batches_in_order_several_at_a_time(serve):
    def slow(call, number, handler):
        time.sleep(0.05)
        return lengths(call, number, handler)

    server = serve(slow)
    reward = HttpReward(server.url, batch_size=3, concurrency=2)
    batch = batch_of(10, answer=list("abcdefghij"), topic=["t"] * 10)
    assert reward(batch).values.tolist() == list(range(10))
    assert sorted(len(c["responses"]) for c in server.calls) == [1, 3, 3, 3]
    assert server.most == 2
    first = next(c for c in server.calls if c["responses"][0] == "")
    assert first == {
        "prompts": ["p"] * 3,
        "responses": ["", "x", "xx"],
        "columns": {"answer": ["a", "b", "c"], "topic": ["t"] * 3},
    }


def test_from_settings_columns_token_and_what_does_not_apply(serve, monkeypatch):
    server = serve(lambda call, number, handler: (200, {"scores": [None, 2]}))
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    options = {"columns": ["answer"], "token_env": "SCORER_TOKEN", "headers": {"X-Run": "7"}}
    reward = load_reward(RewardSettings(function=server.url, weight=0.5, options=options))
    assert (reward.name, reward.weight) == ("score", 0.5)
    scored = reward(batch_of(2, answer=["a", "b"], topic=["t", "t"]))
    assert (scored.absent, float(scored.values[1])) == ([0], 2.0)
    assert server.calls[0]["columns"] == {"answer": ["a", "b"]}
    assert (server.headers[0]["Authorization"], server.headers[0]["X-Run"]) == ("Bearer secret", "7")
    with pytest.raises(ConfigError, match="needs the data column answer"):
        check_columns([reward], ["topic"])


def test_a_failed_call_is_made_again(serve):
    def third(call, number, handler):
        return lengths(call, number, handler) if number == 3 else (503, b"busy")

    server = serve(third)
    assert HttpReward(server.url, backoff=0.01)(batch_of(2)).values.tolist() == [0.0, 1.0]
    assert len(server.calls) == 3


def cut_off(call, number, handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    return None, b""


def hang(call, number, handler):
    time.sleep(1.5)
    return None, b""


def drip(call, number, handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(30):
        try:
            handler.wfile.write(b" ")
        except OSError:
            break
        time.sleep(0.05)
    return None, b""


@pytest.mark.parametrize(
    ("answer", "calls", "message"),
    [
        (lambda *_: (500, b"oops"), 2, r"gave no scores \(2 tries\): status 500 .*oops"),
        (lambda *_: (404, b"?"), 1, r"\(1 try\): status 404 Not Found"),
        (lambda *_: (302, b""), 1, "status 302"),
        (cut_off, 2, r"\(2 tries\): (RemoteDisconnected|ConnectionResetError)"),
        (hang, 2, r"\(2 tries\): no answer within 0.3 seconds"),
        (drip, 2, r"\(2 tries\): no answer within 0.3 seconds"),
        (lambda *_: (200, b"<html>"), 1, "the reply is not JSON: b'<html>'"),
        (lambda *_: (200, [1, 2]), 1, 'the reply has no list "scores"'),
        (lambda *_: (200, {"scores": [1.0]}), 1, "1 scores came for 2 responses"),
        (lambda *_: (200, b'{"scores": [NaN, 1]}'), 1, r"gave 'nan' \(try 1\), not a finite number"),
        (lambda *_: (200, {"scores": ["high", 1]}), 1, r"gave 'high' \(try 1\), not a finite number"),
        (lambda *_: (200, {"scores": [True, 1]}), 1, "gave 'True'"),
        (lambda *_: (200, b'{"scores": [1e999, 1]}'), 1, "gave 'inf'"),
        (lambda *_: (200, {"scores": [10**400, 1]}), 1, "gave '1000"),
    ],
)
def test_garbage_and_silence(serve, answer, calls, message):
    server = serve(answer)
    reward = HttpReward(server.url, timeout=0.3, retries=1, backoff=0.01)
    started = time.perf_counter()
    with pytest.raises(RewardError, match=message) as raised:
        reward(batch_of(2))
    assert time.perf_counter() - started < 1.5
    assert len(server.calls) == calls
    assert server.url in str(raised.value)
    assert "sample 0 (data row 0)" in str(raised.value)
    assert "on_error: skip" in str(raised.value)


def test_failures_that_are_skipped_are_counted(serve):
    def some(call, number, handler):
        return (400, b"no") if "xx" in call["responses"] else lengths(call, number, handler)

    reward = HttpReward(serve(some).url, on_error="skip", batch_size=2)
    scored = reward(batch_of(4))
    assert [row for row, _ in scored.failed] == [2, 3]
    assert scored.values[:2].tolist() == [0.0, 1.0]


def test_down_at_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/score"
    stage = RewardStage(functions=[RewardSettings(function=url)])
    with pytest.raises(ConfigError, match=rf"reward 'score': nothing answers at {url}: .*refused[\s\S]*start the scorer"):
        stage.check_data([])
    RewardStage(functions=[RewardSettings(function=url, options={"probe": False})]).check_data([])
    with pytest.raises(RewardError, match=r"ConnectionRefusedError"):
        HttpReward(url, retries=0)(batch_of(1))


def test_the_probe_sends_nothing(serve):
    server = serve(lengths)
    HttpReward(server.url).check()
    assert server.calls == []


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://", {}, "is no address"),
        ("http://h:port/", {}, "is no address"),
        ("http://me:pw@h/", {}, r"has a user name in it[\s\S]*token_env"),
        ("http://h/", {"batch_size": 0}, "batch_size=0"),
        ("http://h/", {"timeout": 0}, "timeout=0"),
        ("http://h/", {"headers": {"X-A": "b\nc"}}, "the header 'X-A' is no line of text"),
        ("http://h/", {"token_env": "NOT_SET_ANYWHERE"}, r"variable NOT_SET_ANYWHERE .*is not set"),
        ("http://h/", {"time_out": 3}, r"unknown option 'time_out'[\s\S]*did you mean 'timeout'"),
    ],
)
def test_settings_that_cannot_be(url, options, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_reward(RewardSettings(function=url, options=options))
    assert "pw" not in str(raised.value)


def test_a_column_that_is_not_json(serve):
    with pytest.raises(RewardError, match=r"cannot be sent as JSON[\s\S]*options\.columns"):
        HttpReward(serve(lengths).url)(batch_of(1, when=[{1, 2}]))
