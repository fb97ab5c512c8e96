"""Sources that users write, and attributes with old names."""

import numpy as np
import pytest

import treadle
from tests.data_batches import View, Y
from treadle.core.progress import Progress
from treadle.data import as_source, closed_loop, from_arrays, groups, limited, zipped
from treadle.data.source import ReadRequest, Source, is_closed_loop, read_from
from treadle.run.prefetch import Feed


class Squares:
    """A source as a user writes one."""

    length, endless, batch_examples, inexact = 3, False, 1, None

    def read(self, epoch, start=0, *, seed=0, loop=None, ordered=False, position=None):
        self.asked = epoch, start, seed, loop, ordered, position
        return as_source([np.array([i * i]) for i in range(3)]).read(epoch, start)


class ClosedSquares(Squares):
    closed_loop = True


class OldSquares(Squares):
    closed = True


def test_a_source_of_a_user_gets_the_fields_of_the_request_as_arguments():
    source, loop = ClosedSquares(), View()
    assert isinstance(source, Source) and as_source(source) is source
    request = ReadRequest(1, 2, 3, loop, ordered=True, position={"at": 4})
    assert read_from(source, request).take(5).batches.tolist() == [[4]]
    assert source.asked == (1, 2, 3, loop, True, {"at": 4})
    assert read_from(limited(source, 2), ReadRequest(0)).take(5).batches.tolist() == [[0], [1]]
    assert source.asked == (0, 0, 0, None, False, None)
    assert groups(source, 1).closed_loop and zipped(source, source).closed_loop


def test_old_names_still_work_with_a_warning():
    with pytest.warns(
        DeprecationWarning, match=r"^treadle\.data\.closed was renamed to treadle\.d"
    ):
        assert treadle.data.closed is closed_loop
    source = from_arrays(Y, batch_size=5)
    with pytest.warns(DeprecationWarning, match=r"^ArraySource\.closed was renamed to closed_loop"):
        assert source.closed is False
    message = (
        r"^the attribute closed of (tests\.)?test_data_user_sources\.OldSquares was renamed to "
        r"closed_loop: use"
    )
    old = OldSquares()
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert as_source(old) is old
    assert caught[0].filename == __file__  # Python shows it, since Treadle's own code is skipped
    with pytest.warns(DeprecationWarning, match=message):
        assert limited(old, 2).closed_loop
    assert is_closed_loop(old)


def test_a_source_with_the_old_name_is_never_prefetched():
    feed, source = Feed(), OldSquares()
    feed.open(source, Progress(), View())
    feed.take(1, Progress())
    feed.read_ahead(lambda: 1, lambda window: window, lambda: True)
    assert feed.position() is None and feed._prefetched is None
