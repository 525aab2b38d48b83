"""Derivatives of epsilon against differences of it and closed forms."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
from designs import LEVELS, difference, grouped, poisson, poisson_step
from jaxdp_episodic.accountant.questions.gradients import _fields
from oracles import allocation, little_noise

DELTA = 1e-6


def of_levels(clip, relation="add_remove"):
    """A step of two or three Poisson levels, from noise and rates."""
    return partial(poisson_step, clip=clip, relation=relation)


def episodic(noise, *rates):
    sampling = jde.MultistageSampling(*map(poisson, LEVELS, rates))
    design = jde.IndependentEpisodes(sampling, num_episodes=5)
    return jde.GaussianStep(design, noise_multiplier=noise)


def of_classes(noise, rate):
    examples = jde.WithoutReplacement("example", size=3, population=20)
    return grouped(noise, rate, examples)


def of_steps(make, count):
    """Difference of epsilon by a whole number of steps."""
    return difference(lambda n: jde.epsilon(*make(round(n)), delta=DELTA), count, 0.01)


def check(make, arguments, num_steps):
    """All derivatives of a step made from noise and rates."""
    step = make(*arguments)
    names = [name for name in tuple(_fields(step)) if not name.endswith(".size")]
    value, gradient = jde.epsilon_and_gradient(
        step, delta=DELTA, num_steps=num_steps, wrt=tuple(names)
    )
    assert value == jde.epsilon(step, delta=DELTA, num_steps=num_steps)
    if value == 0:
        assert set(gradient.values()) == {0.0}
        return
    names.remove("num_steps")
    assert len(names) == len(arguments)
    for i, name in enumerate(names):

        def epsilon(x, i=i):
            moved = make(*arguments[:i], x, *arguments[i + 1 :])
            return jde.epsilon(moved, delta=DELTA, num_steps=num_steps)

        # Less accurate epsilons need wider differences.
        expected = min(
            (difference(epsilon, arguments[i], apart) for apart in (1e-3, 4e-3)),
            key=lambda value, name=name: abs(value - gradient[name]),
        )
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-7, err_msg=name)
    if num_steps > 2:
        expected = of_steps(lambda n: (jde.compose((step, n)),), num_steps)
        np.testing.assert_allclose(gradient["num_steps"], expected, rtol=1e-6)
    else:
        # The powers of M have no unique continuation to real exponents.
        assert not gradient["num_steps"] <= 0


# A step of noise and rates, and how many rates it has.
KINDS = {
    "sampled": (of_levels("school"), 1),
    "antipodal": (of_levels("school"), 2),
    "antipodal below an outer level": (of_levels("class"), 3),
    "antipodal under replace_one": (of_levels("class", "replace_one"), 2),
    "swapped": (of_levels("step"), 2),
    "episodes": (episodic, 2),
    "grouped": (of_classes, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 400])
@pytest.mark.parametrize("arguments", [(2.0, 0.2, 0.1, 0.3), (5.0, 1e-3, 0.02, 0.5)])
def test_every_kind(kind, num_steps, arguments):
    make, number = KINDS[kind]
    check(make, arguments[: 1 + number], num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 100])
def test_gaussian_mechanism(num_steps):
    """``delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``, mu = √T / sigma.

    ``d delta / d mu = phi(mu/2 - eps/mu)``, ``d delta / d eps = -e^eps Phi(...)``.
    """
    sigma = np.array([0.5, 1.0, 3.0]) * np.sqrt(num_steps)
    step = jde.GaussianStep(poisson("example", 1.0), noise_multiplier=sigma)
    value, gradient = jde.epsilon_and_gradient(
        step, delta=1e-5, num_steps=num_steps, wrt=("noise_multiplier", "num_steps")
    )
    mu = np.sqrt(num_steps) / sigma
    by_epsilon = np.exp(value + norm.logcdf(-mu / 2 - value / mu))
    delta = norm.cdf(mu / 2 - value / mu) - by_epsilon
    by_mu = norm.pdf(mu / 2 - value / mu) / by_epsilon
    np.testing.assert_allclose(delta, 1e-5, 1e-7)
    np.testing.assert_allclose(gradient["noise_multiplier"], -by_mu * mu / sigma, 1e-7)
    np.testing.assert_allclose(gradient["num_steps"], by_mu * mu / 2 / num_steps, 1e-7)


def test_no_loss_and_unknown_epsilon():
    noise = np.array([0.0, 1.0, 2.0, 50.0, np.inf])
    step = of_levels("class")(noise, 0.2, 0.1)
    value, gradient = jde.epsilon_and_gradient(step, delta=0.003, num_steps=1)
    assert value[0] == np.inf and value[2] > 0 and value[3] == value[4] == 0
    slope = gradient["noise_multiplier"]
    np.testing.assert_array_equal(np.isnan(slope), [True] + [False] * 4)
    np.testing.assert_array_equal(slope[3:], 0.0)
    _, gradient = jde.epsilon_and_gradient(
        step, delta=0.01, num_steps=0, wrt=("noise_multiplier", "num_steps")
    )
    for slope in gradient.values():
        np.testing.assert_array_equal(slope[1:], 0.0)
    none = of_levels("class")(np.empty(0), 0.2, 0.1)
    value, gradient = jde.epsilon_and_gradient(none, delta=DELTA, num_steps=3)
    assert value.shape == gradient["noise_multiplier"].shape == (0,)
    # Epsilon is certified where draws of the unit overlap with nothing.
    step = jde.GaussianStep(poisson("a", 0.1), noise_multiplier=0.1)
    names = "noise_multiplier", "a.sampling_probability"
    wrt = *names, "num_steps"
    _, gradient = jde.epsilon_and_gradient(step, delta=DELTA, num_steps=30, wrt=wrt)
    assert np.isnan(gradient["num_steps"])  # certified ends have whole counts

    def of_hits(x: float, p: float) -> float:
        log_rates = np.log([p, 1 - p])
        return little_noise.epsilon_of_hits(DELTA, 30, p, 1 / x, *log_rates)

    functions = (lambda x: of_hits(x, 0.1)), (lambda p: of_hits(0.1, p))
    for name, function in zip(names, functions, strict=True):
        assert gradient[name] == pytest.approx(difference(function, 0.1), rel=1e-3)


def test_renyi_bounds_by_differences():
    """Where the best order jumps: one that suffices for the bound is off by 2e-4."""
    arguments = (11.339018784966942, 5.5556e-4, 3.218e-3)

    def ask(question, *arguments, **more):
        step = of_levels("step", "zero_out")(*arguments)
        asked = {"delta": 7.21e-11, "num_steps": 8242, "method": "rdp"}
        return question(step, **asked, **more)

    names = "noise_multiplier", "school.sampling_probability"
    _, gradient = ask(jde.epsilon_and_gradient, *arguments, wrt=names)
    for i, name in enumerate(names):

        def epsilon(x, i=i):
            return ask(jde.epsilon, *arguments[:i], x, *arguments[i + 1 :])

        expected = difference(epsilon, arguments[i])
        assert gradient[name] == pytest.approx(expected, rel=1e-7), name


@pytest.mark.parametrize("method", ["rdp", "exact"])
def test_near_an_end_derivatives_are_right_or_nan(method):
    """A displacement below the rounding of a rate would give a slope of 0."""
    rate = 1 - 10.0 ** -np.array([2, 3, 6, 9, 11, 12, 13, 15])
    _, by_rate = jde.epsilon_and_gradient(
        jde.GaussianStep(poisson("a", rate), noise_multiplier=25.0),
        **{"delta": 1e-6, "num_steps": 1000, "method": method},
        wrt=("a.sampling_probability",),
    )
    group = np.array([10**3, 10**6, 10**11, 10**13])
    draw = jde.WithoutReplacement("a", size=group - 1, population=group)
    step = jde.GaussianStep(
        draw, noise_multiplier=25.0, neighboring_relation="replace_one"
    )
    _, by_size = jde.epsilon_and_gradient(
        step, delta=1e-6, num_steps=1000, method=method, wrt=("a.size",)
    )
    # The derivative has a limit.
    for slope in (by_rate["a.sampling_probability"], group * by_size["a.size"]):
        known = slope[~np.isnan(slope)]
        np.testing.assert_allclose(known, slope[0], rtol=3e-3)
        assert np.isnan(slope[-1])
    assert not np.isnan(by_rate["a.sampling_probability"][:4]).any()


@pytest.mark.parametrize(
    "wrt, error, words",
    [
        (("noise",), ValueError, "wrt must be one of .*'class.sampling_probability'"),
        (("noise_multiplier[0]",), ValueError, r"got 'noise_multiplier\[0\]'"),
        ("noise_multiplier", TypeError, "wrt must be a tuple of names"),
        ((3,), TypeError, "wrt must be one of .*, got 3"),
    ],
)
def test_names_that_a_step_does_not_have(wrt, error, words):
    step = of_levels("class")(2.0, 0.2, 0.1)
    with pytest.raises(error, match=words):
        jde.epsilon_and_gradient(step, delta=DELTA, num_steps=3, wrt=wrt)
    assert jde.epsilon_and_gradient(step, delta=DELTA, num_steps=3, wrt=())[1] == {}
    with pytest.raises(ValueError, match="delta must lie in"):
        jde.epsilon_and_gradient(step, delta=0.0, num_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "num_steps"), [("school", 1), ("pupil", 300)])
def test_sizes_without_replacement(unit, num_steps):
    """Of 40 of 400; of all there is none, and beyond nothing changes."""
    run = {"delta": DELTA, "num_steps": num_steps}

    def sized(size):
        pupils = jde.WithoutReplacement("pupil", size=size, population=400)
        drawn = jde.MultistageSampling(poisson("school", 0.3), pupils)
        return jde.GaussianStep(drawn, noise_multiplier=1.5, clip_unit=unit)

    step = sized([40, 400, 401])
    _, gradient = jde.epsilon_and_gradient(step, **run, wrt=("pupil.size",))
    inside, end, beyond = gradient["pupil.size"]
    true = difference(lambda size: jde.epsilon(sized(size), **run), 40, 1 / 40)
    assert inside == pytest.approx(true, rel=1e-3)
    assert np.isnan(end) and beyond == 0


@pytest.mark.slow
def test_composed_runs():
    def run(noise=(2.0, 1.5), rate=0.1, counts=(300, 100)):
        first = of_levels("class")(noise[0], 0.2, rate)
        second = of_levels("school")(noise[1], 0.05, 0.3)
        return jde.compose(*zip((first, second), counts, strict=True))

    # A step that is not taken: its count has a derivative, its noise none.
    first, second = of_levels("class")(2.0, 0.2, 0.1), of_levels("class")(1.5, 0.3, 0.2)
    idle = jde.compose((first, 300), (second, 0))
    wrt = ("num_steps[1]", "noise_multiplier[1]", "noise_multiplier")
    value, gradient = jde.epsilon_and_gradient(idle, delta=DELTA, wrt=wrt)
    _, alone = jde.epsilon_and_gradient(first, delta=DELTA, num_steps=300)
    assert gradient["noise_multiplier[1]"] == 0
    expected = pytest.approx(alone["noise_multiplier"], rel=1e-9)
    assert gradient["noise_multiplier"] == expected
    # Epsilon is concave in the number of steps.
    whole, slope = jde.compose((first, 300), (second, 1)), gradient["num_steps[1]"]
    assert 0.8 * slope < jde.epsilon(whole, delta=DELTA) - value < slope
    step = run()
    _, gradient = jde.epsilon_and_gradient(step, delta=DELTA, wrt=tuple(_fields(step)))

    def epsilon(**changes):
        return jde.epsilon(run(**changes), delta=DELTA)

    expected = {
        "noise_multiplier[0]": difference(lambda x: epsilon(noise=(x, 1.5)), 2.0),
        "noise_multiplier[1]": difference(lambda x: epsilon(noise=(2.0, x)), 1.5),
        "class.sampling_probability[0]": difference(lambda x: epsilon(rate=x), 0.1),
        "num_steps[0]": of_steps(lambda n: (run(counts=(n, 100)),), 300),
        "num_steps[1]": of_steps(lambda n: (run(counts=(300, n)),), 100),
    }
    for name, value in expected.items():
        assert gradient[name] == pytest.approx(value, rel=1e-6), name
    together = [name for name in gradient if "[" not in name]
    assert len(together) == 4
    for name in together:
        parts = [v for k, v in gradient.items() if k.startswith(name + "[")]
        assert gradient[name] == pytest.approx(sum(parts), rel=1e-8)


def in_epochs(noise, scheme):
    return jde.GaussianStep(scheme, noise_multiplier=noise)


def test_epochs_have_derivatives_by_noise_alone(monkeypatch):
    step = in_epochs(1.0, jde.ShuffledEpochs("u", steps_per_epoch=6))
    with monkeypatch.context() as patched:  # refused before anything is computed
        patched.delattr("jaxdp_episodic.accountant.questions.api.epsilon")
        with pytest.raises(NotImplementedError, match="'noise_multiplier' only"):
            jde.epsilon_and_gradient(step, delta=DELTA, num_steps=6, wrt=("num_steps",))
    none, gradient = jde.epsilon_and_gradient(step, delta=DELTA, num_steps=0)
    assert none == 0 and not gradient["noise_multiplier"] != 0
    silent = in_epochs(0.0, jde.ShuffledEpochs("u", steps_per_epoch=6))
    _, gradient = jde.epsilon_and_gradient(silent, delta=DELTA, num_steps=6)
    assert np.isnan(gradient["noise_multiplier"])


@pytest.mark.slow
def test_derivatives_of_epochs_against_the_definition():
    """Differences of certified ends are accurate to about 1e-3."""
    noise, h = 1.0, 2e-3
    step = in_epochs(noise, jde.RandomAllocation("u", steps_per_epoch=3))
    epsilon, gradient = jde.epsilon_and_gradient(step, delta=1e-6, num_steps=3)

    def log_delta(noise, epsilon):
        return np.log(allocation.add_remove(3, 3, 1 / noise, epsilon, "remove"))

    # The direction "remove" is the larger one.
    by_noise = log_delta(noise + h, epsilon) - log_delta(noise - h, epsilon)
    by_epsilon = log_delta(noise, epsilon + h) - log_delta(noise, epsilon - h)
    true = -by_noise / by_epsilon
    assert gradient["noise_multiplier"] == pytest.approx(true, rel=2e-3)
