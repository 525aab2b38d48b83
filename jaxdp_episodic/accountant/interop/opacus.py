"""Accountants for opacus, PyTorch's loop: importing this registers "episodic"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.schemes import Poisson
from jaxdp_episodic.accountant.describe.step import GaussianStep, compose
from jaxdp_episodic.accountant.questions.api import METHODS, epsilon
from jaxdp_episodic.files.optional import check_version, require

_accountants = require("opacus.accountants", purpose="this accountant", extra="opacus")

# Versions whose optimizers were read here.
_VERSIONS = ("1.6",)
check_version("opacus", _VERSIONS)
# Their optimizers that release one noised sum of clipped gradients, and nothing else.
# AdaClipDPOptimizer divides by the number of examples drawn, without any noise.
_OPTIMIZERS = (
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "FSDPOptimizerFastGradientClipping",
    "SimpleDistributedPerLayerOptimizer",
)

NAME = "episodic"
# Equally likely values of torch.rand, by which opacus' loader decides on each example.
_RANDOM_VALUES = 2.0**24


class _HistoryAccountant(_accountants.IAccountant):
    """What both accountants share: opacus' history, answered in one composed run.

    Attributes:
      history: ``(noise_multiplier, sample_rate, number of steps)``, in order, as the
        accountants of opacus have it; saved and loaded by ``state_dict`` and
        ``load_state_dict``.
      method: of the answers, "exact", "pld" or "rdp".
    """

    def __init__(self, method: str = "exact") -> None:
        self.history: list[tuple[float, float, int]] = []
        self.method = _validation.choice("method", method, METHODS)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one step."""
        new = _noise_and_rate(noise_multiplier, sample_rate)
        if self.history and self.history[-1][:2] == new:
            self.history[-1] = (*new, self.history[-1][2] + 1)
        else:
            self.history.append((*new, 1))

    def get_epsilon(self, delta: float, **unused: Any) -> float:
        """Returns epsilon of all recorded steps at a delta in [0, 1]; 0.0 of none.

        What opacus means for its optimizer is handed on here, and is not used.
        """
        counts: dict[GaussianStep, int] = {}
        # Other code, opacus' own search too, may have written the history.
        for entry in self.history:
            if len(entry) != 3:
                raise ValueError(
                    "history must have entries (noise_multiplier, sample_rate, number "
                    f"of steps), got {_validation.shown(entry)}"
                )
            noise_multiplier, sample_rate, count = entry
            step = self._step(*_noise_and_rate(noise_multiplier, sample_rate))
            counts[step] = counts.get(step, 0) + count
        if not counts:
            return 0.0
        run = compose(*counts.items())
        return float(epsilon(run, delta=delta, method=self.method))

    def __len__(self) -> int:
        """Number of entries of the history, as in opacus' own accountants."""
        return len(self.history)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns what opacus' optimizer calls after every step.

        The hook refuses (ValueError) a step over several accumulated draws: a unit may
        be in more than one of them, which no ``sample_rate`` describes. It refuses
        (NotImplementedError) optimizers that are not known, and "adaptive" clipping,
        which uses the number of examples that were drawn as it is.
        """
        record = super().get_optimizer_hook_fn(sample_rate)

        def hook(optimizer: Any) -> None:
            name = type(optimizer).__name__
            if name not in _OPTIMIZERS:
                raise NotImplementedError(
                    f"{name} is not covered: it may release more than a noised sum; "
                    f"covered: {', '.join(_OPTIMIZERS)}"
                )
            if optimizer.accumulated_iterations != 1:
                raise ValueError(
                    "accumulated_iterations must be 1, one draw a step (for large "
                    "batches opacus has BatchMemoryManager), got "
                    f"{optimizer.accumulated_iterations}"
                )
            record(optimizer)

        return hook

    def _step(self, noise_multiplier: float, sample_rate: float) -> GaussianStep:
        raise NotImplementedError


class EpisodicAccountant(_HistoryAccountant):
    """Accounts what opacus' own loader draws: Poisson sampling, each example clipped.

    The loader of ``make_private(..., poisson_sampling=True)``, the default, takes every
    example by a coin of its own whose chance is a multiple of 2**-24, the next one
    above ``sample_rate`` (1e-6 is really 1.013e-6); the rate is rounded up so before it
    is accounted. With ``poisson_sampling=False`` the loader shuffles: this accountant
    and opacus' own then describe draws that do not happen.

    Args:
      method: "exact" (default), "pld" or "rdp"; see `epsilon`.
      neighboring_relation: "add_remove" (default, as in opacus), "replace_one" or
        "zero_out".
    """

    def __init__(
        self, method: str = "exact", neighboring_relation: str = "add_remove"
    ) -> None:
        super().__init__(method)
        self.neighboring_relation = _validation.choice(
            "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
        )

    @classmethod
    def mechanism(cls) -> str:
        """The name under which opacus knows it."""
        return NAME

    def _step(self, noise_multiplier: float, sample_rate: float) -> GaussianStep:
        return GaussianStep(
            Poisson("example", sampling_probability=drawn_rate(sample_rate)),
            noise_multiplier=noise_multiplier,
            neighboring_relation=self.neighboring_relation,
        )


class StepAccountant(_HistoryAccountant):
    """Accounts what a `step_loader` draws: the step is the loader's own.

    ``engine.accountant = StepAccountant(loader)`` before ``make_private(...,
    poisson_sampling=False)``. The noise is that of opacus' optimizer; the sample rate
    that opacus tells, 1 over the length of the loader, only has to be that number.
    ``make_private_with_epsilon`` raises, as it would calibrate for Poisson sampling at
    that rate: take the noise of `calibrate_noise_multiplier` for ``make_private``.

    Args:
      loader: made by `step_loader`.
      method: "exact" (default), "pld" or "rdp".
    """

    def __init__(self, loader: Any, method: str = "exact") -> None:
        super().__init__(method)
        # The noise of every step is in the history.
        step = dataclasses.replace(loader.batch_sampler.step, noise_multiplier=1.0)
        self.sampling_step: GaussianStep = step
        self._told_rate = 1 / len(loader)

    @classmethod
    def mechanism(cls) -> str:
        """A name that opacus does not know: it cannot make a fresh one."""
        return "episodic step"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one step.

        Raises:
          ValueError: another sample rate than 1 over the length of the loader.
        """
        if sample_rate != self._told_rate:
            raise ValueError(
                f"sample_rate must be {self._told_rate!r}, 1 over the length of the "
                f"loader whose draws are accounted, got {sample_rate!r}"
            )
        super().step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    def state_dict(self, destination: Any = None) -> Any:
        """Returns history and name as opacus has them, and the step that is drawn."""
        destination = super().state_dict(destination)
        destination["sampling_step"] = self.sampling_step.to_dict()
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes over a history.

        Raises:
          ValueError: a state without history, of another accountant, or of steps that
            were drawn in another way.
        """
        if state_dict and state_dict.get("sampling_step", ()) != (
            self.sampling_step.to_dict()
        ):
            raise ValueError(
                "state_dict must be of steps drawn as this loader draws them, got "
                f"{_validation.shown(state_dict.get('sampling_step'))}"
            )
        super().load_state_dict(state_dict)

    def _step(self, noise_multiplier: float, sample_rate: float) -> GaussianStep:
        return dataclasses.replace(
            self.sampling_step, noise_multiplier=noise_multiplier
        )


def drawn_rate(sample_rate: float) -> float:
    """Returns the chance that opacus' loader really draws an example with, or more."""
    single = float(np.float32(sample_rate))
    return min(1.0, max(sample_rate, np.ceil(single * _RANDOM_VALUES) / _RANDOM_VALUES))


def _noise_and_rate(noise_multiplier: Any, sample_rate: Any) -> tuple[float, float]:
    """Two checked numbers."""
    noise = _validation.nonnegative_array("noise_multiplier", noise_multiplier)
    rate = _validation.probability_array("sample_rate", sample_rate)
    return (
        float(_validation.single("noise_multiplier", noise)),
        float(_validation.single("sample_rate", rate)),
    )


# Again after a reload of this module.
_accountants.register_accountant(NAME, EpisodicAccountant, force=True)
