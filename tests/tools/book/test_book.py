"""Books: their terms, what they charge and refuse, and damaged files."""

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.book import storage
from jaxdp_episodic.tools.book.book import (
    BookClosedError,
    Order,
    charge,
    charge_query,
    check_in,
    close_book,
    create_book,
    order_of,
    read_book,
    read_receipt,
)
from jaxdp_episodic.tools.book.content import (
    BookContent,
    BookExhaustedError,
    Entry,
    Protected,
)
from jaxdp_episodic.tools.book.storage import BookError, shown

PROTECTED = Protected("user", "add_remove", None, "ab" * 32)
ALWAYS = jde.GaussianStep(
    jde.Poisson("user", sampling_probability=1.0), noise_multiplier=20.0
)
RUN = jde.compose((ALWAYS, 100))  # mu 1/2, and no floor


def order(run=RUN, *, floor=None, **other):
    protected = PROTECTED._replace(**other)
    return order_of(run, what="train", name="a run", protected=protected, floor=floor)


def paid(where, run, wanted=None, sessions=(), session="s"):
    wanted = order() if wanted is None else wanted
    return charge(where, wanted, run=run, sessions=sessions, session=session)


@pytest.fixture
def book(tmp_path):
    where = str(tmp_path / "b.book")
    create_book(where, PROTECTED, epsilon=3.0, delta=1e-5)
    return where


def menu_book(tmp_path, **totals):
    menu = {"long": RUN, "short": jde.compose((ALWAYS, 10))}
    where = str(tmp_path / "menu.book")
    limits = {"epsilon": 4.0, "delta": 1e-5, "quotas": {"long": 2, "short": 1}}
    create_book(where, PROTECTED, menu=menu, **limits | totals)
    return where


# --- Charges ---


def test_runs_are_charged_until_the_next_would_exceed(book):
    assert 0.7 < read_book(book).terms.prices.budget.mu < 0.75
    assert paid(book, "one").price == {"mu": pytest.approx(0.5), "floor": 0.0}
    assert paid(book, "two").number == 2
    with pytest.raises(BookExhaustedError, match="nothing was charged or sampled"):
        paid(book, "three")
    small = order(jde.compose((ALWAYS, 1)))
    assert paid(book, "four", small).price["mu"] == pytest.approx(0.05)
    content = read_book(book)
    assert [entry.run for entry in content.entries] == ["one", "two", "four"]
    # For information only: what these runs cost if they are fixed in advance.
    assert content.composition().counts == (100, 100, 1)


@pytest.mark.slow
def test_floors_are_charged_beside_mu(book):
    sampling = jde.Poisson("user", sampling_probability=0.1)
    sampled = jde.compose((jde.GaussianStep(sampling, noise_multiplier=5.0), 5))
    stated = paid(book, "stated", order(sampled, floor=1.5e-6)).price
    assert stated["floor"] == 1.5e-6
    free = {"mu": 0.0, "floor": 0.0}
    assert read_book(book).terms.prices.default_floor == pytest.approx(1e-7)
    tuned = Order("tune", "t", PROTECTED, {"search": {}}, lambda terms: free)
    assert paid(book, "s", tuned).what == "tune"
    assert read_book(book).composition() is None
    with pytest.raises(BookExhaustedError, match="floor 5e-07 left"):
        paid(book, "too much", order(sampled, floor=6e-7))


def test_a_run_is_charged_once_and_a_second_copy_is_refused(book):
    paid(book, "run", session="first")
    paid(book, "run", sessions=("first",), session="second")
    assert len(read_book(book).entries) == 1
    with pytest.raises(ValueError, match="another copy of it was resumed"):
        paid(book, "run", sessions=("first",), session="third")
    with pytest.raises(ValueError, match="of this run with other settings"):
        other = order(jde.compose((ALWAYS, 99)))
        paid(book, "run", other, sessions=("second",))


def test_every_query_is_charged(book):
    query = jde.compose((jde.LaplaceRelease(20.0), 1))
    for number in (1, 2):
        entry = charge_query(book, query, name="how many")
        assert entry.number == number and 0 < entry.price["mu"] < 0.1
    with pytest.raises(ValueError, match="name must have 1 to 200 printable char"):
        charge_query(book, query, name="a\nb")
    wrong = jde.LaplaceRelease(20.0, neighboring_relation="zero_out")
    with pytest.raises(ValueError, match="neighboring_relation must be 'add_remove'"):
        charge_query(book, jde.compose((wrong, 1)), name="other")
    counted = jde.GaussianStep(
        ALWAYS.sampling,
        noise_multiplier=1.0,
        population=jde.Population.from_sizes(5, level_names=["user"]),
    )
    with pytest.raises(ValueError, match="population must be left out"):
        charge_query(book, jde.compose((counted, 1)), name="sizes")


def test_each_option_of_a_menu_keeps_to_its_quota(tmp_path):
    where = menu_book(tmp_path)
    assert paid(where, "1").price == {"option": "long"}
    # More noise than the menu says is post-processing; less is another run.
    more = jde.GaussianStep(ALWAYS.sampling, noise_multiplier=21.0)
    assert paid(where, "2", order(jde.compose((more, 100)))).price == {"option": "long"}
    with pytest.raises(BookExhaustedError, match="its quota of 2 is used up: nothing"):
        paid(where, "3")
    assert paid(where, "4", order(jde.compose((ALWAYS, 10)))).number == 3
    less = jde.GaussianStep(ALWAYS.sampling, noise_multiplier=19.0)
    for run in (jde.compose((less, 100)), jde.compose((ALWAYS, 101))):
        with pytest.raises(ValueError, match="not on the book's menu"):
            paid(where, "5", order(run))
    with pytest.raises(ValueError, match="floor must be left out: the book has a menu"):
        paid(where, "6", order(floor=1e-7))
    assert read_book(where).composition().counts == (100, 100, 10)


def test_a_charge_survives_a_power_failure(book):
    """A commit returns when it is on the disk, and no journal can undo it."""
    with contextlib.closing(storage._opened(Path(book))) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA


def test_a_menu_without_quotas_permits_any_mixture(tmp_path):
    where = menu_book(tmp_path, epsilon=3.0, quotas=None)
    prices = read_book(where).terms.prices
    # The target allows 2.3 long runs alone or 22.9 short ones; prices are integers.
    assert prices.menu.most("long") == 2 and 18 <= prices.menu.most("short") <= 22
    assert prices.menu.epsilon(delta=1e-5) <= 3.0
    short = order(jde.compose((ALWAYS, 10)))
    paid(where, "1")
    for number in range(prices.menu.charge("long").most("short")):
        paid(where, f"short {number}", short)
    for wanted in (None, short):
        with pytest.raises(BookExhaustedError, match="is left: nothing was charged"):
            paid(where, "more", wanted)
    content = read_book(where)
    ((name, spent, total),) = prices.spent(content.paid)
    assert name == "price" and 0.9 * total < spent <= total
    assert prices.left(content.paid) == "long 0 times or short 0 times"


def test_epochs_of_different_runs_stay_apart():
    epochs = jde.RandomAllocation("user", steps_per_epoch=4)
    step = jde.GaussianStep(epochs, noise_multiplier=1.0)
    run = {"steps": jde.compose((step, 6), (ALWAYS, 2)).to_dict()}
    entries = [Entry(n, f"{n}", "train", "a run", run, {}, "now") for n in (1, 2)]
    assert BookContent(None, "", entries).composition().counts == (6, 2, 6, 2)


def test_a_closed_book_takes_no_new_run(book):
    paid(book, "run", session="first")
    close_book(book)
    close_book(book)
    with pytest.raises(BookClosedError, match="is closed: nothing was charged"):
        paid(book, "other")
    # A run that is charged already may continue.
    paid(book, "run", sessions=("first",), session="second")
    content = read_book(book)
    assert content.is_closed and content.terms.epsilon == 3.0


@pytest.mark.parametrize(
    "other,message",
    [
        ({"neighboring_relation": "zero_out"}, "neighboring_relation must be 'add_r"),
        ({"people": jde.PersonBounds(examples=3)}, "people must be None, as in the bo"),
        ({"data": "cd" * 32}, "book is for other data"),
    ],
)
def test_runs_that_protect_something_else_are_refused(book, other, message):
    with pytest.raises(ValueError, match=message):
        paid(book, "run", order(**other))
    assert not read_book(book).entries


def test_bounds_of_people_are_stored(tmp_path):
    people = jde.PersonBounds(examples=3, classes=2)
    protected = PROTECTED._replace(privacy_unit="person", people=people)
    where = str(tmp_path / "people.book")
    create_book(where, protected, epsilon=3.0, delta=1e-5)
    found = read_book(where).terms.protected
    assert found == protected
    assert found.words.startswith("one person, all examples, in at most 2 classes")


# --- A run's folder ---


def test_a_folder_is_charged_once_despite_kills(book, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    module = "jaxdp_episodic.tools.book.book.charge"
    with monkeypatch.context() as m:  # before the charge
        m.setattr(module, killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                check_in(book, folder, order(), run="r")

    def killed_behind(*args, **kwargs):
        charge(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as m:  # between the charge and the receipt
        m.setattr(module, killed_behind)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                check_in(book, folder, order(), run="r")
    assert not read_receipt(folder).has_paid
    shutil.copytree(folder, tmp_path / "copy")
    assert check_in(book, folder, order(), run="r").entry.number == 1
    assert len(read_book(book).entries) == 1
    receipt = read_receipt(folder)
    assert receipt.has_paid and len(receipt.sessions) == 1
    with pytest.raises(ValueError, match="another copy of it was resumed"):
        check_in(book, tmp_path / "copy", order(), run="r")


def test_an_older_copy_of_the_book_and_another_book_are_refused(book, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(book, tmp_path / "older.book")
    check_in(book, folder, order(), run="r")
    other = str(tmp_path / "other.book")
    create_book(other, PROTECTED, epsilon=3.0, delta=1e-5)
    with pytest.raises(ValueError, match="book must be the one that the run in"):
        check_in(other, folder, order(), run="r")
    shutil.copy(tmp_path / "older.book", book)
    with pytest.raises(BookError, match="restored to an older state"):
        check_in(book, folder, order(), run="r")
    (folder / "book.json").write_text("{}")
    with pytest.raises(ValueError, match=r"book\.json: damaged"):
        check_in(book, folder, order(), run="r")


def test_a_book_replaced_during_pricing_is_refused(book, tmp_path):
    def price(terms):
        Path(book).unlink()
        create_book(book, PROTECTED, epsilon=9.0, delta=1e-5)
        return {"mu": 0.1, "floor": 0.0}

    late = Order("query", "q", PROTECTED, {}, price)
    with pytest.raises(BookError, match="has been replaced by another one"):
        paid(book, "r", late)
    other = str(tmp_path / "other.book")
    create_book(other, PROTECTED, epsilon=9.0, delta=1e-5)
    name, seen = read_book(book).terms.name, read_book(other)
    with pytest.raises(BookError, match="nothing was charged"):
        charge(book, order(), run="r", sessions=(), session="s", seen=seen)
    assert not read_book(book).entries and read_book(book).terms.name == name


def test_a_charge_sees_what_was_charged_while_it_was_priced(book, monkeypatch):
    """Under the lock it reads only what is new: the lock's time must not grow."""

    def price(terms):
        paid(book, "other")  # mu 1/2
        monkeypatch.setattr(storage.Rows, "read", notes)
        return {"mu": 0.6, "floor": 0.0}

    def notes(rows, first=0):
        return firsts.append(first) or read(rows, first)

    firsts, read = [], storage.Rows.read
    with pytest.raises(BookExhaustedError, match="nothing was charged"):
        paid(book, "late", Order("query", "q", PROTECTED, {}, price))
    assert firsts == [0]  # from the first record, the last one that it knew
    assert [entry.run for entry in read_book(book).entries] == ["other"]


# --- Damaged and invalid books ---


def sql(where, script, rows=None):
    """Runs SQL on the book's file."""
    with contextlib.closing(sqlite3.connect(where)) as connection, connection:
        if rows is None:
            connection.executescript(script)
        else:
            connection.executemany(script, rows)


def test_every_edit_is_found(book):
    paid(book, "one")
    paid(book, "two")
    rows = storage.Storage(book).transaction(lambda rows: rows.read())
    whole = Path(book).read_bytes()
    for row in rows:
        for wrong in (row.record.replace("e", "f", 1), row.record + " ", "1"):
            update = f"UPDATE {storage.TABLE} SET record = ? WHERE number = ?"
            sql(book, update, [(wrong, row.number)])
            with pytest.raises(BookError, match="edited or damaged|format must be"):
                paid(book, "three")
            Path(book).write_bytes(whole)
    sql(book, f"DELETE FROM {storage.TABLE} WHERE number = 1")
    with pytest.raises(BookError, match="it must have number 1, got 2"):
        read_book(book)


def rechained(where, edit):
    """A book with changed records and recomputed hashes."""
    changed, before = [], ""
    for row in storage.Storage(where).transaction(lambda rows: rows.read()):
        record = json.loads(row.record)
        edit(row.number, record)
        text = json.dumps(record)
        before = hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()
        changed.append((row.number, text, before))
    sql(where, f"DELETE FROM {storage.TABLE}")
    sql(where, f"INSERT INTO {storage.TABLE} VALUES (?, ?, ?)", changed)


TOO_MUCH = "have paid more than its total|must not exceed"


@pytest.mark.parametrize(
    "number,field,value,message",
    [
        (0, "version", 2, "version must be 1, got 2: another version"),
        (0, "format", "x", "format must be 'jaxdp-episodic book'"),
        (0, "epsilon", -1.0, "record 0: epsilon must be"),
        (0, "prices", {"kind": "free"}, "kind of prices must be"),
        (0, "prices", {"kind": "base"}, "prices are in base steps, which only v"),
        (0, "prices", {"kind": "quotas", "menu": {}}, "record 0: "),
        (0, "data", 5, "must be texts"),
        (1, "price", {"mu": 9.0, "floor": 0.0}, TOO_MUCH),
        (1, "price", {"mu": 0.1, "floor": 1e-5}, TOO_MUCH),
        (1, "price", {"mu": "0.5", "floor": 0.0}, "prices: mu must be"),
        (1, "price", {"units": 1, "floor": 0.0}, "prices: .*unexpected keyword"),
        (1, "what", "gift", "record 1: what must be"),
        (1, "name", "a\x1b[31m", "record 1: name must have 1 to 200 printable char"),
        (2, "run", "one", "record 2: its run has paid already"),
    ],
)
def test_invalid_records_are_refused(book, number, field, value, message):
    paid(book, "one")
    paid(book, "two")

    def edit(index, record):
        if index == number:
            record[field] = value

    rechained(book, edit)
    with pytest.raises(BookError, match=message):
        paid(book, "three")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no book"):
        read_book(str(tmp_path / "nowhere.book"))
    path = tmp_path / "text.book"
    path.write_text("not a database " * 100)
    with pytest.raises(BookError, match="is no book, or it is damaged"):
        read_book(str(path))
    sql(tmp_path / "other.db", "CREATE TABLE t (x)")
    with pytest.raises(BookError, match="is no book: it has no table"):
        read_book(str(tmp_path / "other.db"))
    with pytest.raises(BookError, match="must be a plain file"):
        read_book(str(tmp_path))
    with pytest.raises(FileExistsError, match="exists: name another file"):
        create_book(str(path), PROTECTED, epsilon=1.0, delta=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.db", "text.book"]


@pytest.mark.parametrize(
    ("totals", "message"),
    [
        ({"delta": 1.0}, "delta must lie in"),
        ({"floors": 1e-5}, "floors must be below delta"),
        ({"method": "guess"}, "method must be"),
    ],
)
def test_invalid_totals_are_refused(tmp_path, totals, message):
    total = {"epsilon": 1.0, "delta": 1e-5} | totals
    with pytest.raises((ValueError, TypeError), match=message):
        create_book(str(tmp_path / "b.book"), PROTECTED, **total)
    with pytest.raises(ValueError, match="at least the cost of the menu, 3."):
        menu_book(tmp_path, epsilon=2.0)
    assert not list(tmp_path.iterdir())


# --- URLs ---


def test_passwords_are_never_shown():
    for url in (
        "postgresql+psycopg://me:secret@host/db",
        "postgresql://me:sec@ret/secret@host/db",
        "postgresql://host/db?user=me&password=secret",
    ):
        assert "secret" not in shown(url)
    assert shown("folder/my:book@home") == "folder/my:book@home"


def test_invalid_urls_are_refused():
    said = "must be a path or a URL; give an SQLite file"
    with pytest.raises(ValueError, match=said):
        read_book("sqlite:///b.book")
    for url in ("nothing://me:secret@host/db", "postgresql+nothing://h/db"):
        with pytest.raises(ValueError, match="book must be a path, or a URL like") as e:
            read_book(url)
        assert "secret" not in str(e.value)
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    url = "postgresql+psycopg://me:secret@127.0.0.1:9/db"
    with pytest.raises(ConnectionError, match="could not be reached") as e:
        read_book(url)
    assert "secret" not in str(e.value)


# --- Foreign objects in the database ---

IGNORE = f"""CREATE TRIGGER quiet BEFORE INSERT ON {storage.TABLE}
    WHEN NEW.number > 0 BEGIN SELECT RAISE(IGNORE); END"""
CHANGE = f"""CREATE TRIGGER quiet AFTER INSERT ON {storage.TABLE}
    BEGIN UPDATE {storage.TABLE} SET hash = 'x' WHERE number = NEW.number; END"""
MORE = f"""CREATE TRIGGER quiet AFTER INSERT ON {storage.TABLE} WHEN NEW.number < 9
    BEGIN INSERT INTO {storage.TABLE} VALUES (9, 'x', 'x'); END"""
VIEW = f"""ALTER TABLE {storage.TABLE} RENAME TO hidden;
    CREATE VIEW {storage.TABLE} AS SELECT * FROM hidden;
    CREATE TRIGGER quiet INSTEAD OF INSERT ON {storage.TABLE} BEGIN SELECT 1; END"""


@pytest.mark.parametrize(
    "script",
    [
        *(IGNORE, CHANGE, MORE, VIEW),
        f"CREATE INDEX more ON {storage.TABLE} (hash)",
        f"ALTER TABLE {storage.TABLE} ADD COLUMN more TEXT",
        "CREATE TABLE other (x)",
    ],
)
def test_a_changed_schema_is_refused_before_any_charge(book, script):
    paid(book, "one")
    sql(book, script)
    for act in (read_book, close_book, lambda where: paid(where, "two")):
        with pytest.raises(BookError, match="table jaxdp_episodic_book as it was made"):
            act(book)


@pytest.mark.parametrize("script", [IGNORE, CHANGE, MORE])
def test_a_charge_that_is_not_stored_is_an_error(book, monkeypatch, script):
    """A charge is read back in its transaction, since a trigger may drop it."""
    monkeypatch.setattr(storage.Storage, "_check_schema", lambda *_: None)
    paid(book, "one")
    sql(book, script)
    with pytest.raises(BookError, match="record 2 is not there after it was written"):
        paid(book, "two")
    assert len(read_book(book).entries) == 1


def test_a_view_in_a_database_in_place_of_a_table_is_refused(book):
    sql(book, VIEW)
    server = storage.Storage(book)
    server._path = None  # as if it were no file
    with pytest.raises(BookError, match="must be a table without triggers, got a view"):
        server.transaction(lambda rows: rows.read())


@pytest.mark.parametrize("column", ["record", "hash"])
def test_invalid_text_is_reported_as_damage(book, column):
    sql(book, f"UPDATE {storage.TABLE} SET {column} = CAST(x'ff' AS TEXT)")
    with pytest.raises(BookError, match="is damaged: "):
        read_book(book)


def test_a_damaged_file_is_refused_or_unchanged(book):
    """Bytes flipped, most of them in the header and the schema."""
    paid(book, "one")
    path, rng = Path(book), np.random.default_rng(5)
    raw, whole = path.read_bytes(), read_book(book)
    refused = 0
    for end in (200, 4096, len(raw)):
        for place in rng.integers(0, end, 60).tolist():
            damaged = bytearray(raw)
            damaged[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            try:
                assert read_book(book).sha256 == whole.sha256
            except BookError:
                refused += 1
    assert refused > 10


# --- Adaptive runs ---


def adaptive(noise=20.0):
    """Steps and Laplace releases in any order: no composition is the worst case."""
    step = jde.GaussianStep(ALWAYS.sampling, noise_multiplier=noise)
    score = jde.LaplaceRelease(30.0)
    return jde.AdaptiveRun(
        {"step": step, "score": score}, prices={"step": 1, "score": 1}, budget=9
    )


def test_an_adaptive_run_is_charged_for_its_worst_strategy(tmp_path):
    where = str(tmp_path / "a.book")
    create_book(where, PROTECTED, epsilon=3.0, delta=1e-5)
    entry = charge_query(where, adaptive(), name="a study", floor=1e-6)
    assert jde.AdaptiveRun.from_dict(entry.about["parts"][0]) == adaptive()
    prices = read_book(where).terms.prices
    plan = jde.compose((adaptive().options["step"], 9))
    fixed = prices.price(plan, method="exact", floor=1e-6)
    assert all(fixed[name] <= value for name, value in entry.price.items())
    # Disjoint parts of the data: everybody is in one part only.
    more = prices.price(adaptive(10.0), method="exact", floor=1e-6)
    both = prices.price(adaptive(), adaptive(10.0), method="exact", floor=1e-6)
    assert both == more != entry.price
    # The same run under the same name is found, another one is not.
    first = order_of(adaptive(), what="train", name="r", protected=PROTECTED)
    paid(where, "run", first, session="s")
    assert paid(where, "run", first, ("s",), "t").number == 2
    other = order_of(adaptive(21.0), what="train", name="r", protected=PROTECTED)
    with pytest.raises(ValueError, match="of this run with other settings"):
        paid(where, "run", other, ("t",), "u")


def test_a_menu_refuses_adaptive_runs_with_prices_and_disjoint_parts(tmp_path):
    where = menu_book(tmp_path)
    refused = "adaptive: a book with a menu charges"
    with pytest.raises(NotImplementedError, match=refused):
        charge_query(where, adaptive(), name="a study")
    apart = order_of(RUN, RUN, what="train", name="a run", protected=PROTECTED)
    with pytest.raises(NotImplementedError, match=refused):
        paid(where, "1", apart)
    with pytest.raises(NotImplementedError, match="a search .* cannot be on a menu"):
        read_book(where).terms.prices.price_of_search([2.0], [0.1], None)
    quotas = jde.AdaptiveRun({"step": ALWAYS}, quotas={"step": 10})
    assert paid(where, "1", order(quotas.composition())).price == {"option": "short"}


# --- Six processes charge one book and are killed at any moment ---

ANYBODY = Protected("example", "add_remove", None, "ab" * 32)  # as reserving.py has it


def check_kills(book, folder, *, runs, kills):
    create_book(book, ANYBODY, epsilon=8.0, delta=1e-5)
    program = str(Path(__file__).with_name("reserving.py"))
    done = subprocess.run(
        [sys.executable, program, *map(str, (book, folder, runs, kills))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    killed, refusal = done.stdout.splitlines()
    content = read_book(book)  # checks the hash chain and the total
    found = [entry.run for entry in content.entries]
    noted = [
        run for log in folder.glob("*.log") for run in log.read_text().splitlines()
    ]
    assert len(found) == runs
    assert max(Counter(found).values()) == 1  # no run was charged twice
    assert set(noted) <= set(found) and len(noted) == runs  # none is missing
    assert "nothing was charged" in refusal  # the total allows exactly this many
    return int(killed)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_four_hundred_charges_and_sixty_kills(tmp_path):
    assert check_kills(str(tmp_path / "b.book"), tmp_path, runs=400, kills=60) == 60


@pytest.fixture(scope="module")
def postgresql():
    """The URL of a temporary PostgreSQL server on its own socket."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL (Debian's package postgresql) is not installed")
    # The server's user cannot read pytest's folder.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        quiet = {"check": True, "capture_output": True, "timeout": 120, "cwd": "/"}
        if os.getuid() == 0:  # it refuses to run as root
            shutil.chown(folder, "postgres", "postgres")
            quiet |= {"user": "postgres", "group": "postgres"}
        data = f"{folder}/data"
        made = ["-D", data, "-A", "trust", "-U", "postgres"]
        subprocess.run([found[-1], *made], **quiet)
        control = [found[-1].with_name("pg_ctl"), "-D", data, "-w", "-l", f"{data}/log"]
        options = f"-c listen_addresses='' -k {folder}"
        subprocess.run([*control, "-o", options, "start"], **quiet)
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


@pytest.mark.slow
def test_sixty_kills_with_postgresql(postgresql, tmp_path):
    assert check_kills(postgresql, tmp_path, runs=400, kills=60) == 60
    with pytest.raises(FileExistsError, match="there is already a book"):
        create_book(postgresql, ANYBODY, epsilon=8.0, delta=1e-5)
