"""HTML and SVG with all content escaped, except `Markup`.

Text of a model or a dataset is hostile. It enters a page only as a child or an attribute of `element`. Control
characters, and characters that reverse the order of a line, are spelled out.
"""

from __future__ import annotations

import html
import math
import time

from slime.core.text import visible

VOID = frozenset({"meta", "br", "col"})
"""Elements without an end tag."""


class Markup(str):
    """Text that is already markup. Made only in this module, from constants, and from matplotlib's images."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any value, escaped for a page or an attribute."""
    return value if isinstance(value, Markup) else Markup(html.escape(visible(str(value)), quote=True))


def joined(*children: object) -> Markup:
    """Concatenates the children, without None."""
    return Markup("".join(text(child) for child in children if child is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Builds one element. Attributes: `class_` is `class`, `data_x` is `data-x`; None is left out, True has no value.

    `name` and the names of attributes must be constants.
    """
    parts = [name]
    for key, value in attributes.items():
        spelled = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(spelled)
        elif value is not None and value is not False:
            parts.append(f'{spelled}="{text(value)}"')
    opened = f"<{' '.join(parts)}>"
    return Markup(opened if name in VOID else f"{opened}{joined(*children)}</{name}>")


# --- numbers and dates for people
def short(value: float) -> str:
    """Formats three significant digits, with thousands separators, or as a power of ten if very large or small."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    """Returns a time in seconds, or in milliseconds if it is short."""
    return f"{short(1000 * seconds)} ms" if 0 < seconds < 0.1 else f"{short(seconds)} s"


def percent(value: float) -> str:
    """Returns a share in %; a small one with more digits."""
    if value and abs(value) < 0.1:
        return f"{100 * value:.3g} %"
    return f"{100 * value:.0f} %"


def when(time_s: float) -> str:
    """Formats date and time to the minute, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
