"""Law 2 under faults, on GPUs: what strikes a bucket on its way, and an engine or a sender that dies in the middle.

`distributed` sends over NCCL from GPU 0 to engines on GPU 1; `tensor` lends memory to an engine on GPU 0. The faults of
a bucket are those of `tests.support.weight_faults`; what the engine has to answer with some weights is what it answered
when it had got the same, verified, and transformers agrees with it about which weights these are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.cluster.launch_run import NCCL
from slime.core.errors import EngineError, SlimeError
from slime.core.topology import ONE_RANK
from slime.models import table_for
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest, serialize_bucket, warm_digest
from slime.serving.server import ServerSpec, SGLangServer
from slime.weights.receivers import Receiver
from slime.weights.send_plan import Bucket
from slime.weights.sync import sync_weights
from slime.weights.transports import TRANSPORTS, Channel
from tests.contract.weights.test_sync_to_engine import reference_logprobs
from tests.gpu.test_engine_layouts import EXPERTS, FLAGS, SIZES, START_LIMIT_S
from tests.support.engines import kill
from tests.support.tiny import write_tiny_model
from tests.support.weight_faults import FAULTS, PROMPT, Count, Engine, behind_proxy, moved, try_faults
from tests.support.weights import TamperingChannel, Whole, disk_settings, transport_context

pytestmark = [pytest.mark.two_gpus, pytest.mark.timeout(600)]
CASES = 20
WEIGHTS = 4
LIMIT_S = 10.0
BUCKET_BYTES = 256 * 1024
TRANSPORT_GPUS = {"distributed": 1, "tensor": 0}
"""The GPU of the engine, by transport."""
BUCKETS = (0, 3)
"""The bucket that a death precedes: the first one of a group connects its ranks."""
SPARE, LEFT = "spare", "left"
"""More engines on GPU 1, one per bucket: those that are killed, and those whose senders are."""


@dataclass
class Servers:
    found: dict[str, SGLangServer]
    path: Path

    def ready(self, name: str) -> SGLangServer:
        self.found[name].wait_ready(timeout_s=START_LIMIT_S)
        return self.found[name]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root, uuids = tmp_path_factory.mktemp("faults"), uuids_of()
    path = write_tiny_model(root / "model", "qwen3_moe", seed=3, **SIZES, **EXPERTS)
    servers: dict[str, SGLangServer] = {}
    ones = {f"{name} {number}": 1 for name in (SPARE, LEFT) for number in BUCKETS}
    with ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        for variable, value in NCCL.items():  # what engines use; the first broadcast fails if the sender differs
            patch.setenv(variable, value)
        for name, gpu in {**TRANSPORT_GPUS, **ones}.items():
            extra = {**FLAGS, "mem_fraction_static": 0.1}
            spec = ServerSpec(
                str(path), "bfloat16", "cuda", ONE_RANK, gpu_ids=(str(gpu),), token_versions=True, extra=extra
            )
            servers[name] = SGLangServer(spec, log_path=root / f"{name}.log")
            servers[name].start()
            ends.callback(servers[name].stop)
        warm_digest(torch.device("cuda", 0))
        serialize_bucket([("warm", torch.zeros(1, device="cuda"))], 1)
        assert len(set(uuids)) >= 2
        yield Servers(servers, path)


def uuids_of() -> list[str]:
    return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count())]


def states_of(path: Path) -> list[dict[str, torch.Tensor]]:
    """[WEIGHTS] of HF name -> tensor in bfloat16 on GPU 0, all of them different."""
    own, table = load_file(path / "model.safetensors"), table_for(json.loads((path / "config.json").read_text()))
    state = {name: own[name] for name in table.hf_names}
    return [
        {name: tensor.bfloat16().cuda(0) for name, tensor in moved(state, seed).items()}
        for seed in range(1, 1 + WEIGHTS)
    ]


@pytest.mark.parametrize("transport", TRANSPORT_GPUS)
def test_each_fault_of_a_bucket_is_caught_by_name(cases: Servers, transport: str, tmp_path: Path) -> None:
    """Law: all are caught, and no token is served before a good weight sync."""
    server, states, uuids = cases.ready(transport), states_of(cases.path), uuids_of()
    table = table_for(json.loads((cases.path / "config.json").read_text()))
    with behind_proxy(server.url) as proxy:
        engine = Engine(
            server.url,
            proxy,
            cases.path,
            tmp_path,
            [Whole(table, state.items()) for state in states],
            [{name: tensor.cpu() for name, tensor in state.items()} for state in states],
            [],
            bucket_bytes=BUCKET_BYTES,
            gpus=(uuids[0], uuids[TRANSPORT_GPUS[transport]]),
        )
        for which in range(WEIGHTS):
            engine.sync(which, engine.channel(transport))
            engine.answers.append(engine.ask().log_probs)
        means = [[float((own - ref).abs().mean()) for ref in references(cases.path, states)] for own in engine.answers]
        assert [row.index(min(row)) for row in means] == list(range(WEIGHTS)), means
        for fault in FAULTS:
            assert try_faults(engine, transport, fault, CASES) == Count(CASES, CASES, 0, 2 * CASES)
        engine.close()


def references(path: Path, states: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [reference_logprobs(path, {n: t.float().cpu() for n, t in state.items()}, PROMPT) for state in states]


class StrikingChannel(TamperingChannel):
    """Strikes before one of the buckets is delivered."""

    def __init__(self, inner: Channel, number: int, strike: Callable[[], object]) -> None:
        super().__init__(inner, lambda _, tensor: tensor)
        self._left, self._strike = number, strike

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        return self._inner.prepare(bucket, receivers)

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        if self._left == 0:
            self._strike()
        self._left -= 1
        super().deliver(prepared, receivers, version=version)


def send(
    path: Path, url: str, version: int, *, limit_s: float, struck: tuple[int, Callable[[], object]] | None
) -> None:
    """One weight sync over NCCL, from this process and GPU 0, in a group of its own."""
    state = states_of(path)[version % WEIGHTS]
    table = table_for(json.loads((path / "config.json").read_text()))
    context = transport_context(hf_checkpoint=path, table=table, timeout_s=limit_s, device="cuda", gpu_id=uuids_of()[0])
    channel = TRANSPORTS.build("distributed", disk_settings(None)).open(context)
    control = HttpEngineControl(url, ONE_RANK, timeout_s=limit_s)
    try:
        sync_weights(
            Whole(table, state.items()),
            receivers=[Receiver(control)],
            channel=channel if struck is None else StrikingChannel(channel, *struck),
            digest=digest,
            version=version,
            buffer_bytes=BUCKET_BYTES,
        )
    finally:
        control.close()
        channel.close()


@pytest.mark.parametrize("number", BUCKETS)
def test_an_engine_that_dies_in_a_weight_sync_is_named_and_the_next_one_is_served(cases: Servers, number: int) -> None:
    """Law: the sender does not wait for a dead engine in NCCL, and its GPU is fit for the next weight sync."""
    server = cases.ready(f"{SPARE} {number}")
    with pytest.raises(EngineError) as caught:
        send(cases.path, server.url, 2, limit_s=LIMIT_S, struck=(number, lambda: kill(server)))
    assert caught.value.engines == (server.url,)
    send(cases.path, cases.ready("distributed").url, 3, limit_s=60.0, struck=None)


def _send_and_die(path: Path, url: str, number: int) -> None:
    send(path, url, 2, limit_s=LIMIT_S, struck=(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.parametrize("number", BUCKETS)
def test_an_engine_whose_sender_died_is_named_in_time_or_takes_the_next_weights(cases: Servers, number: int) -> None:
    """Law: a new sender gets its weights in, verified, or is given the engine's name, which a run then replaces."""
    server = cases.ready(f"{LEFT} {number}")
    sender = multiprocessing.get_context("spawn").Process(target=_send_and_die, args=(cases.path, server.url, number))
    sender.start()
    sender.join(120)
    assert sender.exitcode == -signal.SIGKILL
    try:
        send(cases.path, server.url, 3, limit_s=LIMIT_S, struck=None)
        print("\nthe engine took the next weights", flush=True)
    except SlimeError as error:
        print(f"\n{error}", flush=True)
        assert error.engines == (server.url,)
    send(cases.path, cases.ready("distributed").url, 4, limit_s=60.0, struck=None)
