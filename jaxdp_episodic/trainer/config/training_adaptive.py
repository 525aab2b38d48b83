"""The config of an adaptive run: its options, noisy scores and rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import Scheme
from jaxdp_episodic.accountant.describe.step import GaussianStep, Sampling
from jaxdp_episodic.trainer.config.rules import RULES, options_of
from jaxdp_episodic.trainer.config.training_start import Share
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Flag,
    Float32,
    Positive,
    Text,
    whole,
)

CHECK = "check"
"""Name of the option that releases a noisy score."""
STEP = "step"
"""Name of the option that trains, if a config names none."""
_MOST_OPTIONS = 16  # in an untrusted config
_MOST_CHECKS = 10_000
# Splits of the package's own data that hold the training data.
_TRAINED_ON = ("train", "all")


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckConfig(CheckedSpec):
    """Noisy scores on private held-out tasks; see `PrivateValidation`."""

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "sampling": GaussianStep.nested_specs["sampling"]
    }

    # draws episodes from the held-out data; its sizes are public
    sampling: Sampling | Scheme
    number: Annotated[int, whole(1, _MOST_CHECKS)]  # most scores in the run
    split: Text = "validation"
    # of the budget, for all scores together, unless ``apart``; None: 0.05
    share: Share | None = None
    # held-out and training data share no protected unit, so each has the whole budget
    apart: Flag = False
    fixed: Flag = False
    error_bound: Float32 | None = None  # needed for regression
    normalizer: Float32 | None = None  # public number of episodes a score

    def check_values(self) -> None:
        """Refuses ``apart`` with training data or a share."""
        if self.apart and self.split in _TRAINED_ON:
            raise ValueError(
                "apart must be false with the training data, got "
                f"split={self.split!r}: a unit in both parts is charged for both"
            )
        if self.apart and self.share is not None:
            raise ValueError(
                "share must lie in (0, 1), and be left out with apart=true, got "
                f"{self.share!r}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class OptionConfig(CheckedSpec):
    """A kind of step that the run may take."""

    noise: Positive = 1.0  # factor of the run's noise multiplier
    # how often; None for all options: each has a price instead
    most: Count | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class AdaptiveConfig(CheckedSpec):
    """An adaptive budget instead of a plan.

    With quotas (``most`` of each option, or ``num_steps`` of the run if no options are
    named) the guarantee is that of all of them, in any order, and the noise is
    calibrated to it. Without quotas the price of an option follows from how many such
    steps alone the target permits, and the budget may be spent on any; the noise is
    then the step's own, or that of ``num_steps`` steps at the target.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "rule": RULES,
        "options": (OptionConfig,),
        "check": (CheckConfig,),
    }

    rule: Any = None  # one of `RULES`; None: a function given to `run_training`
    # kinds of steps by name
    options: Mapping[str, OptionConfig] = field(default_factory=dict)
    check: CheckConfig | None = None  # noisy scores for the rule, if any
    # options may only be taken in the order in which they are named; prices are lower
    only_lower: Flag = False

    def check_values(self) -> None:
        """Refuses options that do not fit together; adds one if there are none."""
        if not isinstance(self.options, Mapping):
            shown = _validation.shown(self.options)
            raise TypeError(f"options must be a table of options, got {shown}")
        if len(self.options) > _MOST_OPTIONS or CHECK in self.options:
            raise ValueError(
                f"options must be at most {_MOST_OPTIONS} and none named {CHECK!r}, "
                f"got {sorted(self.options)}"
            )
        options = dict(self.options) or {STEP: OptionConfig()}
        for name, option in options.items():
            if not isinstance(option, OptionConfig):
                shown = _validation.shown(option)
                raise TypeError(f"options.{name} must be a table, got {shown}")
        object.__setattr__(self, "options", MappingProxyType(options))
        quotas = [option.most for option in options.values()]
        if len(options) > 1 and None in quotas and set(quotas) != {None}:
            raise ValueError("most must be given for all options or for none")
        if self.only_lower and self.has_quotas:
            raise ValueError(
                "only_lower is for options with prices, whose cost depends on their "
                "order; with quotas it does not"
            )
        for part, classes in (("rule", RULES), ("check", (CheckConfig,))):
            value = getattr(self, part)
            if value is not None and not isinstance(value, classes):
                shown = _validation.shown(value)
                raise TypeError(f"{part} must be a table, got {shown}")
        known = [*options, *([CHECK] if self.check is not None else [])]
        for name in options_of(self.rule):
            if name not in known:
                raise ValueError(
                    f"rule must name options of the run, {known}, got {name!r}"
                )

    @property
    def has_quotas(self) -> bool:
        """Whether each option has a quota instead of a price."""
        is_one = len(self.options) == 1
        return is_one or all(one.most is not None for one in self.options.values())

    @property
    def check_share(self) -> float:
        """Share of the budget for all scores together; 0 if they do not share it."""
        if self.check is None or self.check.apart:
            return 0.0
        return 0.05 if self.check.share is None else self.check.share
