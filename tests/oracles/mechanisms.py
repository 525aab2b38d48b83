"""Every mechanism that is shipped, at a few random settings."""

import importlib
import inspect
import pkgutil

import numpy as np

from jaxdp_episodic.accountant import losses
from jaxdp_episodic.accountant.describe.rates import cut_weights
from jaxdp_episodic.accountant.losses.allocated import (
    AllocatedAntipodalBoundingLoss,
    AllocatedAntipodalLoss,
    AllocatedBoundingLoss,
    AllocatedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    GaussianMixtureLoss,
    ReplacedMixtureLoss,
    ReplacedTruncatedLoss,
    SwappedGaussianLoss,
    TruncatedGaussianLoss,
    ZeroedGaussianLoss,
    ZeroedTruncatedLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
    ZeroedEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.losses.mixture_halves import log_rest
from jaxdp_episodic.accountant.losses.people import PeopleLoss, ReplacedPeopleLoss
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.renyi_curve import (
    RenyiCurveLoss,
    ZeroConcentratedLoss,
)

SIZE = 12
_RNG = np.random.default_rng(20)
_ONE = np.ones(SIZE)
_OUTER, _RATE, _INNER = 10 ** _RNG.uniform(-3, 0, (3, SIZE))
_RATE[:2], _INNER[1:3] = 1.0, 1.0
_SHIFT = 10 ** _RNG.uniform(-1.5, 0.4, SIZE)
_EPISODES = np.resize([1.0, 2.0, 4.0], SIZE)
# Few lengths of epochs, because each makes tables of its own.
_EPOCH = {
    "shift": np.resize([0.4, 2.0], SIZE),
    "slots": 5.0 * _ONE,
    "steps": 3.0 * _ONE,
}
_ABOVE = _EPOCH | {"above": _ONE}
_SHIFTS = tuple(np.sort(10 ** _RNG.uniform(-1.5, 0.4, (3, SIZE)), axis=0))
_WEIGHTS = tuple(np.log(_RNG.dirichlet(np.ones(3), SIZE).T))
_PEOPLE = (
    (_ONE, 3 * _ONE),
    (np.log(0.4 * _ONE), np.log(0.3 * _ONE)),
    (log_rest(_INNER), log_rest(0.4 * _INNER)),
)
_CUT = (100 * _ONE, 10 * _ONE, np.minimum(_RATE, 0.5))
_TRUNCATED = (_ONE, *cut_weights(*_CUT)[:2], _CUT[2], cut_weights(*_CUT)[2], _SHIFT)


def _finite() -> FiniteLoss:
    """Three outcomes of random chances with the unit and without it."""
    one, two = np.swapaxes(_RNG.dirichlet(np.ones(3), (2, SIZE)), 1, 2)
    return FiniteLoss(_ONE, tuple(np.log(one / two)), tuple(np.log(one)), 0.1 * _RATE)


SHIPPED: dict[type[PrivacyLoss], PrivacyLoss] = {
    type(loss): loss
    for loss in (
        SampledGaussianLoss(_OUTER, _RATE, _SHIFT),
        SwappedGaussianLoss(_OUTER, _RATE, _SHIFT),
        AntipodalGaussianLoss(_OUTER, _RATE, _INNER, _SHIFT),
        ZeroedGaussianLoss(_OUTER, _RATE, _INNER, _SHIFT),
        IndependentEpisodesLoss(_ONE, _RATE, _SHIFT / 3, _EPISODES),
        ZeroedEpisodesLoss(_ONE, _RATE, _SHIFT / 3, _EPISODES),
        TruncatedGaussianLoss(*_TRUNCATED, _ONE),
        ReplacedTruncatedLoss(*_TRUNCATED, _ONE),
        ZeroedTruncatedLoss(*_TRUNCATED, _ONE),
        GaussianMixtureLoss(_ONE, _RATE, _SHIFTS, _WEIGHTS),
        ReplacedMixtureLoss(_ONE, _RATE, _SHIFTS, _WEIGHTS),
        AllocatedGaussianLoss(_OUTER, **_EPOCH),
        AllocatedBoundingLoss(_OUTER, **_ABOVE),
        AllocatedAntipodalLoss(
            _ONE, **_EPOCH, inner_rate=np.resize([1.0, 0.3, 0.3], SIZE)
        ),
        AllocatedAntipodalBoundingLoss(_ONE, **_ABOVE, inner_rate=0.3 * _ONE),
        PeopleLoss(_ONE, 0.7 * _ONE, _SHIFT / 3, *_PEOPLE),
        ReplacedPeopleLoss(_ONE, 0.7 * _ONE, _SHIFT / 3, *_PEOPLE),
        LaplaceLoss(_ONE, _RATE, _SHIFT),
        _finite(),
        ZeroConcentratedLoss.of(_SHIFT, _INNER),
        RenyiCurveLoss(
            _ONE, 0 * _ONE, np.inf * _ONE, (_ONE, 9 * _ONE), (_RATE, 9 * _RATE)
        ),
    )
}


def concrete_kinds() -> set[type[PrivacyLoss]]:
    """Every class of the package that is a mechanism and can be made."""
    for module in pkgutil.iter_modules(losses.__path__, f"{losses.__name__}."):
        importlib.import_module(module.name)

    def below(kind: type) -> set[type]:
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    return {
        kind
        for kind in below(PrivacyLoss)
        if kind.__module__.startswith("jaxdp_episodic.")
        and not inspect.isabstract(kind)
    }
