"""`Secret`: a text that no record of settings shows. SGLang writes its arguments, by their `repr`, to its log."""

from __future__ import annotations


class Secret(str):
    """Equal to the text, and used as it is; only its `repr` hides it. Survives copies and pickles as what it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'<hidden>'"
