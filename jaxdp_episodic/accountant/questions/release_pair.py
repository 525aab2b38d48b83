"""The dominating pairs of releases: what each says of itself, or its theorem."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.describe.mechanisms import (
    DiscreteLaplaceRelease,
    GaussianMixtureRelease,
    RandomizedResponse,
    TruncatedPoissonRelease,
)
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    RenyiDP,
    ZeroConcentratedDP,
)
from jaxdp_episodic.accountant.describe.step import OneStep
from jaxdp_episodic.accountant.losses.finite import (
    Atoms,
    FiniteLoss,
    discrete_laplace_atoms,
    randomized_response_atoms,
    sampled_atoms,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.randomized_response import RandomizedResponseLoss
from jaxdp_episodic.accountant.losses.renyi_curve import RenyiCurveLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.truncated_gaussian import (
    ReplacedTruncatedLoss,
    TruncatedGaussianLoss,
    ZeroedTruncatedLoss,
    cut_weights,
)
from jaxdp_episodic.accountant.losses.zero_concentrated import ZeroConcentratedLoss

# A rate of 1, on its path axis.
_ALWAYS = np.ones(1)


def pair_of_release(release: OneStep) -> PrivacyLoss:
    """Returns the pair of a release, its fields ``(*release.shape, P)``.

    Raises:
      TypeError: no release.
    """
    field = _field
    if isinstance(release, LaplaceRelease):
        # Both contents of a changed unit are clipped: up to two clip norms apart.
        norms = 2.0 if release.neighboring_relation == "replace_one" else 1.0
        with np.errstate(divide="ignore", over="ignore"):
            shift = np.divide(norms, field(release.noise_multiplier))
        return LaplaceLoss(_ALWAYS, field(release.sampling_probability), shift)
    if isinstance(release, ApproximateDP):
        return RandomizedResponseLoss(
            _ALWAYS, field(release.epsilon), field(release.delta)
        )
    if isinstance(release, ZeroConcentratedDP):
        rho = field(release.rho)
        if release.is_gaussian:
            return SampledGaussianLoss(_ALWAYS, _ALWAYS, np.sqrt(2 * rho))
        return ZeroConcentratedLoss(_ALWAYS, rho, field(release.xi))
    if isinstance(release, RenyiDP):
        return _renyi_curve(release)
    if isinstance(release, RandomizedResponse):
        return _randomized_response(release)
    if isinstance(release, DiscreteLaplaceRelease):
        return _discrete_laplace(release)
    if isinstance(release, GaussianMixtureRelease):
        return _gaussian_mixture(release)
    if isinstance(release, TruncatedPoissonRelease):
        return _truncated(release)
    raise TypeError(f"step must be a GaussianStep or a release, got {release!r}")


def uses_of_truncated(
    release: TruncatedPoissonRelease, count: np.ndarray
) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """A batch that holds everybody is never cut: a Poisson step, which has nodes."""
    pair = _truncated(release)
    uncut = _field(release.batch_size) >= _sizes(release)
    uses: list[tuple[PrivacyLoss, np.ndarray]] = []
    if np.any(uncut):
        uses.append((pair.parts()[0], np.where(uncut, count, 0.0)))
    if not np.all(uncut):
        uses.append((pair, np.where(uncut, 0.0, count)))
    return uses


def _field(value: float | np.ndarray) -> np.ndarray:
    """A field of a release with a path axis."""
    return np.asarray(value, np.float64)[..., None]


def _columns(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """One column a part of a mechanism, each with a path axis."""
    return tuple(np.full(1, value) for value in values)


def _finite(found: Atoms) -> PrivacyLoss:
    loss, log_mass = found
    return FiniteLoss(_ALWAYS, _columns(loss), _columns(log_mass))


def _renyi_curve(release: RenyiDP) -> PrivacyLoss:
    orders, rdp = np.asarray(release.orders), np.asarray(release.rdp)
    most = rdp[-1] if np.isinf(orders[-1]) else np.inf
    # Divergences grow with the order: at each, the smallest of it and all later ones.
    rdp = np.minimum.accumulate(rdp[::-1])[::-1]
    known = np.isfinite(orders) & np.isfinite(rdp)
    # Where no finite order is known, order inf stands for order 2 too.
    t, rdp = (orders[known] - 1, rdp[known]) if known.any() else (np.ones(1), most)
    return RenyiCurveLoss(_ALWAYS, np.full(1, most), _columns(t), _columns(t * rdp))


def _randomized_response(release: RandomizedResponse) -> PrivacyLoss:
    noise, buckets = release.noise_parameter, release.num_buckets
    if buckets == 1 or noise == 1:
        return _finite((np.zeros(1), np.zeros(1)))
    if noise == 0:
        return SampledGaussianLoss(_ALWAYS, _ALWAYS, np.full(1, np.inf))
    zeroed = release.neighboring_relation == "zero_out"
    return _finite(randomized_response_atoms(noise, buckets, against_uniform=zeroed))


def _discrete_laplace(release: DiscreteLaplaceRelease) -> PrivacyLoss:
    noise, rate = release.noise_parameter, release.sampling_probability
    if noise == 0 or np.isinf(noise):
        # A parameter of 0 stands for no noise.
        return SampledGaussianLoss(_ALWAYS, np.full(1, rate), np.full(1, np.inf))
    twice = 2 if release.neighboring_relation == "replace_one" else 1
    found = discrete_laplace_atoms(noise, twice * release.sensitivity)
    return _finite(sampled_atoms(found, rate))


def _gaussian_mixture(release: GaussianMixtureRelease) -> PrivacyLoss:
    norms, chance = np.asarray(release.sensitivities), np.asarray(release.probabilities)
    order = np.argsort(norms, kind="stable")
    order = order[(norms[order] > 0) & (chance[order] > 0)]
    if order.size == 0:
        return SampledGaussianLoss(_ALWAYS, np.zeros(1), np.zeros(1))
    with np.errstate(divide="ignore", over="ignore"):
        shift = norms[order] / release.standard_deviation
    at_all = min(float(chance[order].sum()), 1.0)
    if order.size == norms.size:
        at_all = 1.0
    log_weight = np.log(chance[order] / chance[order].sum())
    rate = np.full(1, release.sampling_probability * at_all)
    return GaussianMixtureLoss(_ALWAYS, rate, _columns(shift), _columns(log_weight))


def _truncated(release: TruncatedPoissonRelease) -> TruncatedGaussianLoss:
    """See docs/proofs.md, "A Poisson sample that is cut"."""
    size, batch_size = _sizes(release), _field(release.batch_size)
    rate = _field(release.sampling_probability)
    whole, cut, cut_rate, sure = cut_weights(size, batch_size, rate)
    with np.errstate(divide="ignore", over="ignore"):
        shift = np.divide(1.0, _field(release.noise_multiplier))
    kinds = {
        "add_remove": TruncatedGaussianLoss,
        "replace_one": ReplacedTruncatedLoss,
        "zero_out": ZeroedTruncatedLoss,
    }
    kind = kinds[release.neighboring_relation]
    return kind(_ALWAYS, whole, cut, rate, cut_rate, shift, sure)


def _sizes(release: TruncatedPoissonRelease) -> np.ndarray:
    """Of the data set with the unit; two where it may be either neighbour's."""
    size = _field(release.population)
    if release.neighboring_relation != "add_remove":
        return size
    return np.concatenate([size, size + 1], axis=-1)
