"""A small hub on loopback: the requests that `huggingface_hub` makes, a log of them, and faults."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import socket
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?"
)


@dataclasses.dataclass(frozen=True)
class Request:
    """One answered request; `sent` counts the bytes of the body."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int
    sent: int
    cdn: bool


@dataclasses.dataclass
class Repository:
    """Folders by revision; the commit of each is made from its name."""

    revisions: dict[str, Path]
    private: bool = False
    gated: bool = False

    def folder(self, revision: str) -> tuple[str, Path] | None:
        for name, folder in self.revisions.items():
            if revision in (name, commit(name)):
                return commit(name), folder
        return None


def commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def etag(path: Path) -> str:
    return _hash(path, path.stat().st_mtime_ns, path.stat().st_size)


@functools.cache
def _hash(path: Path, *state: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Hub:
    """Repositories by name, and how the server misbehaves.

    drop: how often an answer with this file ends in the middle; short: how often it has half of
    what its headers speak of; busy: how often it is 503;
    ignore_range: send whole files; shift_range: send other bytes than asked for; cdn: redirect
    files to a second server; expire: how often that server says 403; listed: what it answers when
    asked for a repository's files.
    """

    TOKEN = "hf_letmein"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.log: list[Request] = []
        self.drop: Counter[str] = Counter()
        self.short: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.ignore_range = self.shift_range = self.cdn = False
        self.expire = 0
        self.listed: bytes | None = None
        self.lock = threading.Lock()

    def add(self, name: str, folder: Path, **more: object) -> Repository:
        self.repositories[name] = Repository({"main": folder}, **more)
        return self.repositories[name]

    def files(self) -> list[str]:
        """The files whose content was sent, in order, without their repository."""
        sent = [r for r in self.log if r.method == "GET" and r.status in (200, 206)]
        return [m["file"] for r in sent if (m := RESOLVE.fullmatch(r.path))]

    def bytes_of(self, ending: str = "") -> int:
        """Bytes sent of files with such an ending."""
        return sum(
            r.sent for r in self.log if RESOLVE.fullmatch(r.path) and r.path.endswith(ending)
        )

    def take(self, faults: Counter[str], file: str) -> bool:
        """Whether a fault is still due."""
        with self.lock:
            due = faults[file] > 0
            faults[file] -= due
            return due


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    disable_nagle_algorithm = True
    hub: Hub
    cdn_port = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api, file = API.fullmatch(path), RESOLVE.fullmatch(path)
        on_cdn = self.server.server_port == self.cdn_port
        if self.hub.take(self.hub.busy, path):
            return self.refuse(503, "Busy")
        found = api or file
        repo = self.hub.repositories.get(found["repo"]) if found else None
        known = self.headers.get("authorization") == f"Bearer {Hub.TOKEN}" or on_cdn
        if repo is None or (repo.private and not known):
            return self.refuse(401, "RepoNotFound")
        at = repo.folder(found["revision"] or "main")
        if at is None:
            return self.refuse(404, "RevisionNotFound")
        if api:
            return self.describe(api, *at)
        if repo.gated and not known:
            return self.refuse(401, "GatedRepo")
        return self.send_file(file, *at, on_cdn)

    def describe(self, api: re.Match[str], sha: str, folder: Path) -> None:
        files = [
            (path.relative_to(folder).as_posix(), path.stat().st_size)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        if api["what"] == "tree":
            answer = [
                {"type": "file", "path": name, "size": size, "oid": sha} for name, size in files
            ]
        else:
            siblings = [
                {"rfilename": name, "size": size, "blobId": etag(folder / name)}
                for name, size in files
            ]
            answer = {"id": api["repo"], "sha": sha, "siblings": siblings}
        told = json.dumps(answer).encode()
        if self.hub.listed is not None and api["what"] != "tree":
            told = self.hub.listed
        self.answer(200, told, {"Content-Type": "application/json"})

    def send_file(self, asked: re.Match[str], sha: str, folder: Path, on_cdn: bool) -> None:
        path, name = folder / asked["file"], asked["file"]
        if not path.is_file():
            return self.refuse(404, "EntryNotFound", {"X-Repo-Commit": sha})
        if self.hub.take(self.hub.busy, name):
            return self.refuse(503, "Busy")
        if on_cdn and self.hub.expire > 0:
            self.hub.expire -= 1
            return self.refuse(403, "Expired")
        size = path.stat().st_size
        headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": sha}
        if self.hub.cdn and not on_cdn:
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(size)}
            where = f"http://127.0.0.1:{self.cdn_port}{self.path}"
            return self.answer(302, b"", {**headers, "Location": where})
        cut = self.command == "GET" and self.hub.take(self.hub.drop, name)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if wanted is None or self.hub.ignore_range:
            return self.answer(200, path.read_bytes(), headers, cut=cut)
        start, stop = int(wanted[1]), min(int(wanted[2] or size) + 1, size)
        start += self.hub.shift_range
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        with path.open("rb") as file:
            file.seek(start)
            sent = (stop - start) // (2 if self.hub.take(self.hub.short, name) else 1)
            return self.answer(206, file.read(sent), headers, cut=cut)

    def refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.answer(status, b"", {"X-Error-Code": code, **(headers or {})})

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False
    ) -> None:
        sent = b"" if self.command == "HEAD" else body[: len(body) // 2] if cut else body
        with self.hub.lock:
            self.hub.log.append(
                Request(
                    self.command,
                    urlsplit(self.path).path,
                    self.headers.get("range"),
                    self.headers.get("authorization"),
                    status,
                    len(sent),
                    self.server.server_port == self.cdn_port,
                )
            )
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


@contextmanager
def served(handler: type[Handler]):
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running hub that flaxen and `huggingface_hub` take for the real one; its cache is empty."""
    from huggingface_hub import close_session, constants

    found = Hub()
    handler = type("HubHandler", (Handler,), {"hub": found})
    with served(handler) as server, served(handler) as cdn:
        handler.cdn_port = cdn.server_port
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found
        close_session()


def without_network(monkeypatch) -> None:
    """From now on nothing answers where the hub was."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
