"""A real server writes the trace that it is asked for."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

from slime.serving.control import HttpEngineControl
from slime.serving.leased_ports import request
from slime.serving.server import SGLangServer

PATIENCE_S = 120.0
"""Writing a trace takes seconds."""


def test_an_engine_traces_so_many_forward_passes(engine_server: SGLangServer, tmp_path: Path) -> None:
    control = HttpEngineControl(engine_server.url, engine_server.spec.layout, 60, api_key=engine_server.spec.api_key)
    control.start_profile(str(tmp_path), "step_3_engine_0", num_passes=3, shapes=False, stack=False)
    control.close()
    body = {"input_ids": [2, 40, 41], "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
    status, text = request("POST", f"{engine_server.url}/generate", body, timeout_s=60)
    assert status == 200, text
    until, path = time.monotonic() + PATIENCE_S, tmp_path / "step_3_engine_0-TP-0.trace.json.gz"
    while True:
        try:
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            break
        except (OSError, EOFError, ValueError):  # not there, or not yet whole
            assert time.monotonic() < until, f"no whole trace in {list(tmp_path.iterdir())}"
            time.sleep(0.1)
    assert any(str(event.get("name")).startswith("aten::") for event in events)
