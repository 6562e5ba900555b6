"""Stretches of a file on a web server, by HTTP Range requests (RFC 9110, section 14)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from flaxen.convert.formats.hub_errors import Explain, explaining, unreachable
from flaxen.convert.lazy import ByteCounter
from flaxen.core.errors import CheckpointError

ATTEMPTS = 3
"""Requests in a row that may bring not one byte."""

WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds: before the second attempt (then twice that, ...), and at most when a server asks."""

REDIRECTS = 5
BUSY = (408, 429, 500, 502, 503, 504)


class Unanswered(Exception):
    """A request to repeat, after some seconds."""

    def __init__(self, why: str, wait: float = 0.0):
        super().__init__(why)
        self.wait = wait


class RemoteFile:
    """A file behind a URL; several threads may read.

    headers go to the URL's own host only. `counter` counts the bytes asked for. `explain` makes
    the error of what goes wrong.
    """

    def __init__(self, url: str, headers: dict[str, str], counter: ByteCounter, explain: Explain):
        self.url, self.headers = url, headers
        self.counter, self.explain = counter, explain
        self.size: int | None = None
        """Bytes of the whole file; known once something was read."""
        self._location: str | None = None
        """Where redirects led: asked directly from then on."""
        self._etags: dict[Any, str] = {}
        """What each server calls this version of the file."""

    def first(self, limit: int) -> bytes:
        """The first bytes, at most `limit`."""
        found = bytearray()

        def rest() -> None:
            for chunk in self._range(len(found), limit):
                found.extend(chunk)

        self._repeat(rest, found.__len__)
        self.counter.add(len(found))
        return bytes(found)

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill a contiguous array with the bytes from `start` on."""
        left, at = out.reshape(-1).view(np.uint8).data, 0
        self.counter.add(len(left))

        def rest() -> None:
            nonlocal at
            for chunk in self._range(start + at, start + len(left)):
                left[at : at + len(chunk)] = chunk
                at += len(chunk)

        self._repeat(rest, lambda: at)
        if at != len(left):
            raise CheckpointError(f"{self.url} has {self.size} bytes, too few for its header.")

    def whole(self, limit: int) -> bytes:
        """All of a small file.

        Raises:
            CheckpointError: it has more than `limit` bytes.
        """
        found = bytearray()

        def all_of_it() -> None:
            found.clear()
            with self._answer({}) as answer:
                for chunk in answer.iter_bytes():
                    found.extend(chunk)
                    if len(found) > limit:
                        raise CheckpointError(f"{self.url} has more than {limit} bytes.")

        self._repeat(all_of_it, lambda: 0)
        self.counter.add(len(found))
        return bytes(found)

    def _repeat(self, request: Callable[[], None], progress: Callable[[], int]) -> None:
        """Make a request until it ends well; give up after some in a row that bring nothing."""
        failed, wait = 0, WAIT
        with explaining(self.explain):
            while True:
                before = progress()
                try:
                    return request()
                except (Unanswered, *unreachable()) as error:
                    if isinstance(error, OSError):
                        raise  # An answer that will not change, or no network is wanted.
                    failed = 1 if progress() > before else failed + 1
                    if failed == ATTEMPTS:
                        raise CheckpointError(
                            f"{self.url} cannot be read: {str(error) or type(error).__name__}, "
                            f"{ATTEMPTS} times in a row. Check the connection and try again."
                        ) from error
                    time.sleep(max(wait * 2 ** (failed - 1), getattr(error, "wait", 0.0)))

    def _range(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop` or the end of the file; all of them, or an error."""
        if start >= (stop if self.size is None else min(stop, self.size)):
            return
        with self._answer({"range": f"bytes={start}-{stop - 1}"}) as answer:
            stop = self._checked(answer, start, stop)
            for chunk in answer.iter_raw():
                start += len(chunk)
                if start > stop:
                    raise CheckpointError(f"{self.url} sent more bytes than it was asked for.")
                yield chunk
        if start < stop:
            raise Unanswered(f"the answer ended {stop - start} bytes early")

    def _checked(self, answer: Any, start: int, stop: int) -> int:
        """Where the range that an answer brings ends; it must be the one asked for."""
        if answer.status_code != 206:
            raise CheckpointError(
                f"{self.url}: the server ignores range requests and would send the whole file "
                f"({answer.headers.get('content-length', '?')} bytes). Load it without remote=True."
            )
        said = answer.headers.get("content-range", "")
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said.strip())
        first, last, size = map(int, found.groups()) if found else (-1, -1, -1)
        if self.size not in (None, size) or not self._same_version(answer):
            raise CheckpointError(f"{self.url} changed while it was read. Open it again.")
        if (first, last + 1) != (start, min(stop, size)):
            raise CheckpointError(
                f"{self.url}: asked for bytes {start} to {stop - 1}, the server sent {said!r}. "
                "Load it without remote=True."
            )
        self.size = size
        return last + 1

    def _same_version(self, answer: Any) -> bool:
        """Whether a server calls the file what it did before; weak names tell nothing of bytes."""
        etag = answer.headers.get("etag", "")
        if not etag or etag.startswith("W/"):
            return True
        return self._etags.setdefault(_origin(str(answer.url)), etag) == etag

    @contextmanager
    def _answer(self, headers: dict[str, str]) -> Iterator[Any]:
        """The answer to a GET, once its redirects are followed."""
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = self._location or self.url
        for _ in range(REDIRECTS):
            sent = {**self._headers_for(url), "accept-encoding": "identity", **headers}
            with get_session().stream(
                "GET",
                url,
                headers=sent,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=False,
            ) as answer:
                if answer.has_redirect_location:
                    url = urljoin(url, answer.headers["location"])
                    continue
                if answer.status_code >= 400 and _origin(url) != _origin(self.url):
                    # Such addresses are signed, and their time may be over.
                    self._location = None
                    raise Unanswered(f"{urlsplit(url).hostname} answered {answer.status_code}")
                if answer.status_code in BUSY:
                    raise Unanswered(f"the server answered {answer.status_code}", _wait(answer))
                hf_raise_for_status(answer)
                self._location = url
                yield answer
                return
        raise CheckpointError(f"{self.url} was redirected more than {REDIRECTS} times.")

    def _headers_for(self, url: str) -> dict[str, str]:
        if _origin(url) == _origin(self.url):
            return self.headers
        return {k: v for k, v in self.headers.items() if k.lower() != "authorization"}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _wait(answer: Any) -> float:
    asked = answer.headers.get("retry-after", "")
    return min(float(asked), LONGEST_WAIT) if asked.isdecimal() else 0.0
