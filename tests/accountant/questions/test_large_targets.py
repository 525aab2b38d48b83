"""Very large targets must be quick, and still be met."""

import itertools
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions import worst_path
from jaxdp_episodic.accountant.questions.calibration import Targets
from rows import fast_and_slow

DELTA = 1e-5
ABSURD = [200.0, 1e3, 1e6, 1e10, 1e14, 1e18]
NEXT_TO_NONE = pytest.mark.filterwarnings("ignore:noise_multiplier=")


def poisson(rate, relation="add_remove"):
    return jde.GaussianStep(
        jde.Poisson("e", sampling_probability=rate),
        noise_multiplier=1.0,
        neighboring_relation=relation,
    )


def epoch(steps, relation="add_remove"):
    scheme = jde.RandomAllocation("e", steps_per_epoch=steps)
    return jde.GaussianStep(scheme, noise_multiplier=1.0, neighboring_relation=relation)


def noise_at(noise, step):
    return jde.GaussianStep(
        step.sampling,
        noise_multiplier=noise,
        neighboring_relation=step.neighboring_relation,
    )


SLOW = pytest.mark.slow


@pytest.mark.few(1)
@NEXT_TO_NONE
@pytest.mark.parametrize(
    ("step", "num_steps", "most_draws"),
    # As noise goes to 0 the loss is that of K draws, K a quantile of a binomial.
    [
        (poisson(0.01), 100, 7),
        pytest.param(poisson(0.5), 1000, 567, marks=SLOW),
        (poisson(0.5), 1, 1),
    ],
)
@pytest.mark.parametrize("method", ["exact", pytest.param("pld", marks=SLOW)])
def test_noise_is_found_quickly(monkeypatch, step, num_steps, most_draws, method):
    asked = []
    plain = Targets.excess

    def excess(self, active, **changed):
        asked.append(self.method)
        return plain(self, active, **changed)

    monkeypatch.setattr(Targets, "excess", excess)
    run: dict[str, Any] = {"num_steps": num_steps, "delta": DELTA}
    jde.calibrate_noise_multiplier(step, epsilon=2.0, **run)
    usual_calls = len(asked)
    for target in ABSURD:
        if method == "pld" and target < 1e3:
            continue  # certified ends
        asked.clear()
        noise = jde.calibrate_noise_multiplier(
            step, epsilon=target, method=method, **run
        )
        assert len(asked) <= 3 * usual_calls  # bisection took minutes
        # With so little noise epsilon takes up to a minute; the Rényi bound exceeds it.
        by = "rdp" if noise < 0.1 and num_steps > 1 else method
        spent = noise_at(noise, step)
        spent = jde.epsilon(spent, num_steps=num_steps, delta=DELTA, method=by)
        assert spent <= target * (1 + 1e-12)
        # K draws alone lose K / (2 noise^2).
        if target >= 1e6:
            least = np.sqrt(most_draws / (2 * target))
            assert 0.99 * least <= noise <= 1.2 * least or target > 1e16


@pytest.mark.few(2)
@NEXT_TO_NONE
@pytest.mark.parametrize(
    ("relation", "target"),
    fast_and_slow(
        itertools.product(["add_remove", "replace_one"], [200.0, 1e3, 1e18]),
        lambda relation, target: relation == "add_remove" or target > 200,
    ),
)
def test_noise_of_epochs_is_found_quickly(monkeypatch, relation, target):
    """Below the smallest noise of the tables, where the bound jumps."""
    seen: list[float] = []
    plain = Targets.excess

    def excess(self, active, **changed):
        value = plain(self, active, **changed)
        seen.extend(changed.get("inverse_noise", []))
        return value

    monkeypatch.setattr(Targets, "excess", excess)
    monkeypatch.setattr(worst_path.exact, "pld_bounds", _refuse)
    step, run = epoch(5, relation), {"num_steps": 10, "delta": DELTA}
    noise = jde.calibrate_noise_multiplier(step, epsilon=target, **run)
    run["method"] = "rdp" if noise > 0.1 else "exact"
    assert len(seen) <= 25  # 14 at 8 nats; bisecting a jump to 1e-7 took twice as many
    assert jde.epsilon(noise_at(noise, step), **run) <= target * (1 + 1e-12)
    if target < 1e16:
        assert jde.epsilon(noise_at(0.98 * noise, step), **run) > target


@pytest.mark.slow
def test_large_targets_take_no_certified_ends(monkeypatch):
    """Designs whose epsilon takes seconds; small targets use it."""
    monkeypatch.setattr(worst_path.exact, "pld_bounds", _refuse)
    step = poisson(0.01)
    for target in (300.0, 1e3, 1e6):
        run: dict = {"epsilon": target, "delta": DELTA}
        noise = jde.calibrate_noise_multiplier(step, **run, num_steps=100)
        there = noise_at(0.05, step)
        steps = jde.calibrate_num_steps(there, **run)
        rate = jde.calibrate_rate(there, level="e", **run, num_steps=100)
        spent = {"delta": DELTA, "method": "rdp"}
        assert jde.epsilon(noise_at(noise, step), num_steps=100, **spent) <= target
        assert jde.epsilon(there, num_steps=steps, **spent) <= target
        most = noise_at(0.05, poisson(rate))
        assert jde.epsilon(most, num_steps=100, **spent) <= target
    release = jde.TruncatedPoissonRelease(
        2.0, sampling_probability=0.3, batch_size=3, population=5
    )
    with pytest.raises(ZeroDivisionError):
        jde.calibrate_num_steps(release, epsilon=5.0, delta=DELTA)


def _refuse(*_: Any) -> Any:
    raise ZeroDivisionError


def test_medium_targets_are_met_to_the_usual_tolerance():
    """Where the contour gives epsilon, also at targets above 50."""
    step, run = poisson(0.5), {"num_steps": 1000, "delta": DELTA}
    for target in (60.0, 1e3, 1e4):
        noise = jde.calibrate_noise_multiplier(step, epsilon=target, **run)
        assert jde.epsilon(noise_at(noise, step), **run) <= target
        assert jde.epsilon(noise_at(noise * (1 - 1e-6), step), **run) > target


@NEXT_TO_NONE
@pytest.mark.parametrize("method", ["exact", "pld", "rdp"])
@pytest.mark.parametrize(
    "step",
    [
        poisson(0.01),
        jde.GaussianStep(
            jde.WithoutReplacement("e", size=3, population=10), noise_multiplier=1.0
        ),
    ],
)
def test_a_delta_of_one_covers_everything(step, method):
    run: dict = {"epsilon": 1.0, "delta": 1.0, "method": method}
    assert jde.epsilon(step, delta=1.0, num_steps=9, method=method) == 0
    assert jde.calibrate_noise_multiplier(step, **run, num_steps=9) == 1e-9
    assert jde.calibrate_num_steps(step, **run) == 2**53
    most = 1.0 if isinstance(step.design.schemes[0], jde.Poisson) else 10
    assert jde.calibrate_rate(step, level="e", **run, num_steps=9) == most
    if method != "rdp":
        return
    both = jde.calibrate_noise_multiplier(
        step, epsilon=1.0, delta=[1.0, 1e-5], num_steps=9, method=method
    )
    alone = jde.calibrate_noise_multiplier(
        step, epsilon=1.0, delta=1e-5, num_steps=9, method=method
    )
    assert both[0] == 1e-9 and both[1] == pytest.approx(alone, rel=1e-6)


def test_noise_next_to_none_is_warned_of():
    rare = poisson(1e-9)
    with pytest.warns(UserWarning, match="protects nobody: epsilon=1 and delta=1e-05"):
        jde.calibrate_noise_multiplier(rare, epsilon=1.0, delta=DELTA, num_steps=100)
    with pytest.warns(UserWarning, match="noise_multiplier=0.000"):
        jde.calibrate_noise_multiplier(
            poisson(0.01), epsilon=[1.0, 1e8], delta=DELTA, num_steps=10
        )
    # Only steps without sampling have so little noise.
    jde.calibrate_noise_multiplier(
        poisson([0.01, 0.0]), epsilon=1e5, delta=DELTA, num_steps=10
    )
