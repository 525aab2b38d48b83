"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `designs`, `mechanisms`, `population`, `rates`, `releases`, `schemes`,
`serialization`, `spec`, `step`, `tree`.
"""

from jaxdp_episodic.describe.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.rates import (
    PathRates,
    inclusion_rates,
    max_contributions,
    path_rates,
)
from jaxdp_episodic.describe.schemes import (
    MultistageSampling,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.describe.serialization import spec_from_dict, spec_to_dict
from jaxdp_episodic.describe.spec import Spec, frozen_number
from jaxdp_episodic.describe.tree import DistinctPaths

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
