"""A real engine whose tokens tell which weights sampled them; its weights are synced as a trainer does it.

Every embedding is the same vector and no layer adds to it, so that the last hidden state is known and the logits are
one column of the output layer: in version v those of even ids are `v * LOGIT_STEP`, the others 0. The two log-probs
that a token can have are of no other version.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime.cluster.weight_sync_sequence import PauseChoice
from slime.core.sample import Sample
from slime.core.topology import ONE_RANK
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.rollout.client.engine_client import EngineClient, RequestScope
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest
from slime.weights.receivers import Receiver
from slime.weights.sync import sync_weights
from slime.weights.transports.tensor import TensorTransport
from tests.support.engine_state import num_running
from tests.support.tiny import VOCAB_SIZE
from tests.support.weights import Whole, transport_context

LOGIT_STEP = 0.125
TOLERANCE = 1e-5
"""Nats; the log-probs of neighbouring versions are further apart than 0.01 up to version 20."""
StateDict = dict[str, torch.Tensor]


def read_model(path: Path) -> tuple[FamilyTable, StateDict]:
    """The weight table of a checkpoint, and its weights in the table's order."""
    table = table_for(json.loads((path / "config.json").read_text()))
    state = {n: t for n, t in load_file(path / "model.safetensors").items() if n in table.hf_names}
    return table, {n: state[n] for n in table.hf_names}


def labelled(state: StateDict, version: int) -> StateDict:
    """The weights of `version`, in the shapes of a checkpoint (Qwen3)."""
    new = {name: torch.ones_like(t) if t.ndim == 1 else torch.zeros_like(t) for name, t in state.items()}
    new["model.embed_tokens.weight"] = torch.ones_like(state["model.embed_tokens.weight"])
    new["lm_head.weight"][::2, 0] = version * LOGIT_STEP
    return new


def log_prob(token: int, version: int) -> float:
    """Nats, of sampling `token` at temperature 1."""
    logit = version * LOGIT_STEP
    return (logit if token % 2 == 0 else 0.0) - math.log(VOCAB_SIZE / 2 * (math.exp(logit) + 1))


class LabelledEngine:
    """One server; `async_laws.Engine`. Made on an event loop."""

    pace = 0.1

    def __init__(self, url: str, model_path: Path, pause_mode: str = "abort") -> None:
        """`pause_mode`: what a weight sync does to requests under way; the server tells the version of each token."""
        self.url = url
        self.pauses = PauseChoice(("abort", "retract") if pause_mode == "auto" else (pause_mode,))
        self.client = EngineClient(url, request_timeout_s=60, token_versions=pause_mode != "abort")
        self.version = 0
        self.pause_s: list[float] = []
        self._table, self._state = read_model(model_path)
        self._control = HttpEngineControl(url, ONE_RANK, timeout_s=60)
        self._channel = TensorTransport().open(transport_context(table=self._table))

    async def sync_weights(self, version: int, scope: RequestScope | None = None) -> None:
        """Sends all weights, and compares what the engine then holds."""
        if scope is not None:
            await self.client.pause(scope)
        try:
            await asyncio.to_thread(self._sync, labelled(self._state, version), version, self.pauses.mode)
        finally:
            self.client.resume()
        self.version = version

    async def close(self) -> None:
        """The server has the weights of its checkpoint again."""
        await self.client.close()
        await asyncio.to_thread(self._sync, self._state, 1, "abort")
        self._channel.close()
        self._control.close()

    def _sync(self, state: StateDict, version: int, pause_mode: str) -> None:
        metrics = sync_weights(
            Whole(self._table, state.items()),
            receivers=[Receiver(self._control)],
            channel=self._channel,
            digest=digest,
            version=version,
            buffer_bytes=2**20,
            pause_mode=pause_mode,
        )
        self.pause_s.append(metrics["update_weights_pause_time"])
        if version > 1:
            self.pauses.note({f"perf/{name}": value for name, value in metrics.items()})

    async def num_running(self) -> int:
        """An abort needs a moment to reach the scheduler."""
        deadline = time.monotonic() + 10.0
        while (num := await asyncio.to_thread(num_running, self.url)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return num

    def versions(self, sample: Sample) -> list[int]:
        """[R] the version up to now that gives the token its log-prob; -1 if none does."""
        response = sample.tokens[sample.prompt_length :]
        return [self._version_of(t, p) for t, p in zip(response, sample.rollout_log_probs or (), strict=True)]

    def _version_of(self, token: int, value: float) -> int:
        known: Any = (v for v in range(self.version + 1) if abs(log_prob(token, v) - value) < TOLERANCE)
        return next(known, -1)
