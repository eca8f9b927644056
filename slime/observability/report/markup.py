"""Builds HTML and SVG. Everything except `Markup` is escaped.

Text from models and datasets is untrusted, so it must only be inserted as a child or attribute of `element`. Control
characters, and characters that reverse the text direction, are shown as escape sequences.
"""

from __future__ import annotations

import html
import math
import time

from slime.core.text import visible

VOID = frozenset({"meta", "br", "col"})
"""Elements without an end tag."""


class Markup(str):
    """Trusted markup. It is created only in this module, from constants and from images drawn by matplotlib."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escapes any value for use in the text or an attribute of an element."""
    return value if isinstance(value, Markup) else Markup(html.escape(visible(str(value)), quote=True))


def joined(*children: object) -> Markup:
    """Concatenates the children and skips None."""
    return Markup("".join(text(child) for child in children if child is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Builds one element. Attributes: `class_` becomes `class` and `data_x` becomes `data-x`; None and False are
    omitted; True adds an attribute without value. `name` and attribute names must be constants.
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


# --- human-readable numbers and dates
def short(value: float) -> str:
    """Formats a number with three significant digits (more from 1,000 to 1e6), or in scientific notation."""
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
    """Formats a time in seconds, or in milliseconds if it is short."""
    return f"{short(1000 * seconds)} ms" if 0 < seconds < 0.1 else f"{short(seconds)} s"


def percent(value: float) -> str:
    """Formats a fraction as a percentage, with more digits if it is small."""
    if value and abs(value) < 0.1:
        return f"{100 * value:.3g} %"
    return f"{100 * value:.0f} %"


def when(time_s: float) -> str:
    """Formats a date and time in UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
