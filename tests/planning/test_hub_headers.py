"""A model on the hub: only headers are asked for, and what cannot be had is one line. A local server stands in."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rotaryquant.planning.checkpoint import read_checkpoint
from rotaryquant.planning.weights import read_weights

HUB_ID, COMMIT = "org/tiny-moe", "0" * 40
PLAN = "import sys; from rotaryquant.cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Hub:
    """What a test sees of the server. sent: bytes of weight files that went out, as (name, first, last)."""

    url: str
    folder: Path
    ranges: bool = True
    sent: list[tuple[str, int, int]] = field(default_factory=list)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = hub.folder / self.path.split("?")[0].rpartition("/")[2]
            if "/resolve/" not in self.path or not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data, asked = path.read_bytes(), self.headers.get("Range")
            first, last = 0, len(data) - 1
            if asked and hub.ranges:
                first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("ETag", f'"{path.name}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            if body:
                if path.suffix == ".safetensors":
                    hub.sent.append((path.name, first, last))
                self.wfile.write(data[first : last + 1])

    return Handler


@pytest.fixture
def hub(moe_folder: Path) -> Iterator[Hub]:
    found = Hub("", moe_folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def plan(home: Path, endpoint: str, *, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    words = ["plan", HUB_ID, "--memory", "2GB", "--context", "256", "--json"]
    code = (
        f"import os; os.environ.update(HF_HOME={str(home)!r}, HF_ENDPOINT={endpoint!r}, "
        f"HF_HUB_OFFLINE={'1' if offline else '0'!r}, HF_HUB_DISABLE_XET='1', NO_PROXY='*', no_proxy='*'); {PLAN}"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=120
    )


def header_end(path: Path) -> int:
    """Bytes of a safetensors file before its weights."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_only_headers_are_asked_for(hub: Hub, tmp_path: Path) -> None:
    done = plan(tmp_path, hub.url)
    assert (done.returncode, done.stderr) == (0, "")
    said, local = json.loads(done.stdout), read_weights(read_checkpoint(hub.folder, "x"), "as-is")
    assert (said["model"], said["weights"]["total"]) == (HUB_ID, local.total)
    assert hub.sent
    for name, _, last in hub.sent:
        assert last < header_end(hub.folder / name)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_shards_are_read_one_by_one(hub: Hub, tmp_path: Path) -> None:
    from support.zoo import build

    hub.folder = tmp_path / "sharded"
    build("qwen3_moe").save_pretrained(hub.folder, max_shard_size="200KB")
    shards = sorted(path.name for path in hub.folder.glob("*.safetensors"))
    assert len(shards) > 1
    done = plan(tmp_path / "home", hub.url)
    assert (done.returncode, done.stderr) == (0, "")
    total = read_weights(read_checkpoint(hub.folder, "x"), "as-is").total
    assert json.loads(done.stdout)["weights"]["total"] == total
    assert sorted({name for name, _, _ in hub.sent}) == shards
    assert all(last < header_end(hub.folder / name) for name, _, last in hub.sent)


def test_a_server_without_ranges_is_refused_before_it_sends_all(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    done = plan(tmp_path, hub.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "whole files only" in done.stderr
    assert "give its folder" in done.stderr


@pytest.mark.parametrize("offline", [True, False])
def test_out_of_reach_is_one_line(tmp_path: Path, offline: bool) -> None:
    done = plan(tmp_path, "http://127.0.0.1:9", offline=offline)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert HUB_ID in done.stderr
    assert "go online" in done.stderr


def test_what_no_hub_id_can_be_is_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PLAN, "plan", "no such/model/at all", "--memory", "2GB"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "not an org/name on the hub" in done.stderr
