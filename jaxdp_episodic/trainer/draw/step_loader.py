"""A PyTorch loader that draws what a step describes: users, then their examples.

The same step object is accounted and drawn. Needs torch (extra "opacus"); only
`interop.opacus` imports this module.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import MultistageSampling, epoch_scheme
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.trainer.data.people import Truncation, truncated
from jaxdp_episodic.trainer.data.table import numbered
from jaxdp_episodic.trainer.draw.generators import step_generator
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler

_data = require("torch.utils.data", purpose="step_loader", extra="opacus")


def step_loader(
    dataset: Any,
    step: GaussianStep,
    *,
    num_steps: int,
    units: Mapping[str, Any] | None = None,
    owners: Any = None,
    truncate: bool = False,
    entropy: int | None = None,
    first_step: int = 0,
    **options: Any,
) -> Any:
    """Returns a ``DataLoader`` whose batches are the draws of a step.

    Each pass gives ``num_steps`` new draws. A batch has one row per clipped unit. It
    may be empty; its tensors then have no rows.

    * If ``clip_unit`` is the last level, rows are the drawn examples, as in any loader.
    * If it is a level above, such as "user", tensors are ``(rows, slots, ...)``, with
      as many slots as examples can be drawn from a unit. A mask comes last in the tuple
      (in a mapping under "mask"): True where a slot holds an example. Other slots are
      zero. The model must treat a row as one sample, and its loss must be one number
      per row.

    Args:
      dataset: has a length, and ``dataset[i]`` gives tensors, numbers, or tuples, lists
        or mappings of these; all examples have the same structure.
      step: the accounted step, of a `MultistageSampling` whose levels are ``units``
        followed by the level of examples. It must not have a `Population`, bands or
        epochs, nor use zero_out, where rows with a null would have to contribute zero.
      num_steps: batches per pass, >= 1.
      units: level name -> (R,) ids of the examples, top level first; global, as in
        `Population.from_ids`. None: there is no level above the examples.
      owners: (R,) ids of the one person who owns each example; required if the step
        protects a "person", whose examples must be within the step's `PersonBounds`.
      truncate: False: a person beyond the bounds is an error. True: the excess
        examples, chosen as in `truncated`, are never drawn;
        ``loader.batch_sampler.truncation`` says how many.
      entropy: secret seed of the draws, whole number >= 0; None: taken from the
        operating system.
      first_step: first draw of a resumed run: ``loader.batch_sampler.next_step``.
      **options: arguments of ``DataLoader``, such as ``num_workers``.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: units or sizes that do not fit the step, or a person beyond the
        bounds.
      NotImplementedError: another design, or such a step.
    """
    about = units, owners, truncate, entropy, first_step
    draws = StepDraws(step, len(dataset), num_steps, *about)
    rows = _Rows(dataset, draws.sampler.slot_shape)
    return _data.DataLoader(rows, batch_sampler=draws, collate_fn=rows, **options)


class StepDraws:
    """The batch sampler of a `step_loader`: lists of rows, one per clipped unit."""

    def __init__(
        self,
        step: GaussianStep,
        num_examples: int,
        num_steps: int,
        units: Mapping[str, Any] | None = None,
        owners: Any = None,
        truncate: bool = False,
        entropy: int | None = None,
        first_step: int = 0,
    ) -> None:
        if not isinstance(step, GaussianStep):
            raise TypeError(f"step must be a GaussianStep, got {step!r}")
        if not isinstance(step.design, MultistageSampling):
            raise NotImplementedError(
                "step_loader supports MultistageSampling (users, then examples), got "
                f"{type(step.design).__name__}"
            )
        parts = {"a Population": step.population, "bands": step.bands}
        parts["epochs"] = epoch_scheme(step.design)
        more = " and ".join(name for name in parts if parts[name] is not None)
        if more or step.neighboring_relation == "zero_out":
            raise NotImplementedError(
                "step_loader supports steps under add_remove or replace_one, without a "
                "Population, bands or epochs, got "
                f"{step.neighboring_relation}{' with ' + more if more else ''}"
            )
        noise = np.asarray(step.noise_multiplier)
        _validation.single("noise_multiplier", noise)  # a run has one setting
        self.step = step  # which `StepAccountant` accounts
        level = step.design.level_names[-1]
        examples = np.arange(num_examples)
        table = numbered(
            examples, units=units or {}, example_level=level, owners=owners
        )
        self.truncation: Truncation | None = None  # None: no bounds of a person
        if step.people is not None:
            table, self.truncation = truncated(table, step.people, truncate=truncate)
        self._order = np.asarray(table.features)
        self.sampler = EpisodeSampler(
            step.design, table.population, clip_unit=str(step.clip_unit)
        )
        self._num_steps = _validation.whole_number("num_steps", num_steps)
        self._entropy = secrets.randbits(128) if entropy is None else entropy
        step_generator(self._entropy, first_step)  # checks that both are whole numbers
        self.next_step = first_step  # number of the next draw; none is repeated

    def __len__(self) -> int:
        """Batches per pass."""
        return self._num_steps

    def __iter__(self) -> Iterator[list[Any]]:
        """Draws ``num_steps`` times; a row is an index, or an array (-1: empty)."""
        for _ in range(self._num_steps):
            generator = step_generator(self._entropy, self.next_step)
            self.next_step += 1
            drawn = self.sampler.draw(generator)
            rows = np.where(drawn.mask, self._order[drawn.examples], -1)
            yield rows.tolist() if rows.ndim == 1 else list(rows)


class _Rows:
    """Dataset of rows, each a list of examples, and their collation."""

    def __init__(self, dataset: Any, slot_shape: tuple[int, ...]) -> None:
        self._dataset, self._slot_shape = dataset, slot_shape

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: Any) -> list[tuple[Any, bool]]:
        """Returns an example for each slot, and whether it is in the slot."""
        places = np.asarray(row).reshape(-1).tolist()
        return [(self._dataset[max(place, 0)], place >= 0) for place in places]

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the batch; an empty one has the tensors of a row, without rows."""
        filled = rows or [self[np.zeros(math.prod(self._slot_shape), np.int64)]]
        slots = list(itertools.chain.from_iterable(filled))
        examples, mask = _data.default_collate(slots)
        shape = len(filled), *self._slot_shape

        def shaped(part: Any) -> Any:
            if not mask.all():
                part[~mask] = 0
            return part.reshape(*shape, *part.shape[1:])[: len(rows)]

        batch = _mapped(shaped, examples)
        if not self._slot_shape:
            return batch
        if isinstance(batch, Mapping):
            if "mask" in batch:
                raise ValueError("dataset must not have a part named 'mask'")
            return {**batch, "mask": shaped(mask)}
        return (*(batch if isinstance(batch, tuple) else (batch,)), shaped(mask))


def _mapped(function: Any, batch: Any) -> Any:
    """Applies a function to every tensor in nested tuples, lists and mappings."""
    if isinstance(batch, Mapping):
        return {name: _mapped(function, part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_mapped(function, part) for part in batch)
    return function(batch)
