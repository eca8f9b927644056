"""Finding the final answer in a response: the last `\\boxed{}`, the last `<answer>` element, or the whole text."""

from __future__ import annotations

ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text without one."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` (or `\\fbox{...}`), braces balanced; None if there is none.

    Only the last box counts, so that listing every candidate in boxes gains nothing. Linear in the length of `text`
    for each box that is never closed.
    """
    end = len(text)
    while True:
        start = max(text.rfind("\\boxed{", 0, end), text.rfind("\\fbox{", 0, end))
        if start < 0:
            return None
        opening = text.index("{", start)
        depth = 0
        for position in range(opening, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opening + 1 : position].strip()
        if end - start > 1 and text.count("\\boxed{", 0, start) > 64:
            return None  # a wall of unclosed boxes is not an answer, and scanning each would be quadratic
        end = start


def last_answer_element(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`; None if there is none."""
    close = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, close) if close >= 0 else -1
    return text[start + len(ANSWER_OPEN) : close].strip() if start >= 0 else None


def final_answer(text: str) -> str:
    """The answer that a response commits to: `<answer>` element, else last box, else the whole text, stripped."""
    for candidate in (last_answer_element(text), last_boxed(text)):
        if candidate is not None:
            return candidate
    return text.strip()
