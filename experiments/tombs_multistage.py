"""The multistage theorem of Tombs, Kotevska and Young, with its condition.

Data are a tree (tasks, classes, examples ...); every stage draws children of each unit
drawn before. The paper claims ``delta'(log(1 + eta (e^eps - 1))) <= eta delta(eps)``
with one rate ``eta`` for all stages. Three repairs:

* *The rate.* ``eta`` is the product of ``n_j / N_j`` over **all** stages; the printed
  denominator lacks the number of primary units.
* *The worst unit.* The guarantee takes the largest ``eta`` over neighbours, where the
  proof takes the smallest.
* *The condition.* Given that the differing example was not drawn, its task was less
  likely drawn, and its task's other examples show whether it was. So the product is a
  rate only for the clipped stage and those below. Stages above only multiply delta:

      delta'(log(1 + eta_in (e^eps - 1))) <= r_out eta_in delta(eps)

  with ``r_out`` the product above, ``eta_in`` of the clipped stage and below. With
  whole tasks clipped, as episodic trainers do, ``r_out = 1`` and the theorem is right.

The functions below take

* ``mechanism``: a `Mechanism`, or a function from epsilon to delta that broadcasts: of
  *replacing one clipped contribution*, which for noise of ``sigma`` clip norms is
  ``Gaussian(sigma / 2)``;
* ``sampling``: one scheme a stage, top first; the clipped stage without replacement;
* ``clip_unit``: name of the stage whose contributions are clipped, or "step" if the
  whole step is one contribution;
* ``epsilon``: eps', >= 0 and finite, nats; it broadcasts with the sampling;
* ``population``: the real tree, or None; the result is then the worst path's, which
  need not be that of the largest inclusion probability.

They assume locality (a clipped contribution depends on its own unit's drawn content,
public data and fresh randomness only) and public lists of units above the examples, and
return *upper bounds* for both neighbouring relations of examples, float64 of the
broadcast shape. A clipped stage with Poisson draws raises `NotImplementedError`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.rates import path_rates
from jaxdp_episodic.bounds import delta_poisson_subsampled

STEP = "step"


class MultistageRates(NamedTuple):
    """Rates of every path, split at the clipped stage: sampling's shape + (paths,).

    ``outer`` is the product above the clipped stage, ``inner`` that of it and below.
    """

    outer: np.ndarray
    inner: np.ndarray


def multistage_rates(
    sampling: jde.MultistageSampling,
    *,
    clip_unit: str,
    population: jde.Population | None = None,
) -> MultistageRates:
    """Rates of a multistage draw by any schemes, split at any clipped stage."""
    names = (STEP, *sampling.level_names)
    if clip_unit not in names:
        raise ValueError(f"clip_unit must be one of {names}, got {clip_unit!r}")
    clip = max(names.index(clip_unit) - 1, 0)
    levels = path_rates(sampling, population)
    shape = (*sampling.shape, len(levels.multiplicity))
    outer = math.prod(levels.rates[:clip], start=np.ones(shape))
    inner = math.prod(levels.rates[clip:], start=np.ones(shape))
    return MultistageRates(outer, inner)


def tombs_multistage(
    mechanism: Any,
    *,
    sampling: jde.MultistageSampling,
    clip_unit: str,
    epsilon: Any,
    population: jde.Population | None = None,
) -> Any:
    """Delta of a multistage-sampled mechanism at one rate for all stages.

        delta'(eps') <= eta delta(eps),   eps' = log(1 + eta (e^eps - 1)),

    ``eta`` the product of the rates of all stages of the worst path. It holds where
    the whole draw lies inside one clipped contribution, and is refused elsewhere.

    Raises:
      NotImplementedError: contributions clipped below a stage that draws only some of
        its units: the theorem does not hold there. The message names what does.

    Reference: Tombs, Kotevska and Young (2022), "Privacy amplification for episodic
    training methods", CEUR-WS 3318, Theorem 3, with corrected rate and condition.
    """
    rates = _checked_rates(sampling, clip_unit, population)
    if np.any(rates.outer < 1):
        above = sampling.level_names[: sampling.level_names.index(clip_unit)]
        raise NotImplementedError(
            f"tombs_multistage with clip_unit={clip_unit!r} below the draw of "
            f"{', '.join(map(repr, above))} (rate {rates.outer.min():.3g}): the "
            "product of all rates is no amplification rate there, because whether the "
            "outer unit was drawn shows through its other members; delta can exceed "
            "the claim a hundredfold. Sound: clip_unit="
            f"{sampling.level_names[0]!r}, or multistage_delta, which multiplies "
            "delta by the outer rates, or GaussianStep for Gaussian noise"
        )
    return _worst_delta(mechanism, rates, epsilon)


def multistage_delta(
    mechanism: Any,
    *,
    sampling: jde.MultistageSampling,
    clip_unit: str,
    epsilon: Any,
    population: jde.Population | None = None,
) -> Any:
    """Delta of a multistage-sampled mechanism, for any clipped stage.

        delta'(eps') <= r_out eta_in delta(eps),   eps' = log(1 + eta_in (e^eps - 1))

    The sound form of `tombs_multistage`, equal to it where that holds.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2, applied
    given the draws of the outer stages; joint convexity over those.
    """
    rates = _checked_rates(sampling, clip_unit, population)
    return _worst_delta(mechanism, rates, epsilon)


def _checked_rates(
    sampling: jde.MultistageSampling, clip_unit: str, population: jde.Population | None
) -> MultistageRates:
    """Rates; refuses a clipped stage that is not drawn without replacement."""
    rates = multistage_rates(sampling, clip_unit=clip_unit, population=population)
    if clip_unit != STEP:
        scheme = sampling.levels[sampling.level_names.index(clip_unit)]
        if not isinstance(scheme, jde.WithoutReplacement):
            raise NotImplementedError(
                f"clip_unit={clip_unit!r} drawn by {type(scheme).__name__}: the rule "
                "for a profile or an (epsilon, delta) covers a clipped stage drawn "
                "without replacement (or clip_unit='step'); for Poisson draws use "
                "GaussianStep"
            )
    return rates


def _worst_delta(mechanism: Any, rates: MultistageRates, epsilon: Any) -> Any:
    """The largest over the paths of ``r_out eta_in delta(eps)``."""
    inner = delta_poisson_subsampled(
        mechanism,
        sampling_probability=rates.inner,
        epsilon=np.asarray(epsilon, np.float64)[..., None],
    )
    value = np.max(rates.outer * inner, axis=-1)
    return np.asarray(np.minimum(np.nextafter(value, 2.0), 1.0) * (value > 0))[()]
