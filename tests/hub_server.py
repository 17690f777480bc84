"""A stand-in for the Hugging Face hub: models and data sets of a few files, enough for the client to fetch them.

It answers what huggingface_hub 2.4 and datasets 5.2 ask. It proves what they ask for, not what the real hub makes of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee00" * 5


class HubServer:
    """`with HubServer({"models/me/tiny": {"config.json": b"{}"}}) as server`. asked: method and path of each request."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if path == "/":
            return self._send(b"")
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+(?:/.*)?)?", path):
            files = self.hub.repositories.get(f"{found[1]}/{found[2]}")
            if files is None:
                return self._gone("RepoNotFound")
            return self._send(json.dumps(_listed(files) if found[3] == "tree" else _about(found[2], files)).encode())
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            files = self.hub.repositories.get(f"{'datasets' if found[1] else 'models'}/{found[2]}")
            if files is None:
                return self._gone("RepoNotFound")
            return self._send(files[found[4]]) if found[4] in files else self._gone("EntryNotFound")
        return self._gone("EntryNotFound")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{_digest(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _gone(self, code: str) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def _about(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = [{"rfilename": file} for file in files]
    return {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "downloads": 0, "likes": 0, "tags": []}


def _listed(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"type": "file", "path": name, "size": len(body), "oid": _digest(body)} for name, body in files.items()]
