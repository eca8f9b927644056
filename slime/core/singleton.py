"""A class of which every call gives the same instance."""

from __future__ import annotations

import threading
from typing import Any


class SingletonMeta(type):
    """Metaclass; the arguments of the first call make the instance, those of others are not looked at."""

    _made: dict[type, Any] = {}  # noqa: RUF012 - of all classes
    _lock = threading.Lock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._made:
                SingletonMeta._made[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._made[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Forgets them all; for tests."""
        with SingletonMeta._lock:
            SingletonMeta._made.clear()
