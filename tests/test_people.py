"""People in many units: the claims of the theorems, and every draw of small designs.

Nothing of the library is used here: these tests say that the theorems hold.
`test_people_faults.py` makes the tempting claims instead, and finds them exceeded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from oracles import people, people_designs, people_draws, people_epochs

REFERENCE = json.loads((Path(__file__).parent / "people.json").read_text())
SETTINGS = {
    f"{s['design']}/{s['theorem']}/{s['relation']}/{number}": s
    for number, s in enumerate(REFERENCE["settings"])
}
G = np.exp([0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])


def _claim(theorem: str, relation: str, params: dict) -> people.Claim:
    """The theorem's claim in a setting of the reference."""
    if "ways" in params and "B" not in params:
        return _grouped_claim(theorem, relation, params)
    match theorem:
        case "M":
            return people.theorem_m(_units(params["m"], params["p"]), relation)
        case "2":
            law = _units(params["m"], params["r"])
            fixed = relation == "add_remove"
            return people.theorem_2(law, params["p"], relation, fixed_classes=fixed)
        case "A":
            m, p, r = (params[name] for name in ("m", "p", "r"))
            return people.theorem_a_equal(m, p, r, relation)
        case "AB":
            return people.theorem_ab(params["m"], params["p"], params["r"], 1.0)
        case "1, examples removed":
            law = people.without_replacement(
                [0.0] * 4 + [1.0], params["N"], params["n"]
            )
            return people.removed_examples(law[: params["n"] + 1])
        case "1" if "B" in params:
            rho = people.reached(params["population"], params["k"], params["size"])
            of = params["num_classes"], params["m"], params["ways"]
            return people.theorem_1(
                _units(params["B"], people.chosen_classes(*of, rho)), relation
            )
        case "1":
            law = _units(params["m"], params["r"])
            law = people.without_replacement(law, params["N"], params["n"])
            return people.theorem_1(law, relation)
        case "3":
            return people.theorem_3(params["law_J"], relation)
        case "6":
            law = [1 - params["r"], params["r"]]
            return people.theorem_2(law, params["p"], relation)
    raise ValueError(f"no claim for theorem {theorem}")


def _grouped_claim(theorem: str, relation: str, params: dict) -> people.Claim:
    num, ways, hers, p = (params[name] for name in ("num_classes", "ways", "m", "p"))
    rho = people.reached(params["population"], params["k"], params["size"])
    groups = num // ways
    reach = 1 - (1 - rho) ** ways
    if theorem == "A":
        return people.theorem_a_equal(groups, p, reach, relation)
    if theorem == "M, episodes":
        return people.theorem_m(_units(groups, p * reach), relation)
    worst = (
        _units(groups, reach) if hers == num else people.even_groups(groups, hers, rho)
    )
    law = worst
    if theorem == "2, average partition":
        law = people.average_groups(num, ways, hers, rho)
    fixed = relation == "add_remove"
    return people.theorem_2(law, p, relation, cover=1 - worst[0], fixed_classes=fixed)


def _units(number: int, rate: float) -> list[float]:
    return people.poisson_binomial([rate] * number)


# --- The reference values ---


@pytest.mark.parametrize(
    "name",
    [
        # A second each.
        pytest.param(name, marks=pytest.mark.slow) if "everybody" in name else name
        for name in SETTINGS
    ],
)
def test_claims_are_the_reference_values_of_one_step(name):
    setting = SETTINGS[name]
    rows = [row for row in setting["rows"] if row[0] == 1]
    assert rows
    params, relation = setting["params"], setting["relation"]
    s, g = 1 / params["noise_multiplier"], np.exp([row[2] for row in rows])
    if setting["theorem"] == "5a":
        design = people_epochs.epoch(params["t"], {(True,) * params["m"]: 1.0})
        axis = people_epochs.grid(design, s, 0.05)
        actual, tolerance = people_epochs.claim(design, relation, s, g, axis), 1e-3
    else:
        claim = _claim(setting["theorem"], relation, params)
        actual, tolerance = people.profiles(claim, s, g), 1e-8
    for i, (_, direction, _, _, value) in enumerate(rows):
        found = actual[direction == "bwd"][i]
        assert found == pytest.approx(value, rel=tolerance, abs=1e-14)


# Profiles of small losses are dear; these are cheap.
FAST_RUNS = ("blocks of people/6/zero_out/20", "units by coins/AB/zero_out/38")


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST_RUNS else pytest.param(name, marks=pytest.mark.slow)
        for name, setting in SETTINGS.items()
        if "Omniglot" not in name and setting["theorem"] != "5a"
    ],
)
def test_claims_are_the_reference_values_of_a_run(name):
    setting = SETTINGS[name]
    claim = _claim(setting["theorem"], setting["relation"], setting["params"])
    for steps, direction, epsilon, delta, value in setting["rows"][-2:]:
        epsilon, delta = (value, delta) if epsilon is None else (epsilon, value)
        found = people.composed(
            claim,
            1 / setting["params"]["noise_multiplier"],
            steps,
            np.array([epsilon]),
            forward=direction == "fwd",
        )
        # The lattice is coarse; 1e-2 of delta is some 1e-3 of epsilon.
        assert found[0] == pytest.approx(delta, rel=1e-2)


def test_laws_are_the_reference_laws():
    laws = REFERENCE["laws"]
    worst = people.even_groups(4, 12, 0.1)
    np.testing.assert_allclose(worst, laws["grouped_worst(23,5,12,0.1)"], rtol=1e-12)
    mean = people.average_groups(23, 5, 12, 0.1)
    np.testing.assert_allclose(mean, laws["grouped_mean(23,5,12,0.1)"], rtol=1e-12)
    for hers in (12, 20):
        rate = people.chosen_classes(20, hers, 5, 0.1)
        assert rate == pytest.approx(laws[f"eta(20,5,{hers},0.1)"], rel=1e-12)
    rate = people.reached(20, 4, 2)
    assert rate == pytest.approx(laws["reach_class(k=4,size=2,population=20)"])


# --- Every draw of small designs ---

ROUNDING = 1 + 1e-6
# Where a claim is less, the largest value found must be below twice this.
FLOOR = 1e-7


def _worst_ratio(case, rng, lattice=people_draws.LINE, starts=3) -> float:
    """The largest true divergence found, over the least claim."""
    claims = people.smallest(case.claims, case.s, G)
    aims = np.exp(rng.choice([0.1, 0.25, 0.5, 1.0, 2.0], 2 if starts > 2 else 1))
    found = people_draws.attained(
        rng, case.release, case.s, G, aims=aims, lattice=lattice, starts=starts
    )
    return max(_ratio(*pair) for pair in zip(found, claims, strict=True))


def _ratio(found: np.ndarray, claimed: np.ndarray) -> float:
    judged = claimed > FLOOR
    if np.any(found[~judged] > 2 * FLOOR):
        return np.inf
    return float(np.max(found[judged] / claimed[judged], initial=0.0))


@pytest.mark.parametrize("family", people_designs.FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_draw_exceeds_the_claims(family, seed):
    rng = np.random.default_rng([seed, *family.encode()])
    case = people_designs.random_case(rng, family)
    assert _worst_ratio(case, rng) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "plane"), [(0, False), (1, False), (2, True)])
def test_no_draw_of_many_exceeds_the_claims_and_most_reach_them(seed, plane):
    rng = np.random.default_rng(seed)
    lattice = people_draws.PLANE if plane else people_draws.LINE
    ratios = [
        _worst_ratio(
            people_designs.random_case(rng), rng, lattice, starts=2 if plane else 5
        )
        for _ in range(60 if plane else 250)
    ]
    assert max(ratios) <= ROUNDING
    # What is near: some theorems give an exchange away, and are not reached.
    assert np.mean(np.array(ratios) > 0.99) > 0.7


# --- Epochs ---


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("steps", "rates"), [(2, (1.0, 1.0)), (2, (1.0, 0.3)), (2, (0.5, 0.5, 0.5))]
)
def test_no_reaction_within_an_epoch_exceeds_the_claim(relation, steps, rates):
    rng = np.random.default_rng(0)
    design = people_epochs.epoch(steps, people_epochs.independent_contents(rates))
    axis = people_epochs.grid(design, 1.2, 0.1)
    claims = people_epochs.claim(design, relation, 1.2, G, axis)
    for sign in (1, -1):
        tables = people_epochs.attack(
            rng, design, relation, 1.2, np.exp(0.5), sign=sign
        )
        found = people_epochs.masses(design, tables, 1.2, G, axis)
        assert max(map(_ratio, found, claims)) <= 1 + 2e-3  # the grid's error


@pytest.mark.parametrize("balls", [2, 3])
def test_epochs_have_the_reference_bounds(balls):
    """The exact pair, all balls in one bin, and the noise split among the balls."""
    rows = [row for row in REFERENCE["epochs"] if row["m"] == balls]
    rows = [row for row in rows if row["noise_multiplier"] == 1.0]
    epsilons = np.array([row["epsilon"] for row in rows])

    def claimed(number: int, s: float, g: np.ndarray):
        design = people_epochs.epoch(2, {(True,) * number: 1.0})
        axis = people_epochs.grid(design, s, 0.1)
        return people_epochs.claim(design, "zero_out", s, g, axis)

    exact = claimed(balls, 1.0, np.exp(epsilons))
    one_bin = claimed(1, float(balls), np.exp(epsilons))
    losses = 0.05 * np.arange(1 + 20 * 12)
    high, low = claimed(1, balls**0.5, np.exp(losses))
    pair = np.concatenate([(1 - np.exp(-losses) * (1 - low))[:0:-1], high])
    split = people.chords(pair, 0.05, balls, epsilons)
    for name, values in (
        ("exact_fwd", exact[0]),
        ("exact_bwd", exact[1]),
        ("same_bin_bound_fwd", one_bin[0]),
        ("same_bin_bound_bwd", one_bin[1]),
        ("split_noise_bound", split),
    ):
        np.testing.assert_allclose(values, [row[name] for row in rows], rtol=5e-3)
    assert np.all(np.maximum(*exact) < split)
    assert np.all(np.maximum(*exact) < np.maximum(*one_bin))
