"""The rows that a private statistic sums, and the contributions that they form."""

from __future__ import annotations

import collections
import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import OWNED
from jaxdp_episodic.accountant.describe.population import BOUNDS, PersonBounds
from jaxdp_episodic.trainer.config.training_parts import MEANS, PEOPLE, StartConfig
from jaxdp_episodic.trainer.data.table import ExampleTable

# Each class is left out once, and the means of the others must span a direction.
FEWEST_CLASSES = 3


class Terms(NamedTuple):
    """The terms of one sum."""

    # The examples of each term: () means all, in order; otherwise (n,) indices, or two
    # such arrays if terms are pairs.
    rows: tuple[np.ndarray, ...]
    shares: np.ndarray  # (n,) whole numbers >= 1 that divide each term's contribution
    # (n,) codes of contributions, whose terms are consecutive. The outer products of a
    # group are then scaled together to the largest allowed norm, and ``shares`` are not
    # used. None: ``shares`` determine all norms.
    groups: np.ndarray | None = None


class Contributors:
    """The protected units of a table; arguments as in `PrivateStatistics`."""

    def __init__(
        self,
        data: ExampleTable,
        config: StartConfig,
        *,
        privacy_unit: str,
        neighboring_relation: str,
        slots: int | None,
        people: PersonBounds | None,
    ) -> None:
        # (C,) number of examples of each class.
        self.sizes = sizes = np.asarray(data.population.children_counts[-1], np.int64)
        self.classes = data.class_places  # (R,) the class of each example
        # Contributions belong to classes; else to examples or people.
        self.by_class = privacy_unit == data.level_names[-2]
        # (R,) code 0 .. P - 1 of each example's owner, if people are protected.
        self.person = person = None
        data.check_copies(privacy_unit)
        if privacy_unit in OWNED:
            owners = data.owned(privacy_unit)
            if owners is None:
                raise ValueError(
                    f"data must have owners with privacy_unit={privacy_unit!r}, but "
                    "has none"
                )
            codes = np.unique(owners.codes, return_inverse=True)[1]
            self.person = person = codes.reshape(-1).astype(np.int64)
        # People are paired, instead of examples within a class.
        self.couples = couples = person is not None and config.pairs == PEOPLE
        # Public number of things to pair, under zero_out: of people, or of each class's
        # examples.
        self.slots, has_slots = None, neighboring_relation == "zero_out"
        if has_slots and person is not None and couples:
            number = int(person.max(initial=-1)) + 1
            self.slots = _bound("start.num_people", config.num_people, number, "people")
        elif has_slots and not self.by_class:
            largest = int(sizes.max(initial=0))
            population = f"population of {data.level_names[-1]!r}"
            self.slots = _bound(population, slots, largest, "examples in a class")
        self.most = None  # public bound on a person's examples, if pairs need one
        if neighboring_relation == "add_remove" and person is not None and not couples:
            largest = int(np.bincount(person).max(initial=0))
            given = {} if people is None else people.numbers
            needed = BOUNDS[: len(data.level_names)]
            if len(data.level_names) > len(BOUNDS) or not set(needed) <= set(given):
                raise ValueError(
                    f"people must bound the {' and '.join(needed)} of a person, got "
                    f"{people!r}"
                )
            # Of all classes together.
            bound = math.prod(
                _validation.whole_number(f"people.{name}", given[name])
                for name in needed
            )
            self.most = _bound("people", bound, largest, "examples of a person")

    @property
    def number(self) -> int:
        """Number of contributions to a sum over examples."""
        if self.by_class:
            return int(np.count_nonzero(self.sizes))
        if self.person is not None:
            return int(self.person.max(initial=-1)) + 1
        return int(self.sizes.sum())

    def examples(self) -> Terms:
        """Returns every example as a term; those of a unit share one contribution."""
        if self.by_class:
            return Terms((), self.sizes[self.classes])
        if self.person is None:
            return Terms((), np.ones(self.sizes.sum(), np.int64))
        order = np.argsort(self.person, kind="stable")
        groups = self.person[order]
        return Terms((order,), np.bincount(groups)[groups], groups)

    def pairs(self, generator: np.random.Generator) -> Terms:
        """Returns disjoint random pairs of examples of a class, in a new order."""
        if self.person is not None and self.couples:
            return _pairs_of_couples(self.person, self.classes, self.slots, generator)
        first, second = _pairs_in_classes(self.sizes, self.slots, generator)
        shares = np.ones(len(first), np.int64)
        if self.by_class:
            owner = self.classes[first]
            shares = np.bincount(owner)[owner]
        elif self.most is not None:
            shares *= self.most
        elif self.person is not None:
            number = np.bincount(self.person)[self.person]
            shares = np.maximum(number[first], number[second])
        return Terms((first, second), shares)


def check_classes(data: ExampleTable, number: int, relation: str) -> None:
    """Raises if means of classes cannot be released; warns if the list is private."""
    classes = len(data.population.children_counts[-1])
    if not FEWEST_CLASSES <= classes <= number:
        raise ValueError(
            f"start.between={MEANS!r} needs at least {FEWEST_CLASSES} classes and at "
            f"most as many as there are features ({number}), got {classes}"
        )
    if relation == "add_remove" and not data.has_public_units:
        warnings.warn(
            f"start.between={MEANS!r} releases one sum per {data.level_names[-2]} in "
            "the data, so the number of these units is not protected, although an "
            "example alone in its unit changes it; give a public list if there is one "
            "(public_units; classes next to labels), or protect by 'zero_out'",
            stacklevel=4,
        )


def _bound(name: str, given: int | None, number: int, what: str) -> int:
    """Returns a public number, or raises if the data exceed it."""
    if given is None or _validation.whole_number(name, given) < number:
        raise ValueError(
            f"{name} must be a public bound, at least the {number} {what} in the "
            f"data, got {given}"
        )
    return int(given)


def _pairs_in_classes(
    sizes: np.ndarray, slots: int | None, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of both examples of each pair, class by class."""
    # The examples of a class are put into random order and paired: first with second,
    # third with fourth, and so on. With slots, all slots are paired, and a pair with an
    # empty slot is dropped.
    number = sizes if slots is None else np.full(len(sizes), slots)
    drawn = np.split(generator.random(number.sum()), np.cumsum(number)[:-1])
    begins, found = np.cumsum(sizes) - sizes, [np.zeros((0, 2), np.int64)]
    for begin, size, one in zip(begins, sizes, drawn, strict=True):
        pairs = np.argsort(one, kind="stable")[: len(one) // 2 * 2].reshape(-1, 2)
        found.append(begin + pairs[(pairs < size).all(axis=1)])
    first, second = np.concatenate(found).T
    return first, second


def _pairs_of_couples(
    person: np.ndarray,
    classes: np.ndarray,
    slots: int | None,
    generator: np.random.Generator,
) -> Terms:
    """Returns pairs of one example each of two people; a couple forms one group."""
    # People (with slots, all slots of people) are put into random order and paired:
    # first with second, and so on. In each class that both of a couple have, the first
    # example of one is paired with the first of the other, and so on.
    number = int(person.max(initial=-1)) + 1 if slots is None else slots
    places = generator.permutation(number)[person]
    owned = collections.defaultdict[Any, list[int]](list)
    for row, key in enumerate(zip(places.tolist(), classes.tolist(), strict=True)):
        owned[key].append(row)
    found = []
    for (place, one), rows in owned.items():
        if place % 2 == 0:
            pairs = zip(rows, owned.get((place + 1, one), ()), strict=False)
            found += [(place // 2, one, *pair) for pair in pairs]
    couple, _, first, second = np.array(sorted(found), np.int64).reshape(-1, 4).T
    return Terms((first, second), np.bincount(couple)[couple], couple)


STEPS = 2**18
"""Grid steps per norm 1 of a row."""

PRODUCT_STEPS = STEPS**2
"""Grid steps per norm 1 of a sum: of products of two rows, or of rows times `STEPS`."""

MOST_EXAMPLES = 2**26
"""Most rows in a sum: with `PRODUCT_STEPS` each it stays at or below 2^62."""

_EXACT = 2**53  # float64 represents all whole numbers up to this
# Bits of a row's largest entry while its norm is computed: the squares of 2^13 such
# entries, more than a row has, sum to at most 2^53.
_NORM_BITS = 20
# Bits of an exact product of two factors.
_PRODUCT_BITS = 51
# Rows whose products are summed in float64 at once: for rows of norm up to `STEPS`,
# plus rounding, the sum stays below 2^53.
_EXACT_ROWS = 2**16
# If the squares of a group's rows sum to more than this, the norm of the sum of their
# outer products is not computed. With up to 2^12 columns it is then 2^42 or more;
# otherwise the sums in its computation stay under 2^62.
_MOST_SQUARES = 2**48
# Fraction by which a group is kept shorter than its bound, because rounding to the grid
# changes the norm measured on shorter rows.
_SHORTER = 2.0**-10


def unit(rows: np.ndarray) -> np.ndarray:
    """Returns float64 rows of norm 1; rows not finite, or too short, become zero."""
    rows = rows.astype(np.float64)
    low, high = (f(rows, axis=1, initial=0.0) for f in (np.min, np.max))
    largest = np.maximum(high, -low)  # NaN if a row contains NaN
    fits = np.isfinite(largest) & (largest > 1e-30)
    rows[~fits] = 0.0
    rows *= (2.0**_NORM_BITS / np.where(fits, largest, 1.0))[:, None]
    whole = np.rint(rows, out=rows)
    whole /= np.sqrt(np.maximum(squares(whole), 1.0))[:, None]
    return whole


def squares(whole: np.ndarray) -> np.ndarray:
    """Returns the sum of squares of each row of whole numbers, exact up to 2^53."""
    return np.einsum("ij,ij->i", whole, whole)


def on_grid(rows: np.ndarray, most: int | np.ndarray) -> np.ndarray:
    """Returns rows of norm <= 1 as whole numbers, float64, of at most these squares."""
    # A row of norm 1 becomes about as long as the root of its bound, <= ``STEPS**2``.
    # Rounding may lengthen a row by half the diagonal of a grid cell, so the row is
    # shortened by as much beforehand. A row that is still too long becomes zero.
    length = np.sqrt(most) - 0.51 * math.sqrt(rows.shape[1])
    whole = rows * np.maximum(length, 0.0).reshape(-1, 1)
    np.rint(whole, out=whole)
    whole[~(squares(whole) <= most)] = 0.0  # also if NaN
    return whole


def as_one(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns rows of norm <= 1 as whole numbers, each group as long as allowed."""
    # The sum of a group's outer products has Frobenius norm at most ``STEPS**2``, and
    # close to it unless all its rows are zero. The norm is checked exactly; if rounding
    # made a group too long, its rows are divided by the square root of their number.
    # Rows are (n, D), finite, D at most 2^12; those of a group are consecutive.
    whole = on_grid(rows, STEPS**2)  # correct for groups of one row
    begins = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]][: len(rows)])
    ends = np.append(begins[1:], len(rows))[: len(begins)]
    several = ends - begins > 1
    for start, stop in zip(begins[several], ends[several], strict=True):
        whole[start:stop] = _one_group(rows[start:stop])
    return whole


def _one_group(rows: np.ndarray) -> np.ndarray:
    most = STEPS**2 // len(rows)
    safe = on_grid(rows, most)  # all squares sum to at most STEPS**2
    square = _square_of_moment(safe)
    if not square:
        return safe
    length = math.sqrt(most) - 0.51 * math.sqrt(rows.shape[1])
    length *= math.sqrt(PRODUCT_STEPS / math.sqrt(square)) * (1 - _SHORTER)
    longer = np.rint(rows * min(length, STEPS))
    square = _square_of_moment(longer)
    return safe if square is None or square > PRODUCT_STEPS**2 else longer


def _square_of_moment(whole: np.ndarray) -> int | None:
    """Returns the exact squared norm of the sum of outer products; None: too large."""
    if not squares(whole).sum() <= _MOST_SQUARES:
        return None
    # The Gram matrix of the rows has the same norm as that of the columns. By Cauchy's
    # inequality no partial sum of a product exceeds the sum of squares.
    is_wide = len(whole) <= whole.shape[1]
    products = whole @ whole.T if is_wide else whole.T @ whole
    high, low = divmod(products.astype(np.int64).ravel(), STEPS)
    parts = high @ high, high @ low, low @ low
    return sum(int(x) * y for x, y in zip(parts, (STEPS**2, 2 * STEPS, 1), strict=True))


def times(whole: np.ndarray, matrix: np.ndarray, longest: float) -> np.ndarray:
    """Returns whole rows times a public matrix (D, k), exactly up to a factor."""
    # The matrix is first rounded, to about 2^-31 of its longest column. ``longest`` is
    # a public bound on the rows' norms.
    matrix = matrix.astype(np.float64)
    reach = longest * np.linalg.norm(matrix, axis=0).max(initial=0.0)
    bits = _PRODUCT_BITS - math.ceil(math.log2(reach)) if reach else 0
    rounded = np.rint(np.ldexp(matrix, bits))
    # By Cauchy's inequality no partial sum of a product exceeds this.
    reach = longest * np.linalg.norm(rounded, axis=0).max(initial=0.0)
    if not reach < _EXACT / 2:
        raise ValueError(
            "matrix must have columns whose products with rows are below 2^52, got "
            f"{reach:.3g}"
        )
    return whole @ rounded


def outer_products(whole: np.ndarray) -> np.ndarray:
    """Returns the exact sum of the outer products of whole rows, (D, D) int64."""
    total = np.zeros((whole.shape[1],) * 2, np.int64)
    for part in _parts(whole):
        _check_sum(len(part) * squares(part).max(initial=0.0))
        total += (part.T @ part).astype(np.int64)
    return total


def totals(whole: np.ndarray) -> np.ndarray:
    """Returns the exact sum of whole rows, (D,) int64."""
    total = np.zeros(whole.shape[1], np.int64)
    for part in _parts(whole):
        _check_sum(len(part) * np.abs(part).max(initial=0.0))
        total += np.sum(part, axis=0).astype(np.int64)
    return total


def _parts(whole: np.ndarray) -> list[np.ndarray]:
    return np.array_split(whole, 1 + len(whole) // _EXACT_ROWS)


def _check_sum(most: float) -> None:
    if not most < _EXACT:
        raise ValueError(f"sums must be below 2^53 to be exact, got up to {most:.3g}")
