"""What is drawn in a step: schemes, designs, real trees, and the rates they give."""

from jaxdp_episodic.sampling.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.sampling.draw import Draw, EpisodeSampler, step_generator
from jaxdp_episodic.sampling.population import Population
from jaxdp_episodic.sampling.rates import (
    PathRates,
    inclusion_rates,
    max_contributions,
    path_rates,
)
from jaxdp_episodic.sampling.schemes import (
    MultistageSampling,
    Poisson,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.sampling.serialization import spec_from_dict, spec_to_dict
from jaxdp_episodic.sampling.spec import Spec, frozen_number
from jaxdp_episodic.sampling.tree_paths import DistinctPaths

__all__ = [
    "DistinctPaths",
    "Draw",
    "EpisodeSampler",
    "GroupedClasses",
    "IndependentEpisodes",
    "MultistageSampling",
    "PathRates",
    "Poisson",
    "Population",
    "Scheme",
    "Spec",
    "WithoutReplacement",
    "frozen_number",
    "inclusion_rates",
    "max_contributions",
    "path_rates",
    "spec_from_dict",
    "spec_to_dict",
    "step_generator",
]
