"""A scorer behind HTTP: batches of responses go there as JSON, scores come back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import ShapingSettings
from podium.rewards.base import OnError, SampleFailure, Scored, collect, responses_of

LARGEST_REPLY = 16 * 2**20
"""Bytes; a longer reply is refused."""
_LARGEST = torch.finfo(torch.float32).max
_SHOWN = 120


class _Failure(Exception):
    """A call that gave no scores, and whether another try may."""

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.reason, self.again = reason, again


class HttpReward:
    """Scores by `POST url` with `{"prompts": [...], "responses": [...], "columns": {name: [...]}}`; the reply is
    `{"scores": [...]}`, one number a response, in order (null: the reward does not apply to it).

    A call that fails (no connection, past its deadline, status 429 or 5xx) is made again, after a wait that doubles. What
    else is no answer (another status, no JSON, a wrong number of scores, NaN) is not: it would be the same again.

    Args:
        batch_size: responses in one call.
        timeout: seconds for one call, from the connection to the last byte.
        retries: further calls after one that failed; `backoff`: seconds before the first of them.
        concurrency: calls at the same time.
        headers: further request headers. `token_env`: the environment variable with a bearer token.
        columns: data columns that are sent; by default all there are.
        probe: connect once before the run starts (nothing is sent), so that a server that is down is an error then.

    Proxies of the environment are not used, redirects not followed. Raises ConfigError for a setting that cannot be.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        weight: float = 1.0,
        on_error: OnError = "raise",
        batch_size: int = 64,
        timeout: float = 30.0,
        retries: int = 3,
        backoff: float = 0.5,
        concurrency: int = 4,
        headers: Mapping[str, str] | None = None,
        token_env: str | None = None,
        columns: Sequence[str] | None = None,
        probe: bool = True,
    ) -> None:
        self.url, self.weight, self.on_error = url, weight, on_error
        self._scheme, self._host, self._port, self._path = _parts(url)
        self.name = name or self._path.partition("?")[0].strip("/").rpartition("/")[2] or self._host
        self.batch_size, self.timeout, self.retries = batch_size, timeout, retries
        self.backoff, self.concurrency, self.probe = backoff, concurrency, probe
        self._check_numbers()
        self._sent = None if columns is None else tuple(columns)
        self.columns = self._sent or ()
        self.shaping: ShapingSettings | None = None
        self._headers = {"Content-Type": "application/json", **self._checked_headers(headers), **self._token(token_env)}

    def __call__(self, batch: Batch) -> Scored:
        """Raises RewardError (url, tries, sample) where a response got no score, or counts it as failed."""
        if not len(batch):
            return Scored(torch.empty(0))
        parts = batch.split(self.batch_size)
        with ThreadPoolExecutor(min(self.concurrency, len(parts))) as threads:
            answers = [answer for part in threads.map(self._answers, parts) for answer in part]
        return collect(self.name, batch, answers, self.on_error)

    def check(self) -> None:
        """Raises ConfigError where nothing listens at the address (with `probe`)."""
        if not self.probe:
            return
        try:
            socket.create_connection((self._host, self._port), timeout=min(self.timeout, 10.0)).close()
        except OSError as error:
            raise ConfigError(
                f"nothing answers at {self.url}: {error}",
                where=f"reward '{self.name}'",
                remedy="start the scorer, correct the address, or set options.probe: false where it starts later",
            ) from None

    # ------------------------------------------------------------------ calls

    def _answers(self, part: Batch) -> list[Any]:
        """A score or a failure for each row."""
        body = self._body(part)
        tries = 0
        while True:
            tries += 1
            try:
                return self._read(self._post(body), len(part), tries)
            except _Failure as failure:
                if not failure.again or tries > self.retries:
                    what = f"{self.url} gave no scores ({tries} {'try' if tries == 1 else 'tries'}): {failure.reason}"
                    return [SampleFailure(what)] * len(part)
            time.sleep(self.backoff * 2 ** (tries - 1))

    def _body(self, part: Batch) -> bytes:
        extras = part.extras()
        columns = {name: extras[name] for name in (self._sent if self._sent is not None else extras) if name in extras}
        content = {"prompts": part["prompt"], "responses": responses_of(part), "columns": columns}
        try:
            return json.dumps(content).encode()
        except (TypeError, ValueError) as error:
            what = f"a row cannot be sent as JSON: {error}"
            remedy = "name the data columns that the scorer needs (options.columns)"
            raise RewardError(what, where=f"reward '{self.name}'", remedy=remedy) from error

    def _post(self, body: bytes) -> bytes:
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout)
        late, started = threading.Event(), time.monotonic()
        timer: threading.Timer | None = None
        try:
            connection.connect()
            # The connection itself forgets its socket once a reply without a length has begun.
            left = max(0.0, self.timeout - (time.monotonic() - started))
            timer = threading.Timer(left, _cut, (connection.sock, late))
            timer.daemon = True
            timer.start()
            connection.request("POST", self._path, body, self._headers)
            reply = connection.getresponse()
            content = reply.read(LARGEST_REPLY + 1)
        except (OSError, http.client.HTTPException) as error:
            why = self._late() if late.is_set() or isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise _Failure(why, again=True) from error
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()
        if late.is_set():  # a reply without a length looks whole where it was cut
            raise _Failure(self._late(), again=True)
        if reply.status != 200:
            why = f"status {reply.status} {reply.reason}, {content[:_SHOWN]!r}"
            raise _Failure(why, again=reply.status == 429 or reply.status >= 500)
        return content

    def _late(self) -> str:
        return f"no answer within {self.timeout:g} seconds"

    def _read(self, content: bytes, rows: int, tries: int) -> list[Any]:
        if len(content) > LARGEST_REPLY:
            raise _Failure(f"the reply is longer than {LARGEST_REPLY} bytes", again=False)
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            raise _Failure(f"the reply is not JSON: {content[:_SHOWN]!r}", again=False) from None
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if not isinstance(scores, list):
            raise _Failure(f'the reply has no list "scores": {content[:_SHOWN]!r}', again=False)
        if len(scores) != rows:
            raise _Failure(f"{len(scores)} scores came for {rows} responses", again=False)
        return [self._checked(score, tries) for score in scores]

    def _checked(self, score: Any, tries: int) -> Any:
        if score is None or (isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < _LARGEST):
            return score
        return SampleFailure(f"{self.url} gave {str(score)[:_SHOWN]!r} (try {tries}), not a finite number")

    # ------------------------------------------------------------------ settings

    def _check_numbers(self) -> None:
        least = {"batch_size": 1, "retries": 0, "concurrency": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name}={getattr(self, name)}", where=f"reward '{self.name}'", remedy=f"at least {value}")
        if self.timeout <= 0 or self.backoff < 0:
            what = f"timeout={self.timeout}, backoff={self.backoff}: seconds, timeout above 0"
            raise ConfigError(what, where=f"reward '{self.name}'")

    def _checked_headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        for name, value in (headers or {}).items():
            if not isinstance(value, str) or "\n" in value or "\r" in value:
                raise ConfigError(f"the header '{name}' is no line of text", where=f"reward '{self.name}'")
        return dict(headers or {})

    def _token(self, variable: str | None) -> dict[str, str]:
        if variable is None:
            return {}
        token = os.environ.get(variable, "").strip()
        if not token:
            what = f"the environment variable {variable} (options.token_env) is not set"
            raise ConfigError(what, where=f"reward '{self.name}'", remedy=f"export {variable}=...")
        return {"Authorization": f"Bearer {token}"}


def _parts(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port, and path with query. Raises ConfigError for what is no such address."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"'{url}' is no address: {error}", where="rewards") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"'{url}' is no address", where="rewards", remedy="write http://host:port/path")
    if parts.username is not None:
        raise ConfigError(
            "the scorer's address has a user name in it", where="rewards", remedy="use options.token_env, or options.headers"
        )
    path = parts.path or "/"
    return parts.scheme, parts.hostname, port, f"{path}?{parts.query}" if parts.query else path


def _cut(connection: socket.socket, late: threading.Event) -> None:
    """Ends a call at its deadline, wherever it waits."""
    late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
