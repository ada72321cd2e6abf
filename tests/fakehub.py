"""A hub on the loopback interface, all in memory: enough of the API to push, list and load models and Spaces."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """`url` is its HF_ENDPOINT; `repos[repo_id][path]` is the content of a file in bytes."""

    user = "tester"

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What a client process needs: huggingface_hub reads it when it is imported."""
        switches = dict(HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")
        return dict(HF_ENDPOINT=self.url, HF_TOKEN="hf_fake", **switches)

    def commit(self, repo_id: str) -> str:
        files = {path: hashlib.sha1(content).hexdigest() for path, content in sorted(self.repos[repo_id].items())}
        return hashlib.sha1(json.dumps(files).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_):
        pass

    @property
    def location(self) -> str:
        return urllib.parse.unquote(self.path.split("?")[0])

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, content, code: int = 200, **headers: str):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self):
        hub, body = self.hub, self.body()
        if self.location == "/api/repos/create":
            fields = json.loads(body)
            repo_id = f"{fields.get('organization') or hub.user}/{fields['name']}"
            existed = repo_id in hub.repos
            hub.repos.setdefault(repo_id, {})
            content = {"url": f"{hub.url}/{repo_id}", "name": repo_id, "id": repo_id, "error": "exists"}
            return self.answer(content, 409 if existed else 200)
        if self.location == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        match = re.fullmatch(r"/api/(?:models|spaces)/(.+?)/(preupload|commit)/[^/]+", self.location)
        if not match:
            return self.answer({"error": "not found"}, 404)
        repo_id, action = match.groups()
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self.answer({"files": [{"path": path, **plain} for path in paths]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                hub.repos[repo_id][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = hub.commit(repo_id)
        url = f"{hub.url}/{repo_id}/commit/{commit}"
        return self.answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def do_GET(self):
        hub, location = self.hub, self.location
        if location == "/api/whoami-v2":
            access = {"type": "access_token", "accessToken": {"role": "write"}}
            return self.answer({"type": "user", "name": hub.user, "auth": access})
        match = re.fullmatch(r"/api/(?:models|spaces)/([^/]+/[^/]+)(?:/(revision|tree)(?:/.*)?)?", location)
        if match and match[1] in hub.repos:
            files = hub.repos[match[1]]
            if match[2] == "tree":
                rows = [(path, len(data), hashlib.sha1(data).hexdigest()) for path, data in files.items()]
                return self.answer([{"type": "file", "path": p, "size": size, "oid": oid} for p, size, oid in rows])
            names = {"id": match[1], "modelId": match[1], "sha": hub.commit(match[1]), "private": False, "tags": []}
            return self.answer({**names, "siblings": [{"rfilename": path} for path in files]})
        match = re.fullmatch(r"(?:/spaces)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", location)
        if match and match[1] in hub.repos:
            commit, data = hub.commit(match[1]), hub.repos[match[1]].get(match[2])
            if data is None:
                headers = dict(X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
                return self.answer({"error": "Entry not found"}, 404, **headers)
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.answer(data, ETag=etag, X_Repo_Commit=commit, Accept_Ranges="bytes")
        return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET
