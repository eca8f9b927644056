"""`--deterministic-mode` acts: PyTorch is told, before the first kernel of a training rank runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, torch
from slime.training.parallel import be_deterministic
be_deterministic()
assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
"""


@pytest.mark.slow
def test_pytorch_takes_deterministic_kernels() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=100)
