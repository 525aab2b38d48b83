"""The joint cost of several ledgers: different runs, and copies of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic._validation import shown
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.questions.dominating_pair import shared_epoch
from jaxdp_episodic.trainer.run.ledger_file import (
    LedgerContent,
    LedgerError,
    read_ledger,
    refusing,
    run_file,
)


class Beginning(NamedTuple):
    """The common beginning of a ledger and another one of the same run."""

    of: int  # index of the other ledger
    charged: tuple[int, ...]  # number of common charges of each group of steps
    is_all: bool  # whether the whole common beginning is known


class LedgersContent(NamedTuple):
    """The contents of several ledgers; see `read_ledgers`."""

    names: tuple[str, ...]  # their names in messages
    contents: tuple[LedgerContent, ...]  # the longest ones first
    # The common beginning with an earlier one; None: no earlier one is of this run.
    beginnings: tuple[Beginning | None, ...]

    @property
    def delta(self) -> float:
        """The delta of all runs."""
        self._refuse_different("delta", [one.delta for one in self.contents])
        return self.contents[0].delta

    @property
    def planned(self) -> tuple[float, float]:
        """Epsilon and delta of all plans, charged if a run chose its end adaptively."""
        owing = [
            content
            for content, beginning in zip(self.contents, self.beginnings, strict=True)
            if beginning is None or sum(beginning.charged) < content.charged
        ]
        epsilon = sum(one.target_epsilon for one in owing)
        delta = sum(one.delta for one in owing)
        return (float("inf") if self.num_shared_epochs else epsilon), delta

    def run_charged(self) -> tuple[GaussianStep | ComposedSteps, int | None]:
        """Returns the step and the count to be charged for all runs together."""
        if len(self.contents) == 1:
            return self.contents[0].run_charged()
        last = [content.a_step for content in self.contents]
        for name in ("privacy_unit", "neighboring_relation", "population"):
            self._refuse_different(name, [getattr(step, name) for step in last])
        self._refuse_copies()
        whole: dict[GaussianStep, int] = {}
        parts = []
        for step, count in self._uses():
            if count % int(step.cycle) == 0:
                whole[step] = whole.get(step, 0) + count
            else:  # incomplete epochs and rounds of groups are not merged
                parts.append((step, count))
        uses = [*whole.items(), *parts]
        return uses[0] if len(uses) == 1 else (compose(*uses), None)

    @property
    def num_shared_epochs(self) -> int:
        """Number of epochs of which several copies released a part or all."""
        return sum(times > 1 for _, times in self._shared_epochs().values())

    def _uses(self) -> Iterator[tuple[GaussianStep, int]]:
        """Yields steps and counts of all ledgers together."""
        shared = self._shared_epochs()
        for index, content in enumerate(self.contents):
            for group, (step, owed) in enumerate(content.groups_owed()):
                first, length = self._in_common(index, group), int(step.cycle)
                # From the first epoch that no other ledger has.
                left = max(owed - -(-first // length) * length, 0)
                for key in (key for key in shared if key[:2] == (index, group)):
                    left -= min(owed - key[2] * length, length)
                    yield shared_epoch(step, *shared[key])
                yield step, left

    def _shared_epochs(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """Epochs within which copies part: key to steps, and the number of copies.

        A step is released at most once by each copy; copies that parted later in the
        epoch are counted as if all had released all of it.
        """
        indices: dict[tuple[int, int, int], list[int]] = {}
        for index, content in enumerate(self.contents):
            for group, (step, charged) in enumerate(content.groups):
                own, length = self._in_common(index, group), int(step.cycle)
                if own % length == 0 or charged <= own:
                    continue
                start, owner = own // length * length, index
                while self._in_common(owner, group) > start:
                    beginning = self.beginnings[owner]
                    assert beginning is not None  # there is something in common
                    owner = beginning.of
                key = owner, group, start // length
                indices.setdefault(key, [owner]).append(index)
        found = {}
        for (owner, group, epoch), copies in indices.items():
            length = int(self.contents[owner].groups[group][0].cycle)
            owed = max(self.contents[one].groups_owed()[group][1] for one in copies)
            owed = min(owed - epoch * length, length)
            found[owner, group, epoch] = owed, len(copies)
        return found

    def _in_common(self, index: int, group: int) -> int:
        """Number of steps of a group that an earlier ledger has too."""
        beginning = self.beginnings[index]
        if beginning is None:
            return 0
        return (*beginning.charged, *[0] * (group + 1))[group]

    def _refuse_different(self, name: str, values: list[Any]) -> None:
        pairs = zip(self.names, values, strict=True)
        given = [(ledger, value) for ledger, value in pairs if value is not None]
        for ledger, value in given:
            if value != given[0][1]:
                raise ValueError(
                    f"ledgers must have the same {name}, got {shown(given[0][1])} in "
                    f"{given[0][0]} and {shown(value)} in {ledger}"
                )

    def _refuse_copies(self) -> None:
        """Refuses copies of one run that have no joint cost here."""
        for name, content, beginning in zip(*self, strict=True):
            if beginning is None:
                continue
            both, steps = f"{name} and {self.names[beginning.of]}", content.groups
            if not beginning.is_all and any(epoch_scheme(s.design) for s, _ in steps):
                raise NotImplementedError(
                    f"{both} are of one run, and were written by an older version "
                    "without names of processes: the epochs that they share are "
                    "unknown, and cannot be charged twice"
                )
            if any(step.bands for step, _ in steps):
                raise NotImplementedError(
                    f"{both} are copies of one run with bands, which are not covered "
                    "together: one group may have the most steps in both"
                )
            if content.adaptive is not None:
                raise NotImplementedError(
                    f"{both} are copies of one adaptive run, which are not covered "
                    "together"
                )


def read_ledgers(paths: Sequence[Path]) -> LedgersContent:
    """Returns the contents of several ledgers after checking all of each."""
    found = [(read_ledger(path), path) for path in paths]
    found.sort(key=lambda one: -one[0].charged)
    contents = tuple(content for content, _ in found)
    beginnings: list[Beginning | None] = []
    for index, (content, path) in enumerate(found):
        common = [
            _common(path, found[other][1], other)
            for other in range(index)
            if contents[other].run == content.run
        ]
        beginnings.append(None)
        if common:
            is_all = all(beginning.is_all for beginning in common)
            # The first one with the longest common beginning.
            most = max(common, key=lambda beginning: sum(beginning.charged))
            beginnings[index] = most._replace(is_all=is_all)
    names = tuple(str(path) for _, path in found)
    return LedgersContent(names, contents, tuple(beginnings))


def _common(path: Path, other: Path, index: int) -> Beginning:
    """The charges of the same processes at the beginning of two ledgers of one run."""
    charged: list[int] = []
    with refusing(path), run_file(path) as ours, run_file(other) as theirs:
        if ours.start != theirs.start:
            raise LedgerError(
                f"{path} and {other} have the same run name but different beginnings: "
                "one of them was rewritten"
            )
        step = None
        for own, their in zip(ours.charges(), theirs.charges(), strict=False):
            if own.hash != their.hash:
                break
            if not own.session:
                return Beginning(index, tuple(charged), is_all=False)
            if own.step != step:
                charged, step = [*charged, 0], own.step
            charged[-1] += 1
    return Beginning(index, tuple(charged), is_all=True)
