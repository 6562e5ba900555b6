"""What a process must be told to be one of several."""

from __future__ import annotations

import pytest

from flaxen.core.errors import ConfigError
from flaxen.shard.processes import join


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, 2, 0), "need a coordinator"),
        (("host", 2, 0), "expected HOST:PORT"),
        (("host:1234", None, 0), "needs num_processes"),
        (("host:1234", 2, None), "and process_id from 0"),
        (("host:1234", 2, 2), "process_id is 2, expected 0 to 1"),
    ],
)
def test_what_lacks_is_said_before_anything_is_waited_for(given, said):
    with pytest.raises(ConfigError, match=said):
        join(*given)


def test_a_process_may_be_alone():
    join(None)
