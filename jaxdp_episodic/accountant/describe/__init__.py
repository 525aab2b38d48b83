"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `designs`, `mechanisms`, `population`, `rates`, `releases`, `schemes`,
`serialization`, `spec`, `step`, `tree`.
"""

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.rates import (
    PathRates,
    inclusion_rates,
    max_contributions,
    path_rates,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.serialization import (
    spec_from_dict,
    spec_to_dict,
)
from jaxdp_episodic.accountant.describe.spec import Spec, frozen_number
from jaxdp_episodic.accountant.describe.tree import DistinctPaths

__all__ = [
    "DistinctPaths",
    "GroupedClasses",
    "IndependentEpisodes",
    "MultistageSampling",
    "PathRates",
    "Poisson",
    "Population",
    "RandomAllocation",
    "Scheme",
    "ShuffledEpochs",
    "Spec",
    "WithoutReplacement",
    "frozen_number",
    "inclusion_rates",
    "max_contributions",
    "path_rates",
    "spec_from_dict",
    "spec_to_dict",
]
