"""Accountants for opacus (PyTorch); importing this module registers "episodic"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.step import GaussianStep, compose
from jaxdp_episodic.accountant.interop.dp_event import gaussian
from jaxdp_episodic.accountant.questions.api import METHODS, epsilon
from jaxdp_episodic.files.optional import check_version, require

_accountants = require("opacus.accountants", purpose="this accountant", extra="opacus")

# Versions of opacus whose optimizers are covered.
_VERSIONS = ("1.6",)
check_version("opacus", _VERSIONS)
# Optimizers of opacus that release only a noised sum of clipped gradients.
# AdaClipDPOptimizer also divides by the number of drawn examples, without noise.
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
# Number of values of torch.rand, which opacus' loader compares with the sample rate.
_RANDOM_VALUES = 2.0**24


class EpisodicAccountant(_accountants.IAccountant):
    """Accounts opacus' own loader: Poisson sampling, each example clipped.

    The loader of ``make_private(..., poisson_sampling=True)``, the default, draws every
    example independently. Its probability is the next multiple of 2**-24 above
    ``sample_rate``, and this one is accounted. With ``poisson_sampling=False`` the
    loader shuffles, and the result is wrong.

    Args:
      method: "exact" (default), "pld" or "rdp"; see `epsilon`.
      neighboring_relation: "add_remove" (default, as in opacus), "replace_one" or
        "zero_out".

    Attributes:
      history: list of ``(noise_multiplier, sample_rate, number of steps)``, as in
        opacus' accountants; saved by ``state_dict``, loaded by ``load_state_dict``.
    """

    def __init__(
        self, method: str = "exact", neighboring_relation: str = "add_remove"
    ) -> None:
        self.history: list[tuple[float, float, int]] = []
        self.method = _validation.choice("method", method, METHODS)
        self.neighboring_relation = _validation.choice(
            "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
        )

    @classmethod
    def mechanism(cls) -> str:
        """Returns the name under which it is registered with opacus."""
        return NAME

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one step."""
        new = _noise_and_rate(noise_multiplier, sample_rate)
        if self.history and self.history[-1][:2] == new:
            self.history[-1] = (*new, self.history[-1][2] + 1)
        else:
            self.history.append((*new, 1))

    def get_epsilon(self, delta: float, **unused: Any) -> float:
        """Returns epsilon of all recorded steps at a delta in [0, 1]; 0.0 without any.

        Further arguments, which opacus passes on, are ignored.
        """
        counts: dict[GaussianStep, int] = {}
        # Other code, such as opacus' calibration, may have written the history.
        for entry in self.history:
            if len(entry) != 3:
                raise ValueError(
                    "history must have entries (noise_multiplier, sample_rate, number "
                    f"of steps), got {_validation.shown(entry)}"
                )
            step = self._step(*_noise_and_rate(*entry[:2]))
            counts[step] = counts.get(step, 0) + entry[2]
        run = compose(*(counts or {self._step(1.0, 0.0): 0}).items())
        return float(epsilon(run, delta=delta, method=self.method))

    def __len__(self) -> int:
        """Returns the number of entries of the history, as opacus' accountants do."""
        return len(self.history)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns the hook that opacus' optimizer calls after every step.

        The hook raises ValueError for a step over several accumulated draws, and
        NotImplementedError for unknown optimizers and for "adaptive" clipping.
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
                    "accumulated_iterations must be 1, one sample a step (use opacus' "
                    "BatchMemoryManager for large batches), got "
                    f"{optimizer.accumulated_iterations}"
                )
            record(optimizer)

        return hook

    def _step(self, noise_multiplier: float, sample_rate: float) -> GaussianStep:
        rate = drawn_rate(sample_rate)
        return gaussian(rate, noise_multiplier, self.neighboring_relation)


class StepAccountant(EpisodicAccountant):
    """Accounts the step of a `step_loader`.

    Set ``engine.accountant = StepAccountant(loader)`` before ``make_private(...,
    poisson_sampling=False)``, with the noise of `calibrate_noise_multiplier`. The
    sample rate that opacus passes must be 1 over the length of the loader.
    ``make_private_with_epsilon`` raises: it would calibrate for Poisson sampling.

    Args:
      loader: made by `step_loader`.
      method: "exact" (default), "pld" or "rdp".
    """

    def __init__(self, loader: Any, method: str = "exact") -> None:
        # The history has the noise of every step.
        step = dataclasses.replace(loader.batch_sampler.step, noise_multiplier=1.0)
        super().__init__(method, step.neighboring_relation)
        self.sampling_step: GaussianStep = step
        self._told_rate = 1 / len(loader)

    @classmethod
    def mechanism(cls) -> str:
        """Returns a name that is not registered, so that opacus cannot create one."""
        return "episodic step"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one step.

        Raises:
          ValueError: another sample rate than 1 over the length of the loader.
        """
        if sample_rate != self._told_rate:
            raise ValueError(
                f"sample_rate must be {self._told_rate!r}, 1 over the length of the "
                f"loader whose sampling is accounted, got {sample_rate!r}"
            )
        super().step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    def state_dict(self, destination: Any = None) -> Any:
        """Returns opacus' state (history and name) and the step that is drawn."""
        destination = super().state_dict(destination)
        destination["sampling_step"] = self.sampling_step.to_dict()
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the state of `state_dict`.

        Raises:
          ValueError: a state without history, of another accountant, or of another
            step.
        """
        if state_dict and state_dict.get("sampling_step", ()) != (
            self.sampling_step.to_dict()
        ):
            raise ValueError(
                "state_dict must have the step of this loader, got "
                f"{_validation.shown(state_dict.get('sampling_step'))}"
            )
        super().load_state_dict(state_dict)

    def _step(self, noise_multiplier: float, sample_rate: float) -> GaussianStep:
        return dataclasses.replace(
            self.sampling_step, noise_multiplier=noise_multiplier
        )


def drawn_rate(sample_rate: float) -> float:
    """Returns an upper bound of the probability with which opacus' loader draws."""
    single = float(np.float32(sample_rate))
    return min(1.0, max(sample_rate, np.ceil(single * _RANDOM_VALUES) / _RANDOM_VALUES))


def _noise_and_rate(noise_multiplier: Any, sample_rate: Any) -> tuple[float, float]:
    """Returns the checked noise multiplier and sample rate."""
    check = _validation.nonnegative_array
    noise = _validation.one("noise_multiplier", noise_multiplier, check)
    rate = _validation.one("sample_rate", sample_rate, _validation.probability_array)
    return noise, rate


# Forced, as this module may be imported again.
_accountants.register_accountant(NAME, EpisodicAccountant, force=True)
