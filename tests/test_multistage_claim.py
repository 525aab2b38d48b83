"""The multistage theorem: its rate, its condition, its sound form."""

import itertools

import numpy as np
import pytest
from tombs_multistage import (
    multistage_delta,
    multistage_guarantee,
    multistage_rates,
    tombs_multistage,
)

import jaxdp_episodic as jde
from jaxdp_episodic.bounds import Gaussian, delta_poisson_subsampled

# The tree of the paper's Example 3.1: 2 primary units, 3 and 2 secondary ones.
EXAMPLE = [[4, 2, 3], [4, 5]]


def sampling(*stages):
    names = ("task", "class", "example")[-len(stages) :]
    return jde.MultistageSampling(
        *(
            jde.WithoutReplacement(name, size=n, population=total)
            for name, (n, total) in zip(names, stages, strict=True)
        )
    )


COUNTEREXAMPLE = jde.MultistageSampling(
    jde.WithoutReplacement("task", size=1, population=10),
    jde.WithoutReplacement("example", size=20, population=40),
)


def test_rates_of_the_papers_example():
    draw = jde.MultistageSampling(
        *(jde.WithoutReplacement(n, size=1) for n in ("task", "class", "example"))
    )
    tree = jde.Population.from_sizes(EXAMPLE)
    rates = multistage_rates(draw, clip_unit="task", population=tree)
    expected = {1 / 24, 1 / 12, 1 / 18, 1 / 16, 1 / 20}
    assert set(np.round(rates.inner, 12)) == set(np.round(list(expected), 12))
    assert np.all(rates.outer == 1)
    # The printed denominator lacks the two primary units: 1/6 for the unit of two.
    assert rates.inner.max() == pytest.approx(1 / 12)


def test_refuses_the_counterexample():
    with pytest.raises(NotImplementedError) as error:
        tombs_multistage(
            Gaussian(1.0), sampling=COUNTEREXAMPLE, clip_unit="example", epsilon=0.5
        )
    for word in ("'task'", "other members", "multistage_delta", "GaussianStep"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("eps", "claim", "truth"), [(0.5, 2.19e-4, 7.994e-3), (1.0, 1.19e-5, 2.887e-3)]
)
def test_counterexample_figures(eps, claim, truth):
    product = delta_poisson_subsampled(
        Gaussian(1.0), sampling_probability=1 / 20, epsilon=eps
    )
    assert product == pytest.approx(claim, rel=5e-3)
    sound = multistage_delta(
        Gaussian(1.0), sampling=COUNTEREXAMPLE, clip_unit="example", epsilon=eps
    )
    assert sound == pytest.approx(truth, rel=1e-3)
    step = jde.GaussianStep(
        COUNTEREXAMPLE,
        noise_multiplier=2.0,
        clip_unit="example",
        neighboring_relation="replace_one",
    )
    assert jde.privacy_profile(step, epsilon=eps) == pytest.approx(sound, rel=1e-9)


def test_equal_where_the_theorem_holds():
    draw = sampling((2, 10), (3, 5), (4, 20))
    for unit in ("task", "step"):
        arguments = {"sampling": draw, "clip_unit": unit, "epsilon": np.array([0.1, 1])}
        one = tombs_multistage(Gaussian(1.0), **arguments)
        assert np.array_equal(one, multistage_delta(Gaussian(1.0), **arguments))
        expected = delta_poisson_subsampled(
            Gaussian(1.0), sampling_probability=0.024, epsilon=np.array([0.1, 1])
        )
        np.testing.assert_allclose(one, expected, rtol=1e-12)
    # All tasks drawn: clipping below them is covered too.
    everything = sampling((10, 10), (3, 5), (4, 20))
    value = tombs_multistage(
        Gaussian(1.0), sampling=everything, clip_unit="class", epsilon=0.5
    )
    assert value > 0


def test_covers_enumerated_trees():
    """Random small trees, adversarial and random contributions, both relations."""
    g = np.array([1.0, 1.2, 2.0, 5.0])
    rng = np.random.default_rng(3)
    tightest, checked = 0.0, 0
    designs = itertools.islice(_fixed_size_designs(rng), 60)
    for design, draw, unit in designs:
        sigma = 1 / design.shift
        bound = multistage_delta(
            Gaussian(sigma / 2), sampling=draw, clip_unit=unit, epsilon=np.log(g)
        )
        for dist in design.pairs:
            for top, bottom in (dist, dist[::-1]):
                true = design.hockey_stick(top, bottom, g)
                assert np.all(true <= bound * (1 + 1e-9) + 1e-13)
                ratio = np.where(bound > 1e-9, true / np.maximum(bound, 1e-9), 0)
                tightest = max(tightest, ratio.max())
                checked += 1
    assert checked >= 200
    assert tightest > 0.5


class _Enumerated:
    """Two-level tree with equal units: every draw, contributions in the interval."""

    def __init__(self, rng, tasks, task_size, examples, size, clip_task, shift):
        self.shift = shift
        self.pairs = []
        for replace in (False, True):
            for trial in range(2):
                self.pairs.append(
                    self._pair(
                        rng, tasks, task_size, examples, size, clip_task, replace, trial
                    )
                )

    def _pair(self, rng, tasks, task_size, examples, size, clip_task, replace, trial):
        # Values of examples; the protected one is example 0 of task 0.
        value = rng.choice([-1.0, 0.0, 1.0], (tasks, examples))
        if trial:
            value[0, 1:], value[1:] = 1.0, -1.0
        value[0, 0] = 1.0
        other = value.copy()
        other[0, 0] = -1.0
        sums = []
        for table, gone in ((value, False), (other, not replace)):
            outcomes: dict[float, float] = {}
            groups = [
                list(itertools.combinations(range(examples), size))
                for _ in range(tasks)
            ]
            if gone:
                present = [e for e in range(examples) if e > 0]
                groups[0] = list(
                    itertools.combinations(present, min(size, len(present)))
                )
            drawn_tasks = list(itertools.combinations(range(tasks), task_size))
            for chosen in drawn_tasks:
                options = [groups[t] for t in chosen]
                for draws in itertools.product(*options):
                    parts = [
                        sum(table[t, e] for e in d)
                        for t, d in zip(chosen, draws, strict=True)
                    ]
                    if clip_task:
                        parts = [float(np.clip(p, -1, 1)) for p in parts]
                    chance = 1 / len(drawn_tasks)
                    for o in options:
                        chance /= len(o)
                    total = float(sum(parts))
                    outcomes[total] = outcomes.get(total, 0.0) + chance
            sums.append(outcomes)
        return tuple(sums)

    def hockey_stick(self, top, bottom, g):
        reach = self.shift * max(map(abs, (*top, *bottom))) + 9
        x = np.linspace(-reach, reach, 12_001)
        densities = []
        for dist in (top, bottom):
            total = np.zeros_like(x)
            for mean, weight in dist.items():
                z = x - self.shift * mean
                total += weight * np.exp(-0.5 * z * z)
            densities.append(total / np.sqrt(2 * np.pi))
        gap = np.maximum(densities[0] - g[:, None] * densities[1], 0)
        # The rectangle rule is off by the square of the step at the kink only.
        return gap.sum(axis=1) * (x[1] - x[0]) * (1 - 1e-5)


def _fixed_size_designs(rng):
    while True:
        tasks, examples = int(rng.integers(2, 4)), int(rng.integers(2, 5))
        task_size, size = int(rng.integers(1, tasks)), int(rng.integers(1, examples))
        clip_task = bool(rng.integers(2))
        # The first task of each pair may shrink by one: still enough to draw from.
        if size >= examples:
            continue
        shift = float(rng.uniform(0.3, 2.5))
        design = _Enumerated(rng, tasks, task_size, examples, size, clip_task, shift)
        draw = sampling((task_size, tasks), (size, examples))
        yield design, draw, draw.level_names[0 if clip_task else 1]


def test_product_rate_is_caught_by_enumeration():
    """The enumeration above finds the naive claim false when examples are clipped."""
    g = np.array([5.0, 20.0])
    rng = np.random.default_rng(5)
    design = _Enumerated(rng, 4, 1, 8, 4, False, 1.0)
    naive = delta_poisson_subsampled(
        Gaussian(0.5), sampling_probability=1 / 8, epsilon=np.log(g)
    )
    worst = np.max(
        [
            design.hockey_stick(a, b, g)
            for pair in design.pairs
            for a, b in (pair, pair[::-1])
        ],
        axis=0,
    )
    assert np.any(worst > 2 * naive)


def test_guarantee_of_a_tree_takes_the_worst_of_both():
    draw = jde.MultistageSampling(
        *(jde.WithoutReplacement(n, size=1) for n in ("task", "class", "example"))
    )
    tree = jde.Population.from_sizes(EXAMPLE)
    eps, delta = multistage_guarantee(
        1.0, 1e-5, sampling=draw, clip_unit="example", population=tree
    )
    assert eps == pytest.approx(np.log1p((np.e - 1) / 2), rel=1e-12)
    assert delta == pytest.approx(1e-5 / 12, rel=1e-12)
    at_rate_1 = sampling((5, 5), (4, 4))
    assert multistage_guarantee(
        2.0, 0.25, sampling=at_rate_1, clip_unit="class"
    ) == pytest.approx((2.0, 0.25))


def test_poisson_at_the_clipped_stage_is_refused():
    draw = jde.MultistageSampling(
        jde.Poisson("task", sampling_probability=0.1),
        jde.WithoutReplacement("example", size=2, population=20),
    )
    with pytest.raises(NotImplementedError, match="Poisson"):
        tombs_multistage(Gaussian(1.0), sampling=draw, clip_unit="task", epsilon=1.0)
    value = multistage_delta(
        Gaussian(1.0), sampling=draw, clip_unit="example", epsilon=1.0
    )
    assert value > 0
    with pytest.raises(ValueError, match="clip_unit"):
        multistage_delta(Gaussian(1.0), sampling=draw, clip_unit="word", epsilon=1.0)
