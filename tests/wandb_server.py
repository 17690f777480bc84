"""A stand-in for a W&B server, enough for starting, resuming, logging and finishing runs, and for dying on the way.

It answers what the client of wandb 0.31 asks. It proves what the client sends, not what the real server makes of it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ENTITY = {"id": "RW50", "name": "me"}
USER = {"id": "VXNlcjox", "entity": "me", "username": "me", "email": "me@example.invalid", "flags": "{}"}


class WandbServer:
    """`with WandbServer() as server`. runs: id -> {config, displayName, groupName, history: [row], exit, ...}.

    manner: "well"; "slow" as well, each answer 0.3 s late; "mute" takes connections and never answers; "503" and
    "401" answer nothing else. files: what was uploaded, by name. heard: all that was sent, headers apart.
    port: 0 is any; that of one that died, with its runs, is that one come back.
    """

    def __init__(self, manner: str = "well", port: int = 0, runs: dict[str, dict[str, Any]] | None = None) -> None:
        self.manner = manner
        self.runs: dict[str, dict[str, Any]] = {} if runs is None else runs
        self.files: dict[str, bytes] = {}
        self.heard: list[bytes] = []
        self.requests = 0
        self._sockets: list[socket.socket] = []
        self._release = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"server_": self}))
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.port = int(self._http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Stop listening and break every open connection."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
        self._release.set()
        for open_ in self._sockets:
            with contextlib.suppress(OSError):
                open_.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "Viewer":
            return {"viewer": USER | {"teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            return {
                "model": {
                    "id": "UHJv",
                    "name": variables["project"],
                    "entity": ENTITY,
                    "bucket": self._bucket(variables),
                }
            }
        if operation == "UpsertBucket":
            return {"upsertBucket": self._upsert(variables)}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation.startswith("OrganizationCore"):
            return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
        if operation == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/upload/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        run = self.runs.get(variables["name"])
        if run is None:
            return None
        tail = json.dumps([json.dumps(row) for row in run["history"][-1:]])
        counts = {"logLineCount": 0, "historyLineCount": len(run["history"]), "eventsLineCount": 0}
        return counts | {
            "id": run["id"], "name": variables["name"], "displayName": run.get("displayName"), "tags": [],
            "summaryMetrics": "{}", "historyTail": tail, "eventsTail": "[]", "config": run.get("config", "{}"),
            "wandbConfig": json.dumps({"t": 1}), "project": None,
        }  # fmt: skip

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        new = name not in self.runs
        run = self.runs.setdefault(name, {"id": f"UnVuOjE6{name}", "history": [], "project": variables.get("project")})
        run |= {key: variables[key] for key in ("config", "displayName", "groupName") if variables.get(key) is not None}
        project = {"id": "UHJv", "name": run["project"], "entity": ENTITY}
        bucket = {
            "id": run["id"], "name": name, "displayName": run.get("displayName") or name, "description": "",
            "config": run.get("config"), "sweepName": None, "project": project, "historyLineCount": len(run["history"]),
        }  # fmt: skip
        return {"bucket": bucket, "inserted": new}

    def stream(self, name: str, message: dict[str, Any]) -> None:
        run = self.runs.setdefault(name, {"id": name, "history": []})
        part = (message.get("files") or {}).get("wandb-history.jsonl", {})
        if part.get("content"):  # what is sent again takes its former place
            run["history"][part["offset"] :] = [json.loads(line) for line in part["content"]]
        if "complete" in message:
            run["exit"] = message.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_: WandbServer

    def setup(self) -> None:
        super().setup()
        self.server_._sockets.append(self.connection)

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the connection was broken on purpose
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
        data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
        self.server_.heard.append(data)
        return data

    def _reply(self, value: Any) -> None:
        if self.server_.manner == "mute":
            self.server_._release.wait()
            raise BrokenPipeError
        if self.server_.manner == "slow":
            self.server_._release.wait(0.3)
        data = json.dumps(value).encode()
        self.send_response(200 if self.server_.manner in ("well", "slow") else int(self.server_.manner))
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.server_.requests += 1
        self._reply({})

    def do_PUT(self) -> None:
        self.server_.files[self.path.removeprefix("/upload/")] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        self.server_.requests += 1
        body = self._body()
        if self.server_.manner not in ("well", "slow"):
            return self._reply({})
        if self.path == "/graphql":
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            name = operation.group(1) if operation else ""
            return self._reply({"data": self.server_.graphql(name, asked.get("variables") or {})})
        if "file_stream" in self.path:
            self.server_.stream(self.path.split("/")[-2], json.loads(body))
            return self._reply({"exitcode": None, "limits": {}})
        return self._reply({})


def read_offline(folder: Path) -> dict[str, Any]:
    """What a run's .wandb file holds: history (rows), exit (status or None), run, config, axes (metric -> its axis).

    The file is a header of seven bytes, then records in blocks of 32 KiB as in LevelDB's log: checksum, length, type
    (1 whole, 2 first, 3 middle, 4 last), payload.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"history": [], "exit": None, "run": None, "axes": {}}
    (path,) = folder.glob("*.wandb")
    data, at, payload = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        piece = data[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + piece) == checksum
        payload += piece
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(payload)
            payload = b""
            _note(found, record)
    return found


def _note(found: dict[str, Any], record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = record.history.item
        found["history"].append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    elif kind == "exit":
        found["exit"] = record.exit.exit_code
    elif kind == "run":
        config = {i.key: json.loads(i.value_json) for i in record.run.config.update if i.key}
        found["run"] = {"id": record.run.run_id, "name": record.run.display_name, "project": record.run.project,
                        "group": record.run.run_group}  # fmt: skip
        found["config"] = config
    elif kind == "metric":
        found["axes"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
