"""SGLang servers and the router in front; their own flags are --sglang-* and --router-*."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import internal


@dataclass(frozen=True, kw_only=True)
class ServingArgs:
    """Limits of the inference side."""

    sglang_server_concurrency: int = 512
    """Most requests in flight per engine."""
    engine_start_timeout_s: float = 600.0
    """Limit of one engine's start, in seconds."""
    request_timeout_s: float = 600.0
    """Limit of one generate request, in seconds."""
    sglang_router_ip: str | None = internal()
    """Host of the run's router; set when it has started."""
    sglang_router_port: int | None = internal()
    """Port of the run's router; set when it has started."""
