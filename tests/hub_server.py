"""A hub on loopback: as much of huggingface.co's HTTP as fetching a model needs, and faults on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

HOLD_S = 60.0


@dataclass(slots=True)
class Hub:
    """What it has, what it does wrong, and what it was asked for."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By repository and file."""
    refusals: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """Status and error code, for paths that begin so."""
    claims: dict[str, int] = field(default_factory=dict)
    """Sizes in listings that are not the true ones, by file."""
    spoiled: set[str] = field(default_factory=set)
    """Files that are served with a bit turned."""
    cut_after: int | None = None
    """The connection ends after so many bytes of a body."""
    hold_after: int | None = None
    """Nothing more comes after so many bytes of a body, and the connection stays."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range of each request for a repository."""
    tokens: set[str | None] = field(default_factory=set)
    """That came with any of them."""
    released: threading.Event = field(default_factory=threading.Event)

    def add(self, repository: str, files: dict[str, bytes] | Path) -> None:
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        self.files[repository] = files

    def commit(self, repository: str) -> str:
        return hashlib.sha1(repository.encode()).hexdigest()

    def ranges(self, file: str) -> list[str | None]:
        """Of the requests that the file's bytes were sent for, in their order."""
        return [range for path, range in self.asked if path.startswith("/cdn/") and path.endswith(file)]

    def listing(self, repository: str) -> bytes:
        siblings = []
        for name, data in self.files[repository].items():
            size = self.claims.get(name, len(data))
            one: dict[str, object] = {"rfilename": name, "size": size, "blobId": git_digest(data)}
            if name.endswith(".safetensors"):
                one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 135}
            siblings.append(one)
        said = {"id": repository, "modelId": repository, "sha": self.commit(repository), "siblings": siblings}
        return json.dumps(said | {"tags": [], "downloads": 0, "private": False}).encode()


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        for start, (status, code) in hub.refusals.items():
            if path.startswith(start):
                return self.answer(status, b"{}", {"X-Error-Code": code} if code else {})
        words = path.strip("/").split("/")
        match words:
            case ["api", "models", org, name, "revision", revision]:
                return self.answer_listing(f"{org}/{name}", revision)
            case [org, name, "resolve", commit, file] if file in hub.files.get(f"{org}/{name}", ()):
                assert commit == hub.commit(f"{org}/{name}")
                self.note(path)
                return self.answer(302, b"", {"Location": f"/cdn/{org}/{name}/{file}"})
            case ["cdn", org, name, file]:
                self.note(path)
                return self.answer_file(hub.files[f"{org}/{name}"][file], file)
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def note(self, path: str) -> None:
        self.hub.asked.append((path, self.headers.get("Range")))
        self.hub.tokens.add(self.headers.get("Authorization"))

    def answer_listing(self, repository: str, revision: str) -> None:
        self.note(self.path)
        if repository not in self.hub.files:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", self.hub.commit(repository)):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return self.answer(200, self.hub.listing(repository), {"Content-Type": "application/json"})

    def answer_file(self, data: bytes, name: str) -> None:
        if name in self.hub.spoiled:
            data = bytes([data[0] ^ 1]) + data[1:]
        asked = self.headers.get("Range")
        if asked is None:
            return self.answer(200, data, {})
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        where = f"bytes {start}-{end - 1}/{len(data)}"
        return self.answer(206, data[start:end], {"Content-Range": where})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if status not in (200, 206) or self.path.startswith("/api/"):
            self.wfile.write(body)
            return
        hub = self.hub
        self.wfile.write(body[: hub.cut_after if hub.hold_after is None else hub.hold_after])
        if hub.hold_after is not None and hub.hold_after < len(body):
            hub.released.wait(HOLD_S)
            self.close_connection = True
        elif hub.cut_after is not None and hub.cut_after < len(body):
            self.close_connection = True


@contextmanager
def hub_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Until the context ends. This process and its children take it for the hub; models and the library's own
    files lie in `home`."""
    hub = Hub()
    handler = type("Bound", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "OMLX_MODELS": str(home / "models"),
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()
