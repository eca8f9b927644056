"""The estimator is chosen on the command line, and its setting multiplies the advantages of a group."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from slime.algorithms.advantages import ESTIMATORS
from slime.core.errors import ConfigError
from slime.settings import parse_args
from tests.support.command_line import complete

words = [*complete(Path(sys.argv[1])), "--advantage-estimator", "median"]
with pytest.raises(ConfigError, match="median-scale"):
    parse_args([*words, "--median-scale", "0"])

rewards, groups = np.array([1.0, 2.0, 6.0, 3.0, 3.0]), np.array([0, 0, 0, 1, 1])
for scale in (1.0, 2.0):
    args = parse_args([*words, "--median-scale", str(scale)])
    estimator = ESTIMATORS.build(args.advantage_estimator, args)
    advantages = estimator.compared(rewards, groups, np.arange(5))
    np.testing.assert_array_equal(advantages, scale * np.array([-1.0, 0.0, 4.0, 0.0, 0.0]))
