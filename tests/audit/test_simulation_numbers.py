import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxdp_episodic.audit import simulation

MASK = 0xFFFFFFFF


def reference(state, number):
    """xoshiro128++ in whole numbers, as its authors' C code has it."""

    def rotated(x, k):
        return ((x << k) | (x >> (32 - k))) & MASK

    s, found = list(state), []
    for _ in range(number):
        found.append((rotated((s[0] + s[3]) & MASK, 7) + s[0]) & MASK)
        moved = (s[1] << 9) & MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= moved
        s[3] = rotated(s[3], 11)
    return found


def test_the_words_are_xoshiros():
    state = simulation.seeded(jax.random.key(3), 5)
    start = np.stack(state).T.tolist()
    words = []
    for _ in range(20):
        bits, state = simulation.next_bits(state)
        words.append(np.asarray(bits))
    found = np.stack(words).T.tolist()
    assert found == [reference(lane, 20) for lane in start]
    # The first word of the state (1, 2, 3, 4): (1 + 4) rotated by 7, plus 1.
    assert reference([1, 2, 3, 4], 1) == [641]


def test_the_numbers_are_normal():
    @jax.jit
    def draw(state):
        def body(state, _):
            pair, state = simulation.normal_pairs(state)
            return state, jnp.stack(pair)

        return jax.lax.scan(body, state, None, length=64)[1]

    numbers = np.asarray(
        draw(simulation.seeded(jax.random.key(0), 1 << 14)), np.float64
    )
    assert numbers.dtype == np.float64
    assert np.isfinite(numbers).all()
    flat = numbers.ravel()
    # Fixed key: each has a false-alarm rate of 1e-4 over keys.
    assert stats.kstest(flat[:200_000], "norm").pvalue > 1e-4
    for edge in (2.0, 3.0, 4.0):
        expected = flat.size * stats.norm.sf(edge)
        for count in (np.sum(flat > edge), np.sum(flat < -edge)):
            assert abs(count - expected) <= 4 * np.sqrt(expected)
    pairs = numbers.transpose(1, 0, 2).reshape(2, -1)
    assert abs(np.corrcoef(pairs)[0, 1]) <= 4 / np.sqrt(pairs.shape[1])
    later = numbers[:-1].ravel(), numbers[1:].ravel()
    assert abs(np.corrcoef(later)[0, 1]) <= 4 / np.sqrt(later[0].size)
