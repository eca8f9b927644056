"""Weight transports, one file each with the name, settings, checks and code. `base` defines the interface.

`--update-weight-transport` accepts one of these names or the import path of your own `Transport`.
"""

from __future__ import annotations

from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

__all__ = ["TRANSPORTS", "Channel", "Transport", "TransportContext"]
