"""Sources that users write."""

import numpy as np

from tests.data_batches import View
from treadle.core.progress import Progress
from treadle.data import as_source, groups, limited, zipped
from treadle.data.source import ReadRequest, Source, read_from
from treadle.run.prefetch import Feed


class Squares:
    """A source as a user writes one."""

    length, endless, batch_examples, inexact = 3, False, 1, None

    def read(self, epoch, start=0, *, seed=0, loop=None, ordered=False, position=None):
        self.asked = epoch, start, seed, loop, ordered, position
        return as_source([np.array([i * i]) for i in range(3)]).read(epoch, start)


class ClosedSquares(Squares):
    closed_loop = True


def test_a_source_of_a_user_gets_the_fields_of_the_request_as_arguments():
    source, loop = ClosedSquares(), View()
    assert isinstance(source, Source) and as_source(source) is source
    request = ReadRequest(1, 2, 3, loop, ordered=True, position={"at": 4})
    assert read_from(source, request).take(5).batches.tolist() == [[4]]
    assert source.asked == (1, 2, 3, loop, True, {"at": 4})
    assert read_from(limited(source, 2), ReadRequest(0)).take(5).batches.tolist() == [[0], [1]]
    assert source.asked == (0, 0, 0, None, False, None)
    assert groups(source, 1).closed_loop and zipped(source, source).closed_loop


def test_a_closed_loop_source_of_a_user_is_never_prefetched():
    feed, source = Feed(), ClosedSquares()
    feed.open(source, Progress(), View())
    feed.take(1, Progress())
    feed.read_ahead(lambda: 1, lambda window: window, lambda: True)
    assert feed.position() is None and feed._prefetched is None
