import hashlib
import re
import sys
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
from executions import some

from treadle.data.order import GOLDEN, MASK, MULTIPLIERS, ROUNDS, Permutation, hashed, mixed

# Published: whoever changes the order of data changes these, and every recorded run with them.
PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
VECTORS = {
    (int(size), int(seed), int(epoch)): [int(item) for item in items.split(", ")]
    for size, seed, epoch, items in re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d, ]+) \|$", PAGE, re.MULTILINE
    )
}
HASHES = {
    (0,): 0xD300120A5EA35CAC,
    (0, 0): 0x37121CA7183301B2,
    (0, 1): 0xEED565A1979955B6,
    (1, 0): 0xC5427374703523AD,
    (2**64 - 1, 3): 0xE7D03E5CD600104F,
}


def whole(size, seed=0, epoch=0):
    return Permutation(size, seed, epoch)(np.arange(size))


def by_the_book(position, size, seed, epoch):
    """The same in plain integers, one position at a time."""
    root = isqrt(size - 1) + 1
    even = root + root % 2
    left = min(range(even, even + root // 4 + 1, 2)[:64], key=lambda left: -size % left)
    right = -(-size // left)
    while True:
        b, a = divmod(position, left)
        for i in range(ROUNDS):
            key = mixed((hashed(seed, epoch) + (i + 1) * GOLDEN) & MASK)
            h = ((a if i % 2 else b) ^ key) * MULTIPLIERS[0] & MASK
            h = ((h ^ h >> 32) * MULTIPLIERS[1] & MASK) >> 32
            if i % 2:
                b = (b + (h * right >> 32)) % right
            else:
                a = (a + (h * left >> 32)) % left
        position = a + left * b
        if position < size:
            return position


def chi_square(counts):
    """Return how many standard deviations a chi-square statistic of equal counts is off."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("size, seed, epoch", VECTORS)
def test_order_never_changes(size, seed, epoch):
    expected = VECTORS[size, seed, epoch]
    found = Permutation(size, seed, epoch)(np.arange(len(expected)))
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_whole_order_never_changes():
    (size, seed, epoch, first, told) = re.search(
        r"Of (\d+) examples with seed (\d+), epoch (\d+) begins with (\d+),.*?`([0-9a-f]{64})`",
        PAGE,
        re.DOTALL,
    ).groups()
    order = Permutation(int(size), int(seed), int(epoch))(np.arange(int(size)))
    assert order[0] == int(first)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == told
    assert len(VECTORS) == 8


def test_hash_never_changes():
    assert {numbers: hashed(*numbers) for numbers in HASHES} == HASHES


def test_mixing_is_splitmix64():
    # The first outputs of https://prng.di.unimi.it/splitmix64.c from the state 1234567.
    outputs = [mixed(1234567 + i * GOLDEN & MASK) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("size", [1, 2, 3, 9, 50, 257, 10_007, 2**33 + 1, 2**62])
def test_order_is_that_of_plain_integers(size):
    positions = np.unique(np.linspace(0, size - 1, 20, dtype=np.int64))
    found = Permutation(size, 11, 5)(positions)
    assert found.tolist() == [by_the_book(int(p), size, 11, 5) for p in positions]


def test_every_small_size_is_a_permutation():
    for size in range(1, 301):
        assert np.array_equal(np.sort(whole(size, seed=size)), np.arange(size)), size


@pytest.mark.parametrize("size", [1_000, 4_096, 65_537, 60_000, 1_000_003])
def test_large_sizes_are_permutations(size):
    assert np.array_equal(np.sort(whole(size, 3, 4)), np.arange(size))


def test_positions_stand_alone_and_keep_their_shape():
    expected = whole(1_000, 1, 2)
    order = Permutation(1_000, 1, 2)
    backwards = np.arange(1_000)[::-1].reshape(10, 100)
    assert np.array_equal(order(backwards), expected[backwards])
    assert [int(order(np.array(p))) for p in (0, 1, 999)] == expected[[0, 1, 999]].tolist()
    assert order(np.empty((0, 4), np.int64)).shape == (0, 4)


def test_neighbouring_seeds_and_epochs_share_nothing():
    size = 2_000
    keys = [(seed, epoch) for seed in range(8) for epoch in range(8)]
    orders = np.stack([whole(size, *key) for key in keys])
    for i in range(len(keys)):
        # Two unrelated orders agree in one place on average; distances between them are uniform.
        agreements = (orders[i + 1 :] == orders[i]).sum(axis=1)
        assert (agreements < 10).all()
    distances = (orders[1:] - orders[:-1]) % size
    assert abs(chi_square(np.bincount(distances.ravel() // 20, minlength=100))) < 5


@pytest.mark.parametrize("size", some([5, 16]))
def test_items_and_their_neighbours_are_uniform(size):
    places, steps = np.zeros((size, size)), np.zeros(size)
    for seed in range(3_000):
        order = whole(size, seed, 7)
        places[np.arange(size), order] += 1
        np.add.at(steps, np.diff(order) % size, 1)
    assert abs(chi_square(places)) < 5
    assert steps[0] == 0
    assert abs(chi_square(steps[1:])) < 5


def test_few_items_come_in_all_orders():
    counts = {}
    for seed in range(4_800):
        order = tuple(whole(4, seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert abs(chi_square(np.array(list(counts.values())))) < 5


def test_no_position_costs_a_call_of_python():
    order = Permutation(60_000, 1, 2)

    def calls(positions):
        found = []
        sys.setprofile(lambda frame, event, argument: found.append(event))
        try:
            order(positions)
        finally:
            sys.setprofile(None)
        return len(found)

    # Equal here; some arrays need more rounds, each of which takes all remaining positions at once.
    assert calls(np.arange(2_048)) <= 2 * calls(np.arange(64))
