"""Laws of divided prefix caches where SGLang orders its waiting queue, and of the keys that users give.

SGLang's own scheduling policies and radix tree, without an engine (`prefix_queue`).
"""

from __future__ import annotations

import pytest

from tests.contract.rollout.prefix_queue import CACHED, keys, order_and_matches
from tests.support.ranks import Ranks

MATCHED = len(CACHED) - 1
"""The last token is always read."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_the_queue_goes_by_prefixes_of_the_weights_that_serve(policy: str) -> None:
    """Law: a policy sees what a request will find, no more (other weights) and no less (a request that has just come).

    An update changes the weights even if it fails.
    """
    with Ranks(fresh=True) as ranks:
        (seen,) = ranks.run(order_and_matches, 1, policy)
    assert seen["fresh"] == [("same", MATCHED), ("other", 0)]
    assert {matched for _, matched in seen["after an update"]} == {0}, seen
    assert dict(seen["read again"]) == {"same": MATCHED, "first": MATCHED, "other": 0}
    assert seen["read again"][-1] == ("other", 0)


@pytest.mark.slow
def test_keys_of_users_stay_apart_whatever_they_are_called() -> None:
    """Law: requests with different keys share nothing, nor do those of different weights; what a request has read of
    its prompt stays with the weights that read it.
    """
    given = [None, "a", "a|weights 1", "a|weights 1|weights 1", "|weights 0"]
    with Ranks(fresh=True) as ranks:
        (seen,) = ranks.run(keys, 1, given)
    assert seen["next chunk"] == seen["read"], "the beginning would be found under weights that have not read it"
    for name in ("read", "again"):
        assert len(set(seen[name])) == len(given)
        assert all(now.startswith(key or "") for now, key in zip(seen[name], given, strict=True))
    assert not set(seen["read"]) & set(seen["again"])
    assert len(seen["read"][1]) == len(seen["again"][1]), "a key does not grow with each weight sync"
