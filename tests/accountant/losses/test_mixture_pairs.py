"""The tables to draw from are the pairs whose profiles are accounted."""

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss

LOSSES = {
    "sampled": SampledGaussianLoss(1.0, 0.2, 1.5),
    "swapped": SwappedGaussianLoss(1.0, 0.2, 1.5),
    "antipodal": AntipodalGaussianLoss(1.0, 0.3, 0.25, 1.2),
    "episodes": IndependentEpisodesLoss(1.0, 0.1, 0.8, 3.0),
    "episodes, always": IndependentEpisodesLoss(1.0, 1.0, 0.8, 3.0),
}


def stick(pair, g, factor=1.0):
    """``H_g`` of the table, all means multiplied; a sum on a fine grid."""
    x = np.linspace(-12.0, 18.0, 300_001)

    def density(means):
        parts = zip(pair.weight, means, strict=True)
        return sum(w * stats.norm.pdf(x, factor * m) for w, m in parts)

    excess = density(pair.with_unit) - g * density(pair.without_unit)
    return np.trapezoid(np.maximum(excess, 0.0), x)


@pytest.mark.parametrize("u", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_tables_have_the_profiles(name, u):
    loss = LOSSES[name].map(np.float64)
    pair = loss.mixture()
    assert sum(pair.weight) == pytest.approx(1.0, abs=1e-15)
    sums = {1: 1.0}
    if pair.draws is not None:
        number, rate = pair.draws
        several = np.arange(1, number + 1)
        chance = stats.binom.pmf(several, number, rate)
        sums = dict(zip(several, chance / chance.sum(), strict=True))
    found = sum(w * stick(pair, np.exp(u), k) for k, w in sums.items())
    with np.errstate(all="ignore"):
        (profile, _), _ = loss.log_tails(np.float64(u))
    # The grid's spacing is 1e-4, and where the excess ends it has a kink.
    assert found == pytest.approx(np.exp(profile), rel=1e-6)


def test_what_has_no_table_says_so():
    with pytest.raises(
        NotImplementedError, match="LaplaceLoss has no table to draw from"
    ):
        LaplaceLoss(1.0, 1.0, 1.0).mixture()
