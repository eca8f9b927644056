"""`EngineControl` for one engine, through the HTTP routes of an SGLang server or through a shared folder.

It adapts to the server's version: a server's responses show whether it supports weight-update sessions.

All methods are thread-safe. A call blocks its thread until the response arrives or the timeout expires. Only
`flush_cache` retries, because it waits for the engine to drain.
"""

from __future__ import annotations

import functools
import http.client
import select
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import orjson

from slime.core.engine_interface import SENDER_HEADER, STREAM, RankChecksums, WeightVersion
from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.processes import this_sender
from slime.core.topology import EngineLayout, EngineRank
from slime.weights.delta.mailbox import call, mailbox

DRAIN_POLL_S = 0.05
"""Interval between attempts to flush while requests are still finishing."""
ERROR_CHARACTERS = 2000
"""Maximum number of characters of a response quoted in an error message."""


OPEN_SESSION = "already open"
"""Part of SGLang's error message when a weight-update session is already open."""
NO_ROUTE = (401, 403, 404, 405)
"""Status codes for an unknown route. If keys are set, SGLang 0.5.16 returns 401, even with the admin key."""


KEEP_S = 2.0
"""How long a connection is kept without a request. SGLang closes it after 5 s, and a request sent at that moment would
fail as if the engine had died."""


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Returns the certificates that HTTPS accepts. Read once, because reading them takes tens of milliseconds."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    kind: str = "application/json"
    """Media type."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        return orjson.loads(self.body)


class Connections:
    """HTTP/1.1 connections to one server. Thread-safe: each request has a connection of its own while it runs.

    A weight sync makes many calls to every engine, while none of them generates. A request takes a quarter of the
    processor time that one of httpx takes.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s`: timeout of connecting and of each wait for data. Proxies are ignored."""
        parts = urlsplit(url)
        assert parts.hostname is not None, url
        self._host, self._port, self._is_tls = parts.hostname, parts.port, parts.scheme == "https"
        self._prefix, self._timeout_s = parts.path, timeout_s
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        """Connections without a request, and since when."""

    def request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        """Raises `OSError` or `http.client.HTTPException`."""
        connection = self._take()
        try:
            connection.request(method, self._prefix + path, body=body, headers=dict(headers))
            found = connection.getresponse()
            response = Response(found.status, found.read(), found.headers.get_content_type())
        except BaseException:
            connection.close()
            raise
        if not found.will_close:
            self._idle.append((connection, time.monotonic()))
        return response

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()

    def _take(self) -> http.client.HTTPConnection:
        while self._idle:
            connection, since_s = self._idle.pop()
            if time.monotonic() - since_s < KEEP_S and not _has_ended(connection):
                return connection
            connection.close()
        if self._is_tls:
            where: Any = {"port": self._port, "timeout": self._timeout_s}
            return http.client.HTTPSConnection(self._host, **where, context=_certificates())
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _has_ended(connection: http.client.HTTPConnection) -> bool:
    """Returns whether the server has closed an idle connection, which makes it readable."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


class HttpEngineControl:
    """Controls the server at `url`. `core.engine_interface.EngineControl` documents the methods."""

    def __init__(
        self, url: str, layout: EngineLayout, timeout_s: float, api_key: str | None = None, sender: str = ""
    ) -> None:
        """`timeout_s`: timeout of each call; `api_key`: the key of the control routes; `sender`: the owner of weight
        updates, by default this run, or this process outside a run.
        """
        self._url, self._layout, self._timeout_s = url.rstrip("/"), layout, timeout_s
        headers = {SENDER_HEADER: sender or this_sender()}
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers, self._has_sessions = headers, True
        self._connections = Connections(self._url, timeout_s)

    @property
    def url(self) -> str:
        return self._url

    @property
    def layout(self) -> EngineLayout:
        return self._layout

    def speak_for(self, sender: str) -> None:
        self._headers[SENDER_HEADER] = sender

    def close(self) -> None:
        self._connections.close()

    def pause(self, mode: str = "abort") -> None:
        self._post("pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._post("continue_generation", {})

    def flush_cache(self) -> None:
        """Waits until no request is running (not even one from a disconnected client) and the cache is empty."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            response = self._send("POST", "flush_cache", None)
            if response.is_success:
                return
            if response.status in (401, 403):  # retrying would not help
                raise _refusal(self._url, "flush_cache", response)
            if time.monotonic() > deadline:
                raise DeadlineExceeded.waiting(
                    owner="weight sync",
                    for_what=f"engine {self._url} to drain and flush its cache",
                    limit_s=self._timeout_s,
                    last_progress=response.text[:ERROR_CHARACTERS],
                )
            time.sleep(DRAIN_POLL_S)

    def begin_update(self) -> None:
        """Opens a session. If one is already open, its sender died or failed, so closes it and opens a new one.

        SGLang 0.5.16 has no sessions and accepts weights at any time.
        """
        response = self._send("POST", "begin_weight_update", {})
        self._has_sessions = response.status not in NO_ROUTE
        if not self._has_sessions:
            return
        if OPEN_SESSION in response.text:
            self._post("end_weight_update", {})
            self._post("begin_weight_update", {})
        else:
            self._require_success("begin_weight_update", response)

    def end_update(self) -> None:
        if self._has_sessions:
            self._post("end_weight_update", {})

    def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: WeightVersion
    ) -> None:
        num_ranks = self._layout.num_ranks
        assert len(payloads) == num_ranks, f"{len(payloads)} payloads for {num_ranks} ranks"
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format}
        self._post("update_weights_from_tensor", {**body, **_update(flush_cache, weight_version)})

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> bool:
        body = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        group = {"world_size": world_size, "group_name": group_name, "backend": backend}
        return STREAM in self._post("init_weights_update_group", {**body, **group}).text

    def destroy_weights_update_group(self, *, group_name: str) -> None:
        self._post("destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None,
        flush_cache: bool,
        weight_version: WeightVersion,
    ) -> None:
        body = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(s) for s in shapes]}
        update = _update(flush_cache, weight_version)
        self._post(
            "update_weights_from_distributed", {**body, "group_name": group_name, "load_format": load_format, **update}
        )

    def update_weights_from_disk(self, *, model_path: str, flush_cache: bool, weight_version: WeightVersion) -> None:
        self._post("update_weights_from_disk", {"model_path": model_path, **_update(flush_cache, weight_version)})

    def weight_checksums(self) -> list[RankChecksums]:
        body = self._post("weights_checker", {"action": "checksum"}).json()
        ranks = body.get("ranks")
        if not ranks:
            raise EngineError(f"the checksum report of {self._url} has no ranks: {str(body)[:ERROR_CHARACTERS]}")
        return [_checksums(rank) for rank in ranks]

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        self._post("release_memory_occupation", {} if tags is None else {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._post("resume_memory_occupation", {} if tags is None else {"tags": list(tags)})

    def start_profile(self, directory: str, name: str, *, num_passes: int, shapes: bool, stack: bool) -> None:
        """Profiles the next `num_passes` forward passes on every rank.

        Each rank then writes DIRECTORY/NAME-TP-RANK.trace.json.gz on the server's host.
        """
        body = {"output_dir": directory, "profile_id": name, "num_steps": num_passes}
        self._post("start_profile", {**body, "record_shapes": shapes, "with_stack": stack})

    def _post(self, route: str, body: Mapping[str, Any]) -> Response:
        """Raises `EngineError` on failure, which SGLang sometimes reports as status 200 with `"success": false`."""
        response = self._send("POST", route, body)
        self._require_success(route, response)
        return response

    def _require_success(self, route: str, response: Response) -> None:
        refused = not response.is_success
        if not refused and response.kind == "application/json":
            answer = response.json()
            refused = isinstance(answer, dict) and answer.get("success") is False
        if refused:
            raise _refusal(self._url, route, response)

    def _send(self, method: str, route: str, body: Mapping[str, Any] | None) -> Response:
        data = None if body is None else orjson.dumps(body)
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        try:
            return self._connections.request(method, f"/{route}", data, headers)
        except TimeoutError as error:
            raise DeadlineExceeded.waiting(
                owner="weight sync", for_what=f"engine {self._url} to respond to /{route}", limit_s=self._timeout_s
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"engine {self._url} did not respond to /{route}: {type(error).__name__}: {error}; check its log "
                "in case it has died"
            ) from error


def _checksums(report: Mapping[str, Any]) -> RankChecksums:
    """Parses one rank's report from `/weights_checker`.

    With DP attention, every DP group reports all ranks of its stage.
    """
    info = report["parallelism_info"]
    if isinstance(info, list):  # SGLang 0.5.23: one entry per model (main and drafts), all for the same rank
        info = info[0]
    return RankChecksums(
        EngineRank(info["pp_rank"], info["tp_rank"]),
        EngineLayout(tp_size=info["tp_size"], pp_size=info["pp_size"], dp_size=info["dp_size"]),
        digests_of_weights(report),
    )


def digests_of_weights(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> digest of the weights in one rank's report.

    SGLang computes the tensors of `rotary_emb` from the config, so they are not weights: SGLang 0.5.23 reports
    `axis_map` of vision models.
    """
    return {name: digest for name, digest in report["checksums"].items() if ".rotary_emb." not in name}


def _refusal(url: str, route: str, response: Response) -> EngineError:
    text = response.text[:ERROR_CHARACTERS]
    return EngineError(f"engine {url} refused /{route} with {response.status}: {text}")


def _update(flush_cache: bool, weight_version: WeightVersion) -> dict[str, Any]:
    return {"flush_cache": flush_cache, "weight_version": str(weight_version)}  # SGLang stores versions as strings


class FolderEngineControl:
    """Controls an engine that the trainer can reach only through a shared folder.

    The agent on the engine's host forwards each call to the engine. Weights are sent as versions in the folder. All
    other update methods raise `EngineError`.
    """

    def __init__(self, folder: Path, url: str, layout: EngineLayout, timeout_s: float) -> None:
        """`url`: the engine's address as seen by the trainer; `timeout_s`: timeout of each call."""
        self._box, self._url, self._layout, self._timeout_s = mailbox(folder, url), url.rstrip("/"), layout, timeout_s

    @property
    def url(self) -> str:
        return self._url

    @property
    def layout(self) -> EngineLayout:
        return self._layout

    def close(self) -> None:
        """Does nothing, because there is no connection to close."""

    def pause(self, mode: str = "abort") -> None:
        self._call("pause", mode=mode)

    def resume(self) -> None:
        self._call("resume")

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def begin_update(self) -> None:
        self._call("begin_update")

    def end_update(self) -> None:
        self._call("end_update")

    def weight_checksums(self) -> list[RankChecksums]:
        found = self._call("weight_checksums")
        try:
            return [_checksums_in(rank) for rank in found]
        except (KeyError, TypeError) as error:
            raise EngineError(f"the agent of {self._url} sent an invalid checksum report: {error!r}") from error

    def _refuse(self, *args: Any, **named: Any) -> NoReturn:
        raise EngineError(
            f"engine {self._url} can be reached only through the folder {self._box}, which supports only weight "
            "versions; use --update-weight-transport disk"
        )

    update_weights_from_tensor = update_weights_from_distributed = update_weights_from_disk = speak_for = _refuse
    init_weights_update_group = destroy_weights_update_group = release_memory = resume_memory = _refuse

    def _call(self, method: str, **arguments: Any) -> Any:
        return call(self._box, method, arguments, limit_s=self._timeout_s)


def _checksums_in(report: Mapping[str, Any]) -> RankChecksums:
    layout = report["layout"]
    sizes = {**layout, "stage_layers": tuple(layout["stage_layers"])}
    return RankChecksums(EngineRank(**report["rank"]), EngineLayout(**sizes), dict(report["checksums"]))
