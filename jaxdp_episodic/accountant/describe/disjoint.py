"""Parts of the data that share nobody, each with a run of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.mechanisms import RELEASES
from jaxdp_episodic.accountant.describe.releases import Release
from jaxdp_episodic.accountant.describe.schemes import checked_name
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    one_protection,
)

FIXED = "fixed"
CONTENT = "content"


@dataclass(frozen=True, eq=False)
class DisjointParts(Spec):
    """Runs on parts of the data that share nobody; made by `disjoint`.

    Attributes:
      names: of the parts, each once.
      parts: what is taken of each: a step, a release or a composed run.
      membership: what decides in which part somebody is; see `disjoint`.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "parts": (GaussianStep, *RELEASES, ComposedSteps)
    }
    traceable: ClassVar[tuple[str, ...]] = ("parts",)

    names: tuple[str, ...]
    parts: tuple[AnyStep, ...]
    membership: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        for name in self.names:
            checked_name("names of parts", name)
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(f"parts must have different names, got {self.names}")
        if len(self.parts) != len(self.names):
            raise ValueError(
                f"parts must be one for each of {self.names}, got {len(self.parts)}"
            )
        for name, part in zip(self.names, self.parts, strict=True):
            if not isinstance(part, AnyStep):
                raise TypeError(
                    f"part {name!r} must be a GaussianStep, a release or a composed "
                    f"run, got {_validation.shown(part)}"
                )
        if self.membership is not None:
            _validation.choice("membership", self.membership, (FIXED, CONTENT))
        one_protection("disjoint parts", self.steps)
        self._check_membership()
        _ = self.shape

    def _check_membership(self) -> None:
        """Refuses a relation under which one change may be in two parts."""
        relations = {step.neighboring_relation for step in self.steps} - {None}
        (relation,) = relations or {None}
        if self.membership == FIXED or relation == "add_remove":
            return
        if self.membership == CONTENT:
            raise NotImplementedError(
                f"membership={CONTENT!r} under {relation} has no theorem here: who "
                "changes may leave one part and join another, so that two parts "
                f"change; covered: add_remove, or membership={FIXED!r}"
            )
        if relation != "zero_out":  # whose slots are public, and in one part each
            raise ValueError(
                f"membership must be given under {relation or 'an unknown relation'}: "
                f"{FIXED!r} if no change can move anybody to another part, got None"
            )

    @property
    def steps(self) -> tuple[GaussianStep | Release, ...]:
        """The steps of all parts."""
        return tuple(
            step
            for part in self.parts
            for step in (part.steps if isinstance(part, ComposedSteps) else (part,))
        )

    @property
    def have_counts(self) -> bool:
        """Whether every part is a composed run, with counts of its own."""
        return all(isinstance(part, ComposedSteps) for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all parts."""
        shapes = zip(self.names, self.parts, strict=True)
        return _validation.broadcast_shape(
            **{f"part {n}": np.empty(part.shape, np.uint8) for n, part in shapes}
        )


def disjoint(
    parts: Mapping[str, AnyStep], *, membership: str | None = None
) -> DisjointParts:
    """Returns runs on parts of the data that share nobody: the largest price counts.

    ``disjoint({"spring": step_a, "autumn": step_b})``. Everybody's data are in one part
    alone, so nobody is in the data of more than one run: at each delta the cost is that
    of the part that costs most, not the sum (parallel composition). The parts may run
    in any order, and each may use what the others have released.

    Conditions that the library cannot check:

    * Nobody is in two parts: with ``privacy_unit`` "person" no person, with a class no
      class, with "original" no copy of the same example.
    * Which part somebody is in does not depend on anybody else's data. A fixed list, a
      date of the record itself or a hash of its name will do; a cluster that was found
      in the data, or "the first thousand", will not.
    * Noise, rates and numbers of steps of all parts are fixed in advance.

    Args:
      parts: name of each part -> its step, release or run made by `compose`, all with
        one privacy unit and relation. What is taken of everybody's data goes into the
        run of every part.
      membership: "fixed" if a part is that of a place or a list, which no change of the
        data moves anybody out of; "content" if it is read off the record itself. Under
        replace_one it must be given and be "fixed", as a record with another content
        may be in another part, and two parts then change. Under add_remove both are
        covered; under zero_out slots belong to parts, so it is "fixed".

    Raises:
      TypeError: what is no step, release or composed run.
      ValueError: no parts, parts that do not protect the same units, or a membership
        that is missing.
      NotImplementedError: a membership by content under another relation.

    Reference: McSherry (2009), "Privacy integrated queries", Theorem 4; docs/proofs.md,
    "Disjoint parts".
    """
    if not isinstance(parts, Mapping):
        raise TypeError(
            f"parts must map names to steps, got {_validation.shown(parts)}"
        )
    return DisjointParts(tuple(parts), tuple(parts.values()), membership)


def refuse_disjoint(step: Any, what: str) -> None:
    """Refuses disjoint parts where a question is of one run, naming what does."""
    if isinstance(step, DisjointParts):
        raise NotImplementedError(
            f"{what} does not cover disjoint parts: ask it of the run of each part, "
            f"{step.names}. Covered: epsilon, delta, rdp, their intervals, trade_off, "
            "true_positive_rate, advantage and gdp_mu; calibrate each part to the same "
            "target"
        )
