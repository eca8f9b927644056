"""Law: what a control call says to a server is what its caller said: route, body, key, and how long it waits."""

from __future__ import annotations

import contextlib
import json
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime.core.engine_interface import RankChecksums
from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.topology import ONE_RANK, EngineLayout, EngineRank
from slime.serving.control import HttpEngineControl, digests_of_weights

KEY = "the key of the run"
FORMAT = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": "7"}
BUCKET: dict[str, Any] = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": 7}
MEETING: dict[str, Any] = {
    **{"master_address": "10.0.0.1", "master_port": 5, "rank_offset": 3},
    **{"world_size": 9, "group_name": "g", "backend": "gloo"},
}
SHAPES: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 3]], "group_name": "g"}
Call = Callable[[HttpEngineControl], Any]
CALLS: dict[str, tuple[Call, Any]] = {
    "pause_generation": (lambda c: c.pause("retract"), {"mode": "retract"}),
    "continue_generation": (lambda c: c.resume(), {}),
    "flush_cache": (lambda c: c.flush_cache(), None),
    "update_weights_from_tensor": (
        lambda c: c.update_weights_from_tensor(["p"], **BUCKET),
        {"serialized_named_tensors": ["p"], **FORMAT},
    ),
    "update_weights_from_distributed": (
        lambda c: c.update_weights_from_distributed(**SHAPES, **BUCKET),
        {**SHAPES, **FORMAT},
    ),
    "update_weights_from_disk": (
        lambda c: c.update_weights_from_disk(model_path="/m", flush_cache=False, weight_version=7),
        {"model_path": "/m", "flush_cache": False, "weight_version": "7"},
    ),
    "init_weights_update_group": (lambda c: c.init_weights_update_group(**MEETING), MEETING),
    "destroy_weights_update_group": (lambda c: c.destroy_weights_update_group(group_name="g"), {"group_name": "g"}),
    "release_memory_occupation": (lambda c: c.release_memory(["weights"]), {"tags": ["weights"]}),
    "resume_memory_occupation": (lambda c: c.resume_memory(["kv_cache"]), {"tags": ["kv_cache"]}),
}


class Heard:
    """A server that notes what it is asked, and answers with `says` once `may_answer` is set."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, Any]] = []
        self.says: Any = {"success": True}
        self.version, self.unknown = "0.5.23", 404
        """Its SGLang version, and the status of a route that it does not have."""
        self.refuses: dict[str, str] = {}
        """Route -> the message of the next refusal."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        heard = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                told = json.loads(body) if body else None
                heard.requests.append((self.path.strip("/"), self.headers.get("Authorization"), told))
                heard.may_answer.wait()
                if heard.version == "0.5.16" and "weight_update" in self.path:
                    heard.requests.pop()
                    self.send_error(heard.unknown)
                    return
                message = heard.refuses.pop(self.path.strip("/"), None)
                self.say(heard.says if message is None else {"success": False, "message": message})

            def say(self, what: Any) -> None:
                answer = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # who asked waits no longer
                    self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield
        finally:
            self.may_answer.set()
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def heard() -> Iterator[Heard]:
    server = Heard()
    with server.serving():
        yield server


@pytest.fixture
def control(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpEngineControl]:
    """Of a host whose users go through a proxy, which is not there."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    heard.requests.clear()
    heard.says, heard.version, heard.refuses = {"success": True}, "0.5.23", {}
    made = HttpEngineControl(heard.url, ONE_RANK, timeout_s=60.0, api_key=KEY)
    yield made
    made.close()


@pytest.mark.parametrize("route", CALLS)
def test_each_call_is_its_route_with_its_words_and_the_key(
    control: HttpEngineControl, heard: Heard, route: str
) -> None:
    call, body = CALLS[route]
    call(control)
    assert heard.requests == [(route, f"Bearer {KEY}", body)]


@pytest.mark.parametrize(
    ("version", "refused", "routes"),
    [
        ("0.5.16", {}, []),
        ("0.5.23", {}, ["begin_weight_update", "end_weight_update"]),
        ("0.5.24.dev3", {}, ["begin_weight_update", "end_weight_update"]),
        (
            "0.5.23",
            {"begin_weight_update": "a weight-update session is already open"},
            ["begin_weight_update", "end_weight_update", "begin_weight_update", "end_weight_update"],
        ),
    ],
)
def test_a_session_begins_and_ends_as_the_version_of_the_server_wants(
    control: HttpEngineControl, heard: Heard, version: str, refused: dict[str, str], routes: list[str]
) -> None:
    """Law: where weights travel in sessions, a session that a dead sender left open does not stop the next one."""
    for heard.unknown in (404, 401):  # with keys, SGLang responds 401 to an admin key at an unknown route
        heard.version, heard.refuses = version, dict(refused)
        heard.requests.clear()
        control.begin_update()
        control.end_update()
        assert [route for route, _, _ in heard.requests] == routes


def test_another_refusal_of_a_session_is_an_error(control: HttpEngineControl, heard: Heard) -> None:
    heard.refuses = {"begin_weight_update": "out of memory"}
    with pytest.raises(EngineError, match="out of memory"):
        control.begin_update()


PLACE = {"pp_rank": 1, "tp_rank": 0, "tp_size": 2, "pp_size": 2, "dp_size": 1}


@pytest.mark.parametrize(
    ("version", "info"),
    [("0.5.16", PLACE), ("0.5.23", [{"role": "target", **PLACE}, {"role": "draft_step_0", **PLACE}])],
)
def test_digests_are_those_of_the_rank_that_reports_them(
    control: HttpEngineControl, heard: Heard, version: str, info: Any
) -> None:
    heard.version = version
    heard.says = {"success": True, "ranks": [{"checksums": {"a": "1"}, "parallelism_info": info}]}
    (report,) = control.weight_checksums()
    assert report == RankChecksums(EngineRank(1, 0), EngineLayout(tp_size=2, pp_size=2), {"a": "1"})


def test_what_an_engine_computes_is_no_weight() -> None:
    """Law: neither a weight sync nor the inspection of an external engine compares tables of rotary embeddings."""
    names = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.axis_map")
    assert digests_of_weights({"checksums": dict.fromkeys(names, "1")}) == {"lm_head.weight": "1"}


def test_a_refusal_that_comes_as_a_success_is_an_error(control: HttpEngineControl, heard: Heard) -> None:
    heard.says = {"success": False, "message": "no such group"}
    with pytest.raises(EngineError, match="no such group"):
        control.update_weights_from_disk(model_path="/m", flush_cache=False, weight_version=7)


def test_a_server_without_a_key_is_sent_none_and_waits_are_in_seconds(heard: Heard) -> None:
    heard.requests.clear()
    control = HttpEngineControl(heard.url, ONE_RANK, timeout_s=0.2)
    assert control._connections._take().timeout == 0.2
    heard.may_answer.clear()
    with pytest.raises(DeadlineExceeded, match="/continue_generation"):
        control.resume()
    heard.may_answer.set()
    assert heard.requests == [("continue_generation", None, {})]
    control.close()


class Kept(BaseHTTPRequestHandler):
    """A server that keeps connections, and ends one after the call `flush_cache`."""

    protocol_version = "HTTP/1.1"
    num_connections = 0

    def setup(self) -> None:
        Kept.num_connections += 1
        super().setup()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = self.path == "/flush_cache"

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_calls_share_a_connection_and_replace_one_that_the_server_has_ended() -> None:
    """Law: a server may end an idle connection at any time, and no call fails because of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kept)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    control = HttpEngineControl(f"http://127.0.0.1:{server.server_address[1]}", ONE_RANK, timeout_s=60.0)
    for _ in range(3):
        control.pause()
    assert Kept.num_connections == 1
    control.flush_cache()  # ends it without saying so
    ((idle, _),) = control._connections._idle
    select.select([idle.sock], [], [], 60.0)
    control.resume()
    assert Kept.num_connections == 2
    server.shutdown()
    server.server_close()
    control.close()
    with pytest.raises(EngineError, match="did not respond to /pause_generation"):
        control.pause()
