"""Parallel composition: runs on disjoint parts of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import checked_name
from jaxdp_episodic.accountant.describe.releases import RELEASES, Release
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    one_protection,
    parts_of,
)

FIXED = "fixed"
CONTENT = "content"


@dataclass(frozen=True, eq=False)
class DisjointParts(Spec):
    """Runs on disjoint parts of the data; made by `disjoint`.

    Attributes:
      names: names of the parts, all different.
      parts: the run of each part: a step, a release or a composed run.
      membership: what assigns a unit to its part; see `disjoint`.
    """

    nested_specs = {"parts": (GaussianStep, *RELEASES, ComposedSteps)}
    traceable = ("parts",)

    names: tuple[str, ...]
    parts: tuple[AnyStep, ...]
    membership: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        for name in self.names:
            checked_name("names of parts", name)
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(
                f"parts must have at least one name, all different, got {self.names}"
            )
        if len(self.parts) != len(self.names):
            raise ValueError(
                f"parts must have one run for each of {self.names}, "
                f"got {len(self.parts)}"
            )
        for name, part in zip(self.names, self.parts, strict=True):
            what = "a GaussianStep, a release or a composed run"
            _validation.instance(f"part {name!r}", part, AnyStep, what)
        if self.membership is not None:
            _validation.choice("membership", self.membership, (FIXED, CONTENT))
        one_protection("disjoint parts", self.steps)
        self._check_membership()
        _ = self.shape

    def _check_membership(self) -> None:
        """Refuses a relation under which one change may affect two parts."""
        relations = {step.neighboring_relation for step in self.steps} - {None}
        (relation,) = relations or {None}
        if self.membership == FIXED or relation == "add_remove":
            return
        if self.membership == CONTENT:
            raise NotImplementedError(
                f"membership={CONTENT!r} under {relation} has no theorem here: a "
                "changed unit may leave one part and join another, so that two parts "
                f"change; covered: add_remove, or membership={FIXED!r}"
            )
        if relation != "zero_out":  # there each slot is public and in one part
            raise ValueError(
                f"membership must be given under {relation or 'an unknown relation'}: "
                f"{FIXED!r} if no change of the data moves a unit to another part, got "
                "None"
            )

    @property
    def steps(self) -> tuple[GaussianStep | Release, ...]:
        """The steps of all parts."""
        return tuple(step for part in self.parts for step in parts_of(part)[0])

    @property
    def have_counts(self) -> bool:
        """Whether every part is a composed run, which has its own counts."""
        return all(isinstance(part, ComposedSteps) for part in self.parts)


def disjoint(
    parts: Mapping[str, AnyStep], *, membership: str | None = None
) -> DisjointParts:
    """Returns runs on disjoint parts of the data, of which the most expensive counts.

    ``disjoint({"spring": step_a, "autumn": step_b})``. Each unit's data are in one part
    only. So at each delta the cost is that of the most expensive part, not the sum
    (parallel composition). The parts may run in any order, and each may use the
    releases of the others.

    Conditions that the library cannot check:

    * No protected unit is in two parts: no person with ``privacy_unit`` "person", no
      class if classes are protected, no copies of one example with "original".
    * The part of a unit does not depend on the data of others. A fixed list, a date of
      the record itself or a hash of its name are covered; a cluster computed from the
      data, or "the first thousand", is not.
    * Noise, rates and numbers of steps of all parts are fixed in advance.

    Args:
      parts: name of each part -> its step, release or run made by `compose`, all with
        the same privacy unit and relation. A release that uses the data of all parts
        belongs in the run of every part.
      membership: "fixed" if no change of the data moves a unit to another part (the
        part belongs to a place or a list); "content" if the record's content determines
        its part. Under replace_one it must be "fixed", because a record with new
        content may be in another part, and then two parts change. Under add_remove both
        are covered. Under zero_out slots belong to parts, so it is "fixed".

    Raises:
      TypeError: a part that is no step, release or composed run.
      ValueError: no parts, parts that protect different units, or a missing membership.
      NotImplementedError: membership "content" under zero_out or replace_one.

    Reference: McSherry (2009), "Privacy integrated queries", Theorem 4; docs/proofs.md,
    "Disjoint parts".
    """
    _validation.instance("parts", parts, Mapping, "a table of names and steps")
    return DisjointParts(tuple(parts), tuple(parts.values()), membership)


def refuse_disjoint(step: Any, what: str) -> None:
    """Refuses disjoint parts in a function that takes one run."""
    if isinstance(step, DisjointParts):
        raise NotImplementedError(
            f"{what} does not cover disjoint parts: call it for the run of each part, "
            f"{step.names}. Covered: epsilon, delta, rdp, their intervals, trade_off, "
            "true_positive_rate, advantage and gdp_mu. To calibrate, calibrate each "
            "part to the same target"
        )
