"""The encoder and decoder of correlated noise, and the memory that they need."""

import copy
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from jaxdp_episodic.accountant.numerics.band_coefficients import band_coefficients
from jaxdp_episodic.trainer.gradient import discrete_noise
from jaxdp_episodic.trainer.gradient.noise import BandMemory

# docs/correlated.md, computed by hand: integer coefficients (4, 3, 2), six steps of
# two numbers, and a memory that is cleared before the fourth.
SUMS = [[7, -2], [0, 5], [-3, 1], [4, 4], [1, -6], [2, 2]]
NOISE = [[1, 0], [-2, 3], [0, -1], [5, 2], [-4, 1], [0, 0]]
DECODED = {
    None: [
        [7.25, -2.0],
        [-0.6875, 5.75],
        [-2.609375, 0.1875],
        [5.30078125, 4.734375],
        [-1.1708984375, -5.89453125],
        [2.977783203125, 1.5537109375],
    ],
    3: [
        [7.25, -2.0],
        [-0.6875, 5.75],
        [-2.609375, 0.1875],
        [5.25, 4.5],
        [-0.9375, -6.125],
        [2.828125, 1.84375],
    ],
}


def memory_of(coefficients):
    """A memory with these integer coefficients, not multiplied by 256."""
    memory = BandMemory(coefficients, is_discrete=False)
    memory.coefficients = list(coefficients)
    return memory


@pytest.mark.parametrize("restart", DECODED)
def test_decoded_sums_equal_a_hand_computation(restart):
    memory = memory_of([4, 3, 2])
    for step, (sums, drawn) in enumerate(zip(SUMS, NOISE, strict=True)):
        if step == restart:
            memory.clear()
        found = memory.release([np.array(sums)], [np.array(drawn)])
        assert found[0].tolist() == DECODED[restart][step]


def decoded_exactly(k, sums, drawn):
    """The sum and the noise that C^-1 makes, in fractions."""
    found = []
    for number in drawn:
        past = zip(k[1:], reversed(found), strict=False)
        found.append((int(number) - sum(c * h for c, h in past)) / Fraction(k[0]))
    return [int(x) + e for x, e in zip(sums, found, strict=True)]


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("horizon", [3.0, math.inf])
def test_decoding_gives_the_sum_plus_decoded_noise(count, horizon):
    """Also for the largest sums and noise of a step."""
    memory = BandMemory(band_coefficients(count, 200, horizon), is_discrete=True)
    k = memory.coefficients
    assert k[0] == 256 and all(isinstance(one, int) for one in k)
    assert memory.norm**2 >= sum(one**2 for one in k) >= memory.weight**2
    rng = np.random.default_rng(0)
    largest = discrete_noise.MOST_UNITS * discrete_noise.GRID
    sums = rng.integers(-largest, largest, 60, endpoint=True)
    sums[:20] = largest
    drawn = np.rint(1e10 * rng.standard_normal(60)).astype(np.int64)
    wanted = decoded_exactly(k, sums, drawn)
    for step, exact in enumerate(wanted):
        (found,) = memory.release([sums[step : step + 1]], [drawn[step : step + 1]])
        # y is exact up to 2^53; the decoder rounds in units of the sums.
        assert abs(Fraction(float(found[0])) - exact) <= 1e-12 * largest


@pytest.mark.parametrize("is_discrete", [True, False])
def test_the_stated_rise_is_that_of_the_decoded_noise(is_discrete):
    memory = BandMemory(band_coefficients(5, 100, 30.0), is_discrete=is_discrete)
    rng = np.random.default_rng(1)
    for _ in range(2):
        memory.clear()
        for _ in range(12):
            rise = memory.rise
            drawn = 1e3 * memory.norm * rng.standard_normal(40_000)
            nothing = np.zeros(40_000, np.int64 if is_discrete else np.float64)
            (found,) = memory.release([nothing], [drawn])
            # Five standard errors.
            assert np.std(found) == pytest.approx(1e3 * rise, rel=0.02)


FORKED = """
import os
import numpy as np
from jaxdp_episodic.trainer.gradient.noise import BandMemory
memory, one = BandMemory([1.0, 0.5], is_discrete=True), [np.ones(1, np.int64)]
memory.release(one, one)
if os.fork():
    os.wait()
    memory.release(one, one)
else:
    memory.release(one, one)
"""


def test_a_noise_memory_cannot_be_copied_or_forked():
    memory = BandMemory([1.0, 0.5], is_discrete=True)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="sums without noise"):
            copied(memory)
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("RuntimeError: a run with bands must continue in") == 1


@pytest.mark.parametrize(
    ("coefficients", "said"),
    [
        ([], "first is > 0"),
        (["a"], "coefficients must be a number"),
        ([0.0, 1.0], "first is > 0"),
        ([0.5, 1.0], "outside the unit circle"),
        ([1.0, -0.3, -0.8], "outside the unit circle"),
        ([1.0, *[1.0] * 127], "sum below 128 times"),
    ],
)
def test_coefficients_that_cannot_be_decoded_are_refused(coefficients, said):
    with pytest.raises((TypeError, ValueError), match=said):
        BandMemory(coefficients, is_discrete=True)
