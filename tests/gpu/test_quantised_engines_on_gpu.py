"""Quantised engines on a GPU: what they are sent they hold and serve, as an engine does that loads it from a folder.

python -m pytest -s tests/gpu/test_quantised_engines_on_gpu.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.quantised import Case, Trainer, caught, prompts, served, weights_of
from benchmarks.training.shapes import SHAPES
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import warm_digest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(1200),
]
SHAPE = SHAPES["30b-a3b-6l"] | {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_experts": 8,
    "moe_intermediate_size": 256,
    "vocab_size": 2048,
}
START_LIMIT_S = 1000.0
"""The first INT4 engine of a host compiles SGLang's Marlin kernels with nvcc, which takes minutes."""
ADDS_IN_ANY_ORDER = ("int4",)
"""Kinds whose engine gives slightly different log-probs for the same request: Marlin's experts use atomic additions."""
COMPILED_ALONE = ("gptq_marlin", "moe_wna16_marlin")
"""Kernels of SGLang that take seven minutes each. An engine would compile one after the other."""


def compile_kernels() -> list[subprocess.Popen[bytes]]:
    """Starts to compile these kernels side by side. Engines wait for them at the locks of SGLang's cache."""
    code = "import torch; from sglang.jit_kernel.{0} import _jit_{0}_module as compiled; compiled(torch.bfloat16)"
    return [subprocess.Popen([sys.executable, "-c", code.format(name)]) for name in COMPILED_ALONE]


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().mean())


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """All engines start side by side."""
    logs, kinds = tmp_path_factory.mktemp("logs"), ("int4", "channels", "fp8")
    found = {kind: Case(SHAPE, kind, tmp_path_factory.mktemp(kind), logs, flips=6) for kind in kinds}
    compilers = compile_kernels()
    started = []
    try:
        for case in found.values():
            case.start()
            started.append(case)
        warm_digest(torch.device("cuda"))
        yield found
    finally:
        for case in started:
            case.stop()
        for process in compilers:
            process.kill()
            process.wait()


@pytest.mark.parametrize("kind", ["fp8", "channels", "int4"])
def test_an_engine_holds_and_serves_what_it_was_sent(cases: dict[str, Case], kind: str, tmp_path: Path) -> None:
    case = cases[kind]
    for server in case.servers.values():
        server.wait_ready(timeout_s=START_LIMIT_S)
    state, trainer = weights_of(case.shape, 2), Trainer(case, tmp_path)
    loaded = case.servers["loaded"]
    want = HttpEngineControl(loaded.url, loaded.spec.layout, timeout_s=60).weight_checksums()[0].checksums
    assert trainer.control.weight_checksums()[0].checksums != want
    tokens = prompts(SHAPE["vocab_size"])
    expected = served(loaded.url, tokens)
    repeated = difference(expected[0], served(loaded.url, tokens)[0])
    assert repeated == 0 or kind in ADDS_IN_ANY_ORDER
    assert difference(expected[0], served(case.servers["synced"].url, tokens)[0]) > 100 * repeated
    for version, transport in ((2, "tensor"), (3, "tensor"), (4, "disk")):
        trainer.sync(weights_of(case.shape, 10 + version), 10 * version, transport)
        trainer.sync(state, version, transport)
        assert trainer.control.weight_checksums()[0].checksums == want, transport
        log_probs, answers = served(case.servers["synced"].url, tokens)
        if kind in ADDS_IN_ANY_ORDER:
            assert difference(expected[0], log_probs) <= 3 * repeated, transport
        else:
            assert torch.equal(log_probs, expected[0]) and answers == expected[1], transport
    flips = list(caught(trainer, state, case.flips))
    assert all(flip["caught"] and flip["named"] for flip in flips), flips
