"""Placements of `docs/weight_sync.md` as command lines, and its table of the transports that go with each."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "weight_sync.md"
PLACEMENTS: dict[str, list[str]] = {
    "decoupled": [],
    "colocated": ["--colocate"],
    "colocated, with additional engines": ["--colocate", "--rollout-num-gpus", "2"],
    "several hosts, decoupled": ["--ray-address", "10.0.0.1:6379"],
    "several hosts, colocated": ["--ray-address", "10.0.0.1:6379", "--colocate", "--actor-num-nodes", "2"],
    "engines that run already": ["--rollout-external-engine-addrs", "10.0.0.2:30000"],
}
"""Name in the table -> flags that mean it, with one training rank and one GPU per engine."""


def documented_pairs() -> dict[tuple[str, str], set[str]]:
    """(placement, transport) -> the devices on which the table says that they go together, of "cpu" and "cuda"."""
    lines = [line.strip().strip("|").split("|") for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip().strip("`") for cell in line] for line in lines]
    start = next(i for i, row in enumerate(rows) if row[0] == "placement")
    transports, body = rows[start][1:], rows[start + 2 : start + 2 + len(PLACEMENTS)]
    named = {"CPU": "cpu", "GPU": "cuda", "(GPU)": "cuda"}
    return {
        (row[0], transport): {named[word] for word in cell.split(", ")} if cell != "no" else set()
        for row in body
        for transport, cell in zip(transports, row[1:], strict=True)
    }
