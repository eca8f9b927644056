"""HTML and SVG that cannot be broken by what they show: whatever is not `Markup` is escaped.

Text of a model or of a dataset is hostile. It enters a page as a child or an attribute of `element`, and as nothing
else; control characters and those that turn the order of a line around are spelled out.
"""

from __future__ import annotations

import html
import math
import time

from slime.core.text import visible

VOID = frozenset({"meta", "br", "col"})
"""Elements without an end tag."""


class Markup(str):
    """Text that is markup already. Only made by this module and of constants."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any value as text of a page or of an attribute."""
    return value if isinstance(value, Markup) else Markup(html.escape(visible(str(value)), quote=True))


def joined(*children: object) -> Markup:
    """Children after each other; None is left out."""
    return Markup("".join(text(child) for child in children if child is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. Attributes: `class_` is `class`, `data_x` is `data-x`; None is left out, True stands alone.

    `name` and the names of attributes are constants of the caller.
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


# --- numbers and dates as people write them
def short(value: float) -> str:
    """Three significant digits, thousands apart, a power of ten where it is far from one."""
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
    """A time of any size, in milliseconds where it is short."""
    return f"{short(1000 * seconds)} ms" if 0 < seconds < 0.1 else f"{short(seconds)} s"


def percent(value: float) -> str:
    """A share; small ones with a digit more."""
    if value and abs(value) < 0.1:
        return f"{100 * value:.3g} %"
    return f"{100 * value:.0f} %"


def when(time_s: float) -> str:
    """Date and minute, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
