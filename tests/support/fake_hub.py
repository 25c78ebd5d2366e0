"""A server on this machine that answers in place of the Hugging Face Hub, and its cache."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree
from typing import Any, ClassVar

import pytest
from huggingface_hub import close_session, constants

COMMIT = "5" * 40


def put_into_cache(
    cache: Path, name: str, model: Path, revision: str = "main", commit: str = COMMIT
) -> None:
    """Copy a model's folder into a cache of the Hub, as if a revision had been downloaded."""
    folder = cache / f"models--{name.replace('/', '--')}"
    copytree(model, folder / "snapshots" / commit)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests of `huggingface_hub` without logging them."""

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Send a status, headers (underscores become hyphens) and the length of a content."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class FolderHub(HubHandler):
    """Serves a folder's files as the Hub serves those of `owner/model`.

    Attributes:
        folder: the folder.
        asked: the paths of the model's files that a client asked for; it asks for others too.
    """

    folder: ClassVar[Path]
    asked: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self.send_file()

    def do_GET(self) -> None:
        if self.path.startswith("/owner/model/"):
            self.asked.append(self.path)
        self.wfile.write(self.send_file())

    def send_file(self) -> bytes:
        file = self.folder / Path(self.path).name
        content = file.read_bytes() if file.is_file() else b""
        headers = {"X_Repo_Commit": "c" * 40, "ETag": f'"{file.name}"'}
        if not content:
            headers["X_Error_Code"] = "EntryNotFound"
        self.answer(200 if content else 404, content, **headers)
        return content


@contextmanager
def serving(handler: type[HubHandler]) -> Iterator[str]:
    """Serve on a free port, and yield the server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextmanager
def online(hub: str, home: Path) -> Iterator[None]:
    """Use a hub in place of the Hugging Face Hub, with another cache and without a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if "proxy" in name.lower()]:
            patch.delenv(name)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "ENDPOINT", hub)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.split("/{repo_id}")[1]
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub}/{{repo_id}}{template}")
        patch.setattr(constants, "HF_HUB_CACHE", str(home))
        close_session()
        yield
    close_session()
