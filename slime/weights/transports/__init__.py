"""Weight transports, one file each with name, settings, rules and code. `base` defines the contract.

`--update-weight-transport` takes one of the names, or the import path of your own `Transport`.
"""

from __future__ import annotations

from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

__all__ = ["TRANSPORTS", "Channel", "Transport", "TransportContext"]
