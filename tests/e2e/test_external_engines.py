"""Engines that somebody else started: a run finds and checks them, loses one, takes another, leaves them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime.serving.leased_ports import lease_ports, request
from tests.support.e2e import ROOT, Flags, RealRun, environment
from tests.support.faults import happened
from tests.support.forwarding import lying
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow

KEY = "a key that is in no command line"
ADMIN = "a key to the weights"
KEYS = {"SLIME_ENGINE_API_KEY": KEY, "SLIME_ENGINE_ADMIN_API_KEY": ADMIN}
SERVER = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--max-total-tokens", "16384", "--max-running-requests", "64", "--sleep-on-idle", "--skip-server-warmup"),
    *("--incremental-streaming-output", "--host", "127.0.0.1"),
)
"""As docs/serving_topology.md starts one, with the limits of a CPU."""
START_LIMIT_S = 600.0


class Server:
    """An SGLang server that is nobody's child of the run."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = [sys.executable, "-m", "slime.serving.launch", "--model-path", str(model), "--port", str(port), *SERVER]
        more = {**KEYS, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**environment(), **more, "TORCHDYNAMO_DISABLE": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while request("GET", f"{self.url}/health")[0] != 200:
            assert self.process.poll() is None, self.said[-3000:]
            assert time.monotonic() < deadline, self.said[-3000:]
            time.sleep(0.5)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def num_running(self) -> int:
        """Requests that it works on now."""
        status, text = request("GET", f"{self.url}/v1/loads", api_key=KEY)
        return sum(int(load.get("num_running_reqs") or 0) for load in json.loads(text)["loads"]) if status == 200 else 0

    def answers(self) -> list[int]:
        """A greedy answer; one that is paused gives none."""
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
        status, text = request("POST", f"{self.url}/generate", body, timeout_s=60, api_key=KEY)
        assert status == 200, (status, text)
        ids: list[int] = json.loads(text)["output_ids"]
        return ids

    def kill(self) -> None:
        """SIGKILL of the server alone; those below it end with it."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextmanager
def servers(model: Path, folder: Path, num: int) -> Iterator[list[Server]]:
    """So many of them, which answer; ports stay theirs. Whoever is appended to the list is ended, too."""
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Server] = []
    with lease_ports(num) as lease:
        try:
            for i, port in enumerate(lease.ports):
                started.append(Server(model, port, folder / f"server_{i}.log"))
                started[-1].wait()
            yield started
        finally:
            for server in started:
                server.end()


def flags_of(digits: Callable[[Path], Flags], model: Path, where: str | Path, *more: str) -> Flags:
    constant: Flags = ["--lr", "1e-3", "--lr-decay-style", "constant"]
    return [*digits(model), *constant, "--rollout-external-engine-addrs", where, *more]


def test_an_engine_leaves_and_another_joins_while_training_runs(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: the run goes on with the others, what appears at the address serves after a verified weight sync, a line of
    the file is an engine, and at the end all of them answer.
    """
    folder, run_dir = runs / "external", runs / "external-run"
    with servers(tiny_qwen3, folder, 2) as started:
        first, second = started
        listed = folder / "engines"
        listed.write_text(f"{first.url}\n{second.url}\n")
        flags = flags_of(digits, tiny_qwen3, f"@{listed}", "--num-rollout", "100000")
        with RealRun(run_dir, flags, more_env=KEYS) as run:

            def steps() -> int:
                return max(run.metrics("train"), default=-1) if (run_dir / "metrics.jsonl").exists() else -1

            run.wait_until("step 1", lambda: steps() >= 1)
            run.wait_until("requests at the second engine", lambda: second.num_running > 0)
            second.kill()
            assert happened(second.process.pid), f"NOT PROVEN: process {second.process.pid} goes on after SIGKILL"
            run.wait_until("word of the loss", lambda: "engine 1 was lost" in run.output)
            after = steps()
            run.wait_until("two steps with one engine", lambda: steps() >= after + 2)
            again = Server(tiny_qwen3, int(second.url.rpartition(":")[2]), folder / "server_1_again.log")
            started.append(again)
            run.wait_until("requests at what came in its place", lambda: "POST /generate" in served(again))
            assert verified_before_it_served(again), again.said[-3000:]
            listed.write_text(f"{again.url}\n")
            left = "engine 0 was lost: its address is no longer in"
            run.wait_until("word that the first one left", lambda: left in run.output)
            after = steps()
            run.wait_until("a step without it", lambda: steps() >= after + 2)
            again.kill()
            assert happened(again.process.pid), f"NOT PROVEN: process {again.process.pid} goes on after SIGKILL"
            run.wait_until("word of the loss of the last one", lambda: run.output.count("engine 1 was lost") == 2)
            last = Server(tiny_qwen3, int(second.url.rpartition(":")[2]), folder / "server_1_last.log")
            started.append(last)
            run.wait_until("requests at what came in its place", lambda: "POST /generate" in served(last))
            assert verified_before_it_served(last), last.said[-3000:]
            after = steps()
            run.wait_until("two steps with it", lambda: steps() >= after + 2)
            assert run.interrupt() == 130, run.tail
            for step, row in run.metrics("train").items():
                assert row["data/failed"] == 0, (step, row)
            assert run.left() == []
        assert first.answers(), "it left while it served"
        if "may be paused" in run.output:  # Ctrl-C came in a weight sync
            assert request("POST", f"{last.url}/continue_generation", {}, api_key=ADMIN)[0] == 200
        assert last.answers()


def test_a_server_that_holds_other_weights_is_left_out_until_it_holds_the_right_ones(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: one engine that fails a weight sync costs no run. The others get it again; it serves when it is right."""
    folder, run_dir = runs / "external-lies", runs / "external-lies-run"
    with servers(tiny_qwen3, folder, 2) as (first, second), lying(second.url) as liar:
        listed = folder / "engines"
        listed.write_text(f"{first.url}\n{liar.url}\n")
        more = ["--num-rollout", "100000", "--request-timeout-s", "10"]
        with RealRun(run_dir, flags_of(digits, tiny_qwen3, f"@{listed}", *more), more_env=KEYS) as run:

            def steps() -> int:
                return max(run.metrics("train"), default=-1) if (run_dir / "metrics.jsonl").exists() else -1

            run.wait_until("step 1", lambda: steps() >= 1)
            assert "engine 1 was lost" not in run.output
            liar.lies = True
            run.wait_until("word of the loss", lambda: "engine 1 was lost: the weight sync to it failed" in run.output)
            assert liar.told, "NOT PROVEN: no report was changed"
            after = steps()
            run.wait_until("two steps with one engine", lambda: steps() >= after + 2)
            liar.lies = False
            run.wait_until("it to serve again", lambda: "engine 1 serves again" in run.output)
            after = steps()
            run.wait_until("two steps with it", lambda: steps() >= after + 2)
            liar.told, liar.silent = 0, True
            run.wait_until(
                "word of the silence", lambda: "engine 1 was lost: none of its requests received a token" in run.output
            )
            assert liar.told, "NOT PROVEN: no request was kept"
            after = steps()
            run.wait_until("two steps without it", lambda: steps() >= after + 2)
            assert run.interrupt() == 130, run.tail
            require_balance(run.metrics("train"))
            assert not any(row["data/failed"] for row in run.metrics("train").values()), "a prompt failed"
            assert run.left() == []


def served(server: Server) -> str:
    """What it logged after the run had looked at it: a probe is a request, too."""
    return server.said.partition("/pause_generation")[2] if server.log.exists() else ""


def verified_before_it_served(server: Server) -> bool:
    """Whether a weight sync with its digests came between the probe and the first request of the run."""
    sync = re.search(
        r"POST /pause_generation.*POST /update_weights_from.*POST /weights_checker.*POST /continue_generation.*"
        r"POST /generate",
        server.said,
        re.S,
    )
    return sync is not None


def test_weights_go_through_a_folder_to_a_server_that_fits(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path, tiny_llama: Path
) -> None:
    """Law: what does not fit is refused before anything starts; what fits is trained with and left serving."""
    folder = runs / "external-disk"
    with servers(tiny_qwen3, folder, 1) as (server,):
        where = server.url.removeprefix("http://")
        wrong = flags_of(digits, tiny_llama, where, "--num-rollout", "1", "--sglang-disable-radix-cache")
        with RealRun(runs / "external-wrong", wrong, more_env=KEYS) as refused:
            assert refused.wait() == 2, refused.tail
            assert "model Qwen3ForCausalLM" in refused.output and "--disable-radix-cache off" in refused.output
        with RealRun(runs / "external-no-key", wrong) as refused:
            assert refused.wait() == 2, refused.tail
            assert "rejects the run's key" in refused.output
        flags = flags_of(digits, tiny_qwen3, where, "--num-rollout", "3", "--update-weight-transport", "disk")
        with RealRun(runs / "external-disk-run", flags, more_env=KEYS) as run:
            assert run.wait() == 0, run.tail
            assert sorted(run.metrics("train")) == [0, 1, 2]
            assert run.left() == []
        assert server.answers()
        assert "/update_weights_from_disk" in server.said and "abort_all=True" not in server.said
        version = json.loads(request("GET", f"{server.url}/model_info", api_key=KEY)[1])["weight_version"]
        assert version == "4", "the weights after the third step are the fourth"
