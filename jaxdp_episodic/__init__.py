"""Differential-privacy accounting for episodic training, in JAX."""

from jaxdp_episodic.accounting.answers import EpsilonInfo, delta, epsilon, rdp
from jaxdp_episodic.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_num_steps,
    calibrate_rate,
)
from jaxdp_episodic.accounting.dp_event import from_dp_event
from jaxdp_episodic.accounting.gradients import epsilon_and_gradient
from jaxdp_episodic.accounting.intervals import delta_interval, epsilon_interval
from jaxdp_episodic.accounting.privacy_statement import PrivacyReport
from jaxdp_episodic.accounting.profile import privacy_profile
from jaxdp_episodic.accounting.report import privacy_report
from jaxdp_episodic.accounting.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accounting.views import (
    advantage,
    gdp_mu,
    trade_off,
    true_positive_rate,
)
from jaxdp_episodic.sampling.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.sampling.population import Population
from jaxdp_episodic.sampling.rates import inclusion_rates
from jaxdp_episodic.sampling.schemes import (
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)

__version__ = "0.1.0"

__all__ = [
    "ComposedSteps",
    "EpsilonInfo",
    "GaussianStep",
    "GroupedClasses",
    "IndependentEpisodes",
    "MultistageSampling",
    "Poisson",
    "Population",
    "PrivacyReport",
    "WithoutReplacement",
    "advantage",
    "calibrate_noise_multiplier",
    "calibrate_num_steps",
    "calibrate_rate",
    "compose",
    "delta",
    "delta_interval",
    "epsilon",
    "epsilon_and_gradient",
    "epsilon_interval",
    "from_dp_event",
    "gdp_mu",
    "inclusion_rates",
    "privacy_profile",
    "privacy_report",
    "rdp",
    "trade_off",
    "true_positive_rate",
]
