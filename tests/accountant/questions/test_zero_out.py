"""Zero-out through the public API: enumerated trees, moments, composed runs."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.gaussian_mixtures import ZeroedGaussianLoss
from jaxdp_episodic.accountant.losses.independent_episodes import ZeroedEpisodesLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
from oracles import adversary, moments, trees, zero_out

G = np.exp(adversary.LOG_GS)
SOUND = 1 + 1e-9
COIN = jde.Poisson("task", sampling_probability=0.25, population=12)
HAND = jde.WithoutReplacement("task", size=3, population=12)
SOME = jde.WithoutReplacement("example", size=2, population=8)
EACH = jde.Poisson("example", sampling_probability=0.125, population=4)


def step(*levels, clip="task", unit=None, noise=1.25, relation="zero_out"):
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=noise,
        clip_unit=clip,
        privacy_unit=unit,
        neighboring_relation=relation,
    )


def grouped(unit, **drawn):
    return jde.GaussianStep(
        jde.GroupedClasses(
            num_classes=20,
            ways=5,
            examples=jde.WithoutReplacement("example", size=4, population=16),
            **drawn,
        ),
        noise_multiplier=1.25,
        privacy_unit=unit,
        neighboring_relation="zero_out",
    )


HALF = jde.Poisson("episode", sampling_probability=0.5)
ONE = jde.WithoutReplacement("episode", size=1)
TEN = jde.WithoutReplacement("class", size=10)
# step, then outer rate, p, r, sensitivity; r is None for the sampled pair
ROWS = [
    (step(COIN, SOME), 1, 0.25, 0.25, 1),
    (step(COIN, SOME, clip="example"), 0.25, 1, 0.25, 1),
    (step(COIN, EACH, clip="example"), 0.25, 0.125, None, 1),
    (step(COIN, SOME, clip="step"), 1, 1, 1 / 16, 1),
    (step(HAND, SOME), 1, 1, 1 / 16, 1),
    (step(HAND, SOME, unit="task"), 1, 1, 0.25, 1),
    (step(COIN, SOME, unit="task"), 1, 0.25, None, 1),
    (step(COIN, SOME, clip="example", unit="task"), 1, 0.25, None, 2),
    (step(HAND, EACH, clip="example", unit="task"), 1, 1, 0.25, 4),
    (grouped("example", episodes=HALF), 1, 0.5, 0.25, 1),
    (grouped("class", episodes=HALF), 1, 0.5, None, 1),
    (grouped("example", episodes=ONE), 1, 1, 1 / 16, 1),
    (grouped("example", classes=TEN), 1, 1, 0.125, 1),
    (grouped("class", classes=TEN), 1, 1, 0.5, 1),
]


@pytest.mark.parametrize("asked, outer, p, r, sensitivity", ROWS)
def test_rows(asked, outer, p, r, sensitivity):
    pair = dominating_pair(asked)
    kind = SampledGaussianLoss if r is None else ZeroedGaussianLoss
    assert type(pair) is kind
    fields = [float(np.squeeze(field)) for field in pair.fields]
    assert fields == [outer, p, *([] if r is None else [r]), sensitivity / 1.25]


def test_row_of_independent_episodes():
    asked = jde.GaussianStep(
        jde.IndependentEpisodes(jde.MultistageSampling(HAND, SOME), num_episodes=3),
        noise_multiplier=2,
        neighboring_relation="zero_out",
    )
    pair = dominating_pair(asked)
    assert type(pair) is ZeroedEpisodesLoss
    assert [float(np.squeeze(field)) for field in pair.fields[:4]] == [
        1,
        1 / 16,
        0.5,
        3,
    ]


# --- Enumerated trees ---


def slots_of(root, depth):
    counts, units = [], [root]
    for _ in range(depth):
        counts.append(np.array([len(unit[1]) for unit in units], np.int64))
        units = [child for unit in units for child in unit[1]]
    return jde.Population(tuple(counts))


def claim_of(design):
    """What the library says of a tree of slots."""
    depth, levels = len(design.schemes), []
    for j, scheme in enumerate(design.schemes):
        units = trees.clip_units(design.root, j)
        if scheme.kind == "poisson":
            most = max([1, *(len(unit[1]) for unit in units)])
            levels.append(
                jde.Poisson(f"l{j}", sampling_probability=scheme.value, population=most)
            )
        else:
            levels.append(jde.WithoutReplacement(f"l{j}", size=int(scheme.value)))
    asked = jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=1 / design.s,
        clip_unit="step" if design.clip_level == 0 else f"l{design.clip_level - 1}",
        privacy_unit=f"l{len(design.path) - 1}",
        neighboring_relation="zero_out",
        population=slots_of(design.root, depth),
    )
    return tuple(
        jde.privacy_profile(asked, adversary.LOG_GS, direction=direction)
        for direction in ("forward", "backward")
    )


def random_design(rng, i):
    levels = 1 + i % 3
    while True:
        design = adversary.random_design(rng, num_levels=levels, max_units=3)
        places = adversary.paths(design.root, int(rng.integers(1, levels + 1)))
        if not places:
            continue
        design = design._replace(
            clip_level=int(rng.integers(0, levels + 1)),
            path=places[int(rng.integers(len(places)))],
            relation="zero_out",
        )
        if len(zero_out.all_contents(design)) <= 60:
            return design


def check_trees(seed, count):
    rng = np.random.default_rng(seed)
    worst = 0.0
    for i in range(count):
        design = random_design(rng, i)
        divergences, claim = zero_out.enumerated(design), claim_of(design)
        keys = zero_out.all_contents(design)
        for table in (
            *zero_out.worst_tables(design).values(),
            adversary.random_table(rng, keys),
        ):
            worst = max(worst, adversary.worst_ratio(divergences(table, G), claim))
    assert worst <= SOUND
    return worst


def test_no_random_tree_exceeds_its_claim():
    assert check_trees(21, 80) > 0.99  # some reach it


@pytest.mark.slow
def test_no_random_tree_of_many_exceeds_its_claim():
    check_trees(22, 1_500)


# --- Moments and composed runs ---


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rdp_is_the_moment(direction):
    for asked, outer, p, r, _ in ROWS[:2]:
        for alpha in (1.5, 3.0, 20.0):
            log_moment = moments.fine_zeroed(p, r, 0.8, alpha, direction=direction)
            true = moments.rdp_from_log_moment(log_moment, alpha, r_out=outer)
            found = jde.rdp(asked, [alpha], direction=direction)
            assert float(np.squeeze(found)) == pytest.approx(true, rel=1e-10)


def composed_delta(p, r, s, num_steps, epsilon, *, backward, cells=2**19, width=12.0):
    """delta by a convolution power on a lattice, losses rounded to the nearest."""
    upper, lower = ZeroedGaussianLoss(*map(np.float64, (1, p, r, s))).both_halves()
    step_ = width / cells
    mass = np.zeros(2 * cells)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    edges = np.concatenate(
        [np.geomspace(1e-12, 0.01, 400), np.arange(0.0102, 20, 1e-3)]
    )
    half = np.diff(edges)[:, None] / 2
    at = (edges[:-1, None] + half * (1 + nodes)).ravel()
    weight = (half * weights).ravel()
    gain, log_gained = upper.log_parts(at + s / 2)
    lost, log_lost = lower.log_parts(at - s / 2)
    for loss, log_q in ((gain, log_gained), (-lost, log_lost + lost)):
        density = np.exp(log_q + (0 if backward else loss)) * weight
        place = (-loss if backward else loss) / step_
        low = np.floor(np.clip(place, -cells + 1, cells - 2)).astype(int)
        share = np.clip(place - low, 0, 1)
        np.add.at(mass, low % (2 * cells), density * (1 - share))
        np.add.at(mass, (low + 1) % (2 * cells), density * share)
    mass[0] += 1 - mass.sum()  # the atom at 0
    total = np.fft.irfft(np.fft.rfft(mass) ** num_steps, 2 * cells)
    losses = step_ * ((np.arange(2 * cells) + cells) % (2 * cells) - cells)
    return np.sum(np.where(losses > epsilon, -np.expm1(epsilon - losses) * total, 0.0))


@pytest.mark.parametrize(
    "asked, p, r, num_steps, epsilon",
    [
        pytest.param(step(COIN, SOME), 0.25, 0.25, 8, 0.9, marks=pytest.mark.slow),
        (step(HAND, SOME), 1.0, 1 / 16, 40, 1.5),
        pytest.param(step(COIN, SOME), 0.25, 0.25, 200, 4.0, marks=pytest.mark.slow),
    ],
)
def test_exact_against_a_convolution(asked, p, r, num_steps, epsilon):
    true = max(
        composed_delta(p, r, 0.8, num_steps, epsilon, backward=back)
        for back in (False, True)
    )
    found = jde.delta(asked, epsilon=epsilon, num_steps=num_steps)
    assert float(found) == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize(
    "first, num_steps",
    [
        pytest.param(first, steps, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, first in enumerate((COIN, HAND))
        for j, steps in enumerate((1, 2, 30, 1_000, 1_000_000))
    ],
)
def test_exact_lies_in_the_certified_interval(first, num_steps):
    asked = step(first, SOME, noise=1.25 * max(1.0, num_steps / 100) ** 0.5)
    found = float(jde.epsilon(asked, delta=1e-6, num_steps=num_steps))
    low, high = jde.epsilon_interval(asked, delta=1e-6, num_steps=num_steps)
    assert low * (1 - 1e-6) <= found <= high * (1 + 1e-6)
    assert high - low <= 0.02 * high + 2e-4


def test_it_costs_less_than_the_other_relations():
    for first in (COIN, HAND):
        costs = [
            float(
                jde.epsilon(step(first, SOME, relation=name), delta=1e-6, num_steps=20)
            )
            for name in ("zero_out", "add_remove", "replace_one")
        ]
        assert costs[0] < min(costs[1:])


def test_units_with_fewer_slots_than_a_draw_give_them_all():
    asked = step(HAND, jde.WithoutReplacement("example", size=9, population=8))
    assert asked.small_units == "keep"
    assert float(np.squeeze(dominating_pair(asked).inner_rate)) == 0.25
