"""`Secret`: a text that no record of settings shows, and no answer.

SGLang writes its arguments, by their `repr`, to its log; hands them to its children; and answers `/server_info` with
all of them, those of the children as well, so that whoever may generate would read the key to the weights.
"""

from __future__ import annotations

import secrets
from typing import Any

from slime.core.text import HIDDEN


class Secret(str):
    """Equal to the text, and used as it is, where it was made. What is copied or pickled is nobody's key: a text that
    cannot be guessed, so that a copy that is asked for in a request lets nobody in.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"'{HIDDEN}'"

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return _nobodys_key()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobodys_key, ()


def _nobodys_key() -> str:
    return f"{HIDDEN} {secrets.token_hex(16)}"
