"""Differential-privacy accounting for episodic training, in JAX."""

from jaxdp_episodic.accountant.describe.bands import Bands as Bands
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks as PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses as GroupedClasses,
    IndependentEpisodes as IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.disjoint import (
    DisjointParts as DisjointParts,
    disjoint as disjoint,
)
from jaxdp_episodic.accountant.describe.menu import RuleBook as RuleBook
from jaxdp_episodic.accountant.describe.people import PersonBounds as PersonBounds
from jaxdp_episodic.accountant.describe.population import Population as Population
from jaxdp_episodic.accountant.describe.rates import inclusion_rates as inclusion_rates
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP as ApproximateDP,
    DiscreteLaplaceRelease as DiscreteLaplaceRelease,
    GaussianMixtureRelease as GaussianMixtureRelease,
    LaplaceRelease as LaplaceRelease,
    RandomizedResponse as RandomizedResponse,
    RenyiDP as RenyiDP,
    TruncatedPoissonRelease as TruncatedPoissonRelease,
    ZeroConcentratedDP as ZeroConcentratedDP,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling as MultistageSampling,
    Poisson as Poisson,
    RandomAllocation as RandomAllocation,
    ShuffledEpochs as ShuffledEpochs,
    WithoutReplacement as WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps as ComposedSteps,
    GaussianStep as GaussianStep,
    banded as banded,
    compose as compose,
)
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event as from_dp_event
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun as AdaptiveRun
from jaxdp_episodic.accountant.questions.api import (
    PrivacyInfo as PrivacyInfo,
    delta as delta,
    delta_interval as delta_interval,
    epsilon as epsilon,
    epsilon_interval as epsilon_interval,
    privacy_profile as privacy_profile,
    rdp as rdp,
)
from jaxdp_episodic.accountant.questions.attacker import (
    advantage as advantage,
    gdp_mu as gdp_mu,
    trade_off as trade_off,
    true_positive_rate as true_positive_rate,
)
from jaxdp_episodic.accountant.questions.bands import (
    BandChoices as BandChoices,
    choose_bands as choose_bands,
)
from jaxdp_episodic.accountant.questions.calibration import (
    calibrate_noise_multiplier as calibrate_noise_multiplier,
    calibrate_num_steps as calibrate_num_steps,
    calibrate_rate as calibrate_rate,
)
from jaxdp_episodic.accountant.questions.gradients import (
    epsilon_and_gradient as epsilon_and_gradient,
)
from jaxdp_episodic.accountant.report.report import (
    PrivacyReport as PrivacyReport,
    privacy_report as privacy_report,
)

__version__ = "1.0.0"
