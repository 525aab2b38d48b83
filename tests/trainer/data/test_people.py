"""Bounding people: bounds hold, and the rule sees only one person's places."""

import dataclasses

import numpy as np
import pytest

from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.trainer.data import people
from jaxdp_episodic.trainer.data.people import Truncation, fitting_bounds, truncated
from jaxdp_episodic.trainer.data.table import ExampleTable

RNG = np.random.default_rng(11)
BOUNDS = PersonBounds(classes=3, examples=2)


def records():
    """Columns of 400 records of 12 people, some with far more than others."""
    owner = np.minimum(RNG.geometric(0.25, 400), 12)
    return {"owner": owner, "class": RNG.integers(0, 9, 400)}


def table_of(columns, features=None, **changes):
    number = len(columns["owner"])
    return ExampleTable.from_records(
        np.arange(number)[:, None] * 1.0 if features is None else features,
        units={name: columns[name] for name in columns if name != "owner"},
        owners=columns["owner"],
        **changes,
    )


def places(table):
    """For each person, the number of examples by class."""
    assert table.owners is not None
    found: dict = {}
    names = table.owners.names[table.owners.codes].tolist()
    for name, unit in zip(names, table.unit_column("class").tolist(), strict=True):
        found.setdefault(name, {}).setdefault(unit, 0)
        found[name][unit] += 1
    return found


def test_everybody_keeps_what_the_bounds_allow():
    table = table_of(records(), public_units=range(30))
    bounded, said = truncated(table, BOUNDS)
    before, after = places(table), places(bounded)
    for name, own in before.items():
        assert len(after[name]) == min(len(own), 3)
        assert all(n == min(own[unit], 2) for unit, n in after[name].items())
    assert bounded.num_units["class"] == 30  # units that lost all their examples
    kept = {n: sum(own.values()) for n, own in after.items()}
    assert said == Truncation(
        bounds=BOUNDS,
        people=len(before),
        people_cut=sum(kept[n] < sum(own.values()) for n, own in before.items()),
        examples_kept=bounded.num_examples,
        examples_dropped=table.num_examples - bounded.num_examples,
    )
    assert Truncation.from_dict(said.to_dict()) == said
    # The same again, as for a resumed run; nothing is removed within the bounds.
    assert truncated(table, BOUNDS).table.fingerprint == bounded.fingerprint
    again = truncated(bounded, BOUNDS)
    assert again.table is bounded and again.truncation.examples_dropped == 0


def kept_records(columns, features=None, **changes):
    """The kept records, by the number in their feature or target."""
    number = np.arange(len(columns["owner"]), dtype=float)
    table = table_of(columns, features, targets=number, **changes)
    targets = truncated(table, BOUNDS).table.targets
    return np.sort(np.asarray(targets, int))


def test_the_rule_ignores_the_content_of_examples():
    columns = records()
    kept = kept_records(columns)
    for _ in range(3):
        np.testing.assert_array_equal(kept_records(columns, RNG.random((400, 2))), kept)


def others_stay(columns, person):
    """Whether others keep the same if a person leaves, has more, or order changes."""
    mine = columns["owner"] == person
    kept = kept_records(columns)
    others = kept[~mine[kept]]
    fewer = {name: column[~mine] for name, column in columns.items()}
    without = np.flatnonzero(~mine)[kept_records(fewer)]
    extra = {"owner": np.full(300, person), "class": RNG.integers(-20, 20, 300)}
    more = {name: np.append(extra[name], columns[name]) for name in columns}
    found = kept_records(more) - 300
    found = found[found >= 0]
    # People swap places in the file, but each person's own records keep their order.
    order = np.argsort(RNG.permutation(13)[columns["owner"]], kind="stable")
    moved = {name: column[order] for name, column in columns.items()}
    return (
        np.array_equal(without, others)
        and np.array_equal(found[~mine[found]], others)
        and np.array_equal(np.sort(order[kept_records(moved)]), kept)
    )


def test_the_rule_ignores_other_people(monkeypatch):
    columns = records()
    assert all(others_stay(columns, person) for person in (1, 2, 5))
    # One random stream for all people would depend on who is present.
    stream = np.random.default_rng(0)
    monkeypatch.setattr(people, "_hash", lambda *parts: stream.integers(2**63))
    assert not any(others_stay(columns, person) for person in (1, 2, 5))


def test_every_choice_is_equally_likely():
    """4,000 people of 4 classes with 3 examples; chi-squared of 11, 4.4 sigma at 32."""
    owner, unit = np.divmod(np.arange(48_000), 12)
    columns = {"owner": owner, "class": unit // 3}
    table = table_of(columns, unit[:, None] * 1.0)
    bounded = truncated(table, PersonBounds(classes=1, examples=1)).table
    seen = np.bincount(np.asarray(bounded.features[:, 0], int), minlength=12)
    assert seen.sum() == 4_000
    assert np.sum((seen - 4_000 / 12) ** 2) / (4_000 / 12) < 11 + 4.5 * np.sqrt(22)


def test_three_levels():
    rng = np.random.default_rng(3)
    task = rng.integers(0, 6, 900)
    columns = {"owner": rng.integers(0, 8, 900), "task": task}
    columns["class"] = task * 10 + rng.integers(0, 5, 900)
    table = table_of(columns)
    bounds = PersonBounds(tasks=2, classes=3, examples=1)
    bounded = truncated(table, bounds).table
    assert bounded.people == (8, 1, 3, 6.0, 2)
    # Without a bound of tasks, the bound of classes is over all tasks.
    loose = truncated(table, PersonBounds(classes=3, examples=1)).table
    assert all(len(own) == 3 for own in places(loose).values())
    only = truncated(table, PersonBounds(examples=1)).table
    assert {n: len(own) for n, own in places(only).items()} == {
        n: len(own) for n, own in places(table).items()
    }


def test_statistics_of_people_equal_a_direct_count():
    rng = np.random.default_rng(5)
    task = rng.integers(0, 4, 150)
    columns = {"owner": rng.integers(0, 9, 150), "task": task}
    columns["class"] = task * 10 + rng.integers(0, 5, 150)
    table = table_of(columns)
    rows = list(zip(*(columns[n].tolist() for n in columns), strict=True))
    everybody = {row[0] for row in rows}
    tasks = [len({t for p, t, _ in rows if p == one}) for one in everybody]
    in_all = [len({c for p, _, c in rows if p == one}) for one in everybody]
    within = max(
        len({c for p, t, c in rows if (p, t) == pair}) for pair in {r[:2] for r in rows}
    )
    most = max(rows.count(row) for row in set(rows))
    assert table.people == (9, most, within, np.mean(in_all), max(tasks))
    assert str(table.people).startswith(
        f"9 people, each in at most {max(tasks)} tasks,"
    )
    fitting = fitting_bounds(table)
    assert fitting == PersonBounds(examples=most, classes=within, tasks=max(tasks))
    assert truncated(table, fitting, truncate=False).table is table
    flat = table.without_level("task")
    assert flat.people == (9, most, max(in_all), np.mean(in_all), None)
    assert dataclasses.replace(flat, owners=None).people is None


@pytest.mark.parametrize(
    ("bounds", "changes", "error", "message"),
    [
        (
            BOUNDS,
            {"truncate": False},
            ValueError,
            "of 12 exceed classes=3, the lar",
        ),
        (BOUNDS, {"truncate": 1}, TypeError, "truncate must be true or false"),
        (PersonBounds(tasks=1), {}, ValueError, "bounds.tasks is for data with more"),
        (PersonBounds(classes=[1, 2]), {}, ValueError, "bounds.classes must be one"),
        ({"classes": 1}, {}, TypeError, "bounds must be PersonBounds"),
    ],
)
def test_bounds_that_do_not_fit(bounds, changes, error, message):
    columns = records()
    columns["owner"][:12] = np.arange(1, 13)
    with pytest.raises(error, match=message):
        truncated(table_of(columns), bounds, **changes)


def test_the_error_counts_people_beyond_the_bounds():
    columns = {"owner": np.repeat([1, 2, 3], [4, 6, 1]), "class": np.arange(11)}
    with pytest.raises(
        ValueError, match=r"2 of 3 .* classes=3, the largest with 6: the"
    ):
        truncated(table_of(columns), BOUNDS, truncate=False)


def test_bounding_needs_owners_and_at_most_three_levels():
    columns = {"owner": np.arange(4), "class": np.zeros(4, int)}
    nobodys = dataclasses.replace(table_of(columns), owners=None)
    for ask in (lambda: truncated(nobodys, BOUNDS), lambda: fitting_bounds(nobodys)):
        with pytest.raises(ValueError, match="data must name the owner of each"):
            ask()
    deep = {"owner": np.arange(4), **{name: np.zeros(4, int) for name in "abc"}}
    with pytest.raises(NotImplementedError, match="up to 3 levels"):
        truncated(table_of(deep), BOUNDS)
