"""Every metric that the sources name is in docs/metrics.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
GROUPS = ("rollout", "train", "eval", "perf", "data")
METRIC = re.compile(rf"({'|'.join(GROUPS)})/[a-z][\w@./-]*")


def glossary() -> list[re.Pattern[str]]:
    """The documented names as patterns; `/median` continues the first name of its row."""
    patterns = []
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        names = re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("|") else []
        base = names[0].rpartition("/")[0] if names else ""
        for name in names:
            full = base + name if name.startswith("/") else name
            if full.startswith(GROUPS):
                patterns.append(re.compile(re.sub(r"<\w+>", r"[^/]+", re.escape(full).replace(r"\<", "<"))))
    return patterns


def named_metrics() -> dict[str, str]:
    """Metric -> file, for each string literal that names one; the start of an f-string ends with "…"."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text()
        if not METRIC.search(source):
            continue  # to parse it takes time
        nodes = list(ast.walk(ast.parse(source)))
        inside = {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if id(node) in inside:
                    if METRIC.match(text) and not text.endswith(("-", " ")) and " " not in text:
                        found[text + "…"] = name
                elif METRIC.fullmatch(text):
                    found[text] = name
    return found


def test_every_named_metric_is_explained() -> None:
    patterns = glossary()
    assert len(patterns) > 50, "the glossary was not understood"
    missing = {
        metric: file
        for metric, file in named_metrics().items()
        if not any(
            p.fullmatch(metric) or p.pattern.startswith(re.escape(metric.removesuffix("…")) + "/" * (metric[-1] != "…"))
            for p in patterns
        )
        and metric not in ("rollout/step", "train/step", "eval/step")
    }
    assert not missing, "explain in docs/metrics.md:\n" + "\n".join(f"{m} ({f})" for m, f in sorted(missing.items()))
