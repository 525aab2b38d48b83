"""Asks every question of the accountant without the packages of the trainer.

``python experiments/accountant_alone.py [BLOCKED ...]`` blocks the import of the named
packages and imports every module of `jaxdp_episodic.accountant`. Without JAX, NumPy
answers small questions, and large ones raise an error that names JAX. `make dist` runs
it in environments without these packages, tests/test_accountant_alone.py with packages
blocked.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

TRAINER = ("flax", "optax", "orbax", "tensorstore", "randomgen", "rich")
# Each is for another library, and says so where that one is missing.
BRIDGES = ("dp_accounting", "jax_privacy", "opacus")
DELTA, NUM_STEPS = 1e-5, 10


def main() -> None:
    """Asks, and prints the answers."""
    for name in sys.argv[1:]:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]: as import does
    missing = [name for name in (*TRAINER, "jax") if not _is_there(name)]
    _import_all()
    import numpy as np

    import jaxdp_episodic as jde
    from jaxdp_episodic import traced

    example = jde.Poisson("example", sampling_probability=0.01)
    step = jde.GaussianStep(example, noise_multiplier=1.0)
    whole = jde.Poisson("example", sampling_probability=1.0)
    release = jde.GaussianStep(whole, noise_multiplier=1.0)
    tasks = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("task", sampling_probability=0.1),
            jde.WithoutReplacement("example", size=2, population=20),
        ),
        noise_multiplier=2.0,
        clip_unit="task",
    )
    run: dict[str, Any] = {"num_steps": NUM_STEPS}
    target: dict[str, Any] = {"epsilon": 1.0, "delta": DELTA}
    epsilon = np.inf
    for method in ("rdp", "pld", "exact"):
        epsilon = jde.epsilon(step, delta=DELTA, method=method, **run)
        print(f"epsilon by {method}", epsilon)
        delta = jde.delta(step, epsilon=epsilon, method=method, **run)
        assert 0 < delta <= DELTA * 1.001, delta
    low, high = jde.epsilon_interval(step, delta=DELTA, **run)
    assert low <= epsilon <= high, (low, epsilon, high)
    low, high = jde.delta_interval(step, epsilon=epsilon, **run)
    assert low <= DELTA * (1 + 1e-6) and high >= DELTA * (1 - 1e-6), (low, high)
    assert np.isfinite(jde.rdp(step, [2.0, 8.5])).all()
    noise = jde.calibrate_noise_multiplier(step, **target, **run)
    steps = jde.calibrate_num_steps(step, **target)
    rate = jde.calibrate_rate(step, level="example", **target, **run)
    print("calibrated noise, steps, rate", noise, steps, rate)
    # Balle and Wang (2018), arXiv:1805.06530, Theorem 8, at epsilon 0: 2 Phi(1/2) - 1.
    profile = np.asarray(jde.privacy_profile(release, [0.0, 1.0, 2.0]))
    assert abs(profile[0] - 0.38292492254802624) < 1e-12, profile
    assert abs(jde.advantage(release, num_steps=1) - profile[0]) < 1e-9
    assert abs(jde.gdp_mu(release, num_steps=1) - 1) < 1e-6
    assert 0.01 < jde.true_positive_rate(step, false_positive_rate=0.01, **run) < 1
    assert jde.trade_off(step, false_positive_rate=0.01, **run) < 0.99
    print(str(jde.privacy_report(tasks, delta=DELTA, **run)).splitlines()[2].strip())
    for name in BRIDGES:
        if not _is_there(name):
            _refused(_bridge, name, says="pip install '.[")
    value, slopes = jde.epsilon_and_gradient(step, delta=DELTA, **run)
    assert value == jde.epsilon(step, delta=DELTA, **run), value
    assert slopes["noise_multiplier"] < 0, slopes
    print("derivative by the noise", slopes["noise_multiplier"])
    many = jde.Poisson("example", sampling_probability=np.full(3, 0.01))
    grid = jde.GaussianStep(many, noise_multiplier=1.0)
    if _is_there("jax"):
        on_jax = jde.epsilon(grid, delta=DELTA, method="rdp", engine="jax", **run)
        bound = jde.epsilon(step, delta=DELTA, method="rdp", **run)
        assert np.allclose(on_jax, bound, rtol=1e-9), on_jax
    else:
        ask = {"delta": DELTA, **run}
        _refused(traced.epsilon, step, says="needs jax", **ask)
        _refused(jde.epsilon, grid, says="needs jax", engine="jax", **ask)
    loaded = {*TRAINER, "jax", "jaxlib"} & {n for n, m in sys.modules.items() if m}
    assert not loaded - {"jax", "jaxlib"} and not loaded & {*missing}, loaded
    print("answered without", *missing)


def _is_there(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def _import_all() -> None:
    """Imports every module of the accountant but those that are for other libraries."""
    import jaxdp_episodic.accountant as accountant

    for module in pkgutil.walk_packages(accountant.__path__, f"{accountant.__name__}."):
        if module.name.rpartition(".")[2] not in BRIDGES:
            importlib.import_module(module.name)
    assert sys.modules.get("jax") is None


def _bridge(name: str) -> None:
    importlib.import_module(f"jaxdp_episodic.accountant.interop.{name}")


def _refused(
    ask: Callable[..., Any], *arguments: Any, says: str, **options: Any
) -> None:
    """Asserts that a question is refused for want of a package, in these words."""
    try:
        ask(*arguments, **options)
    except ImportError as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"{ask} needs nothing that is missing")


if __name__ == "__main__":
    main()
