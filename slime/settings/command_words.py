"""The words of a command line by flag, without what the flags mean: to leave some out, or to put others in."""

from __future__ import annotations

from collections.abc import Sequence


def groups(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values."""
    out: list[list[str]] = []
    for word in words:
        if out and not (word.startswith("--") and len(word) > 2):
            out[-1].append(word)
        else:
            out.append([word])
    return out


def name_of(group: Sequence[str]) -> str:
    """The setting of a flag: `ckpt_step` of `--ckpt-step 3`, of `--ckpt_step 3` and of `--ckpt-step=3`."""
    return group[0].partition("=")[0].lstrip("-").replace("-", "_")


def flag_value(words: Sequence[str], name: str) -> str | None:
    """The last value of a flag; None without one."""
    found = None
    for group in groups(words):
        if name_of(group) == name:
            _, inline, value = group[0].partition("=")
            found = value if inline else next(iter(group[1:]), None)
    return found


def without(words: Sequence[str], *names: str) -> list[str]:
    """The words without these flags and their values."""
    return [word for group in groups(words) if name_of(group) not in names for word in group]
