"""`StreamingClient`: an `EngineClient` that knows which weights sampled each token of a request that spans versions.

With `--pause-generation-mode retract` a request lives through a publication, and SGLang's answer names the
last version only. Streamed, each chunk holds the tokens since the chunk before (`incremental_streaming_output`) and
carries the version that was served when they were made.

Invariants
1. A chunk holds tokens of one version. SGLang 0.5.16 keeps that if it streams every token (`stream_interval` 1) and
   does not overlap schedule and forward pass: an overlapped step is sampled before the pause and told after it.
2. A stream that ends without a finish reason is a broken connection, and is tried again as one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from slime.rollout.client import EngineClient


class StreamingClient(EngineClient):
    """As its base; `Generation.weight_version` is a version per token where there are several."""

    async def _read(self, response: aiohttp.ClientResponse) -> tuple[int, bytes]:
        if response.status != 200:
            return await super()._read(response)
        text, pairs, versions = "", list[Any](), list[str]()
        meta: Mapping[str, Any] = {}
        async for line in response.content:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                return int(chunk["error"].get("code") or 500), line
            meta, new = chunk["meta_info"], chunk["meta_info"]["output_token_logprobs"]
            text += chunk["text"]
            pairs += new
            versions += [meta["weight_version"]] * len(new)
        if not meta.get("finish_reason"):
            raise aiohttp.ClientPayloadError(f"the stream ended after {len(pairs)} tokens without a reason")
        whole = {**meta, "output_token_logprobs": pairs, "token_versions": versions}
        return 200, json.dumps({"text": text, "meta_info": whole}).encode()

    def _payload(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**payload, "stream": True}
