"""Examples with copies in several classes: epsilons against enumeration."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from tests.oracles.copies import Copies, attained


def step_of(
    design: Copies, noise: float, copies: int | None = None
) -> jde.GaussianStep:
    grouped = jde.GroupedClasses(
        num_classes=design.classes,
        ways=design.ways,
        episodes=jde.Poisson("episode", sampling_probability=float(design.rate)),
        examples=jde.WithoutReplacement(
            "example", size=design.drawn, population=design.size
        ),
    )
    number = design.copies if copies is None else copies
    return jde.GaussianStep(
        grouped,
        noise_multiplier=noise,
        neighboring_relation=design.relation,
        privacy_unit="original",
        people=jde.PersonBounds(examples=1, classes=number),
    )


def charged_by_each(step: jde.GaussianStep, epsilons: np.ndarray) -> np.ndarray:
    """(theorems, 2, E) deltas of one step, forward and backward."""
    found = [pair.log_tails(epsilons) for pair in dominating_pairs(step)]
    return np.exp([[profile for profile, _ in both] for both in found])


def random_design(rng: np.random.Generator) -> tuple[Copies, float]:
    copies = int(rng.choice([2, 3, 4]))
    classes = copies * int(rng.integers(1, 4))
    size = int(rng.integers(2, 9))
    return Copies(
        classes,
        int(rng.integers(1, classes + 1)),
        Fraction(int(rng.integers(1, 11)), 10),
        int(rng.integers(1, size + 1)),
        size,
        copies,
        str(rng.choice(["zero_out", "add_remove", "replace_one"])),
    ), float(rng.uniform(0.4, 3.0))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.few(1)
def test_no_theorem_is_below_the_truth(seed):
    """Each theorem by itself, in both directions, for 200 designs.

    The smallest ratio is close to 1, and the planted claim, the cost of one copy, is
    exceeded.
    """
    rng = np.random.default_rng(seed)
    ratios, one_copy = [], []
    epsilons = np.array([0.0, 0.2, 1.0, 2.5])
    for _ in range(10):
        design, noise = random_design(rng)
        true = np.stack([attained(design, noise, math.exp(e)) for e in epsilons], 1)
        charged = charged_by_each(step_of(design, noise), epsilons)
        assert np.all(charged >= true * (1 - 1e-9) - 1e-12), (design, noise)
        ratios.append(np.max(true / np.maximum(charged.min(axis=0), 1e-300)))
        alone = charged_by_each(step_of(design, noise, 1), epsilons).min(axis=0)
        one_copy.append(np.max(true / np.maximum(alone, 1e-300)))
    assert max(ratios) > 0.98
    assert max(one_copy) > 1.5


def test_the_charge_of_published_episodes():
    """Four rotations of 1,200 characters of Omniglot: one copy alone costs .567."""
    design = Copies(4_800, 5, Fraction(1, 30), 2, 20, 4, "zero_out")
    asked = {"num_steps": 1_000, "delta": 1e-5}
    assert jde.epsilon(step_of(design, 1.0), **asked) == pytest.approx(
        2.58235, rel=1e-5
    )
    one_copy = jde.epsilon(step_of(design, 1.0, 1), **asked)
    assert one_copy == pytest.approx(0.566671, rel=1e-5)


def test_the_report_has_no_epsilon_of_one_copy():
    step = step_of(Copies(40, 5, Fraction(1, 4), 2, 20, 4, "zero_out"), 2.0)
    report = jde.privacy_report(step, num_steps=10, delta=1e-5)
    assert list(report.epsilon_by_level) == ["original"]
    assert "one original example with all copies, in at most 4 classes" in str(report)
    assert any(text.startswith("Copies:") for text in report.preconditions)
