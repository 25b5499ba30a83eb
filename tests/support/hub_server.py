"""A small HTTP server that speaks the Hugging Face Hub's protocol, for its client, and fails in chosen ways."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/((?:refs/\w+/)?[^/]+))?/?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Repositories, and what the server does wrong.

    `repos`: (kind, name) -> commit -> {path: content}; the last commit is main. `tags`: names of commits.
    `refused`: (kind, name) -> (HTTP status, the hub's error code). `broken`: path -> bytes after which its next
    transfers are cut off, one each. `wrong_sizes`: path -> bytes that are sent of it, with a header of as many.
    """

    def __init__(self):
        self.repos, self.tags, self.refused, self.broken, self.wrong_sizes = {}, {}, {}, {}, {}
        self.requests = []  # (method, path, Range header, Authorization header)
        self.private = {}

    def publish(self, kind, name, files):
        """Add a commit to a repository and return its hash."""
        commits = self.repos.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def transfers(self, path):
        """Return the Range headers of the requests for a file's content."""
        return [range_ for method, url, range_, _ in self.requests if method == "GET" and url.endswith(f"/{path}")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def commit_of(self, kind, name, revision):
        hub = self.server.hub
        if (kind, name) in hub.refused:
            status, code = hub.refused[kind, name]
            return self.answer(status, b"", X_Error_Code=code, X_Error_Message=code)
        commits = hub.repos.get((kind, name))
        if commits is None:
            return self.answer(404, b"", X_Error_Code="RepoNotFound")
        commit = list(commits)[-1] if revision == "main" else hub.tags.get(revision, revision)
        if commit not in commits:
            return self.answer(404, b"", X_Error_Code="RevisionNotFound")
        return commit

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, url = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, url, self.headers.get("Range"), self.headers.get("Authorization")))
        if match := _API.fullmatch(url):
            kind, name, action, revision = match.groups()
            if (commit := self.commit_of(kind, name, revision or "main")) is None:
                return
            files = hub.repos[kind, name][commit]
            if action == "tree":
                entries = [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
                return self.answer(200, entries)
            about = {"_id": "1", "id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
            return self.answer(200, about | {"private": hub.private.get(name, False), "tags": [], "downloads": 0})
        if match := _FILE.fullmatch(url):
            kind, name, revision, path = match.groups()
            kind = "datasets" if kind else "models"
            if (commit := self.commit_of(kind, name, revision)) is None:
                return
            content = hub.repos[kind, name][commit].get(path)
            if content is None:
                return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return self.send_file(path, content, commit)
        self.answer(404)

    def send_file(self, path, content, commit):
        hub = self.server.hub
        headers = {"X_Repo_Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept_Ranges": "bytes"}
        if self.command == "HEAD":
            return self.answer(200, content, **headers)
        if path in hub.wrong_sizes:
            return self.answer(200, content[: hub.wrong_sizes[path]], **headers)
        status, start = 200, 0
        if range_ := self.headers.get("Range"):
            status, start = 206, int(range_.removeprefix("bytes=").partition("-")[0])
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if hub.broken.get(path):
            self.send_response(status)
            for name, value in ({"Content-Length": len(content) - start} | headers).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(content[start : start + hub.broken[path].pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return self.connection.shutdown(2)
        self.answer(status, content[start:], **headers)

    def do_POST(self):
        hub, url = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(("POST", url, None, self.headers.get("Authorization")))
        body = self.read_body()
        if not self.headers.get("Authorization"):
            return self.answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials")
        if url == "/api/repos/create":
            wish = json.loads(body)
            name = f"{wish['organization']}/{wish['name']}" if wish.get("organization") else f"me/{wish['name']}"
            if ("models", name) in hub.repos:
                return self.answer(409, {"url": f"http://{self.headers['Host']}/{name}", "error": "exists"})
            hub.private[name] = wish.get("private", False) or wish.get("visibility") == "private"
            hub.publish("models", name, {})
            return self.answer(200, {"url": f"http://{self.headers['Host']}/{name}", "id": name, "name": name})
        if match := _API.fullmatch(url):
            kind, name, action, _ = match.groups()
            if (kind, name) in hub.refused:
                return self.answer(hub.refused[kind, name][0], {"error": "refused"})
            if action == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.answer(200, {"files": files})
            if action == "commit":
                lines = [json.loads(line) for line in body.splitlines()]
                entries = [line["value"] for line in lines if line["key"] == "file"]
                files = {entry["path"]: base64.b64decode(entry["content"]) for entry in entries}
                commit = hub.publish(kind, name, files)
                about = {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{commit}", "commitOid": commit}
                return self.answer(200, about | {"pullRequestUrl": None})
        if url == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        self.answer(404)

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


@contextmanager
def hub_server():
    """Yield a Hub and the address of its server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
