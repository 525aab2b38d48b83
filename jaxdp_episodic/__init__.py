"""Differential-privacy accounting for episodic training, in JAX."""

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    RandomAllocation,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import PersonBounds, Population
from jaxdp_episodic.accountant.describe.rates import inclusion_rates
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP,
    DiscreteLaplaceRelease,
    GaussianMixtureRelease,
    LaplaceRelease,
    RandomizedResponse,
    RenyiDP,
    TruncatedPoissonRelease,
    ZeroConcentratedDP,
)
from jaxdp_episodic.accountant.describe.runs import DisjointParts, RuleBook, disjoint
from jaxdp_episodic.accountant.describe.step import (
    Bands,
    ComposedSteps,
    GaussianStep,
    banded,
    compose,
)
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import (
    PrivacyInfo,
    delta,
    delta_interval,
    epsilon,
    epsilon_interval,
    privacy_profile,
    rdp,
)
from jaxdp_episodic.accountant.questions.bands import BandChoices, choose_bands
from jaxdp_episodic.accountant.questions.calibration import (
    calibrate_noise_multiplier,
    calibrate_num_steps,
    calibrate_rate,
)
from jaxdp_episodic.accountant.questions.gdp import (
    advantage,
    gdp_mu,
    trade_off,
    true_positive_rate,
)
from jaxdp_episodic.accountant.questions.gradients import epsilon_and_gradient
from jaxdp_episodic.accountant.report.report import PrivacyReport, privacy_report

__version__ = "1.0.0"

__all__ = [
    "AdaptiveRun",
    "ApproximateDP",
    "BandChoices",
    "Bands",
    "ComposedSteps",
    "DisjointParts",
    "DiscreteLaplaceRelease",
    "GaussianMixtureRelease",
    "PrivacyInfo",
    "GaussianStep",
    "GroupedClasses",
    "IndependentEpisodes",
    "LaplaceRelease",
    "MultistageSampling",
    "PeopleBlocks",
    "PersonBounds",
    "Poisson",
    "Population",
    "PrivacyReport",
    "RandomAllocation",
    "RandomizedResponse",
    "RenyiDP",
    "RuleBook",
    "ShuffledEpochs",
    "TruncatedPoissonRelease",
    "WithoutReplacement",
    "ZeroConcentratedDP",
    "advantage",
    "banded",
    "calibrate_noise_multiplier",
    "calibrate_num_steps",
    "calibrate_rate",
    "choose_bands",
    "compose",
    "delta",
    "delta_interval",
    "disjoint",
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
