"""Small Hugging Face Hub on this machine, for `create_repo`, `create_branch` and `upload_folder` over HTTP.

Files above 1 kB and all safetensors files use the LFS protocol (batch, PUT, verify). Other files are part of the commit.
Requests without the right token are refused. It lacks xet, multipart uploads, pull requests and all other features.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_this_test"


class HubStore:
    """Uploaded content of the hub. `repos` maps each repository to its branches, and each branch to files with content."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.fails = 0


@contextmanager
def serve_hub() -> Iterator[tuple[str, HubStore]]:
    """Run a hub on the loopback interface during the block. Yield its URL and its store."""
    store = HubStore()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Log nothing."""

        def answer(self, value: Any, status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != oid:
                return self.answer({"error": "another content"}, 400)
            store.objects[oid] = body
            return self.answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            store.asked.append(path)
            if store.fails:
                store.fails -= 1
                return self.answer({"error": "busy"}, 503)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid user token."}, 401)
            url = f"http://{self.headers['Host']}"
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
                if name in store.repos:
                    return self.answer({"error": "You already created this model repo", "url": f"{url}/{name}"}, 409)
                store.repos[name] = {"main": {}}
                store.private[name] = asked.get("private", asked.get("visibility"))
                return self.answer({"url": f"{url}/{name}", "name": name, "id": name})
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if path.endswith("/info/lfs/objects/batch"):
                return self.answer({"transfer": "basic", "objects": [
                    {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{url}/lfs/{o['oid']}"}}}
                    for o in json.loads(body)["objects"]
                ]})  # fmt: skip
            owner, name, verb, *rest = path.removeprefix("/api/models/").split("/")
            repo = store.repos.get(f"{owner}/{name}")
            if repo is None:
                return self.answer({"error": "Repository not found"}, 404)
            if verb == "branch":
                repo.setdefault(rest[0], dict(repo["main"]))
                return self.answer({})
            if verb == "preupload":
                return self.answer({"files": [
                    {"path": f["path"], "shouldIgnore": False,
                     "uploadMode": "lfs" if f["path"].endswith(".safetensors") or f["size"] > 1000 else "regular"}
                    for f in json.loads(body)["files"]
                ]})  # fmt: skip
            assert verb == "commit"
            for line in map(json.loads, body.decode().strip().split("\n")):
                value = line["value"]
                if line["key"] == "header":
                    store.messages.append(value["summary"])
                elif line["key"] == "file":
                    repo[rest[0]][value["path"]] = base64.b64decode(value["content"])
                else:
                    repo[rest[0]][value["path"]] = store.objects[value["oid"]]
            return self.answer(
                {"commitUrl": f"{url}/{owner}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}
            )

        def do_GET(self) -> None:
            self.answer({"error": "Entry not found"}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
