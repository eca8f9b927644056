"""y_t = x_t + decay * y_{t+1} from the end, exact, in chunks.

Within a chunk the recursion is a product with the upper triangular matrix of the powers of `decay`, all chunks at once;
only the value that a chunk hands to the one before it is serial.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
CHUNK_TOKENS = 128


def reverse_scan(x: Array, decay: float, chunk: int = CHUNK_TOKENS) -> Array:
    """y [R] of x [R], in float64."""
    assert chunk > 0, f"got chunk {chunk}"
    num = -(-len(x) // chunk)
    padded = np.zeros(num * chunk, np.float64)
    padded[: len(x)] = x  # zeros after the end leave the recursion as it is
    powers = _powers(float(decay), chunk)
    out: Array = padded.reshape(num, chunk) @ powers.T
    to_next = decay * powers[:, -1]
    for i in range(num - 2, -1, -1):
        out[i] += to_next * out[i + 1, 0]
    return out.reshape(-1)[: len(x)]


@lru_cache(maxsize=8)
def _powers(decay: float, chunk: int) -> Array:
    """decay^(j - i) at row i, column j >= i; zero below. [chunk, chunk]"""
    index = np.arange(chunk)
    exponent = index[None, :] - index[:, None]
    return np.where(exponent >= 0, decay ** np.maximum(exponent, 0), 0.0)
