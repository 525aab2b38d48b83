"""Runs and searches charged to the book of their data set."""

import dataclasses
import json
import shutil

import pytest

from crash_rigs import ending
from jaxdp_episodic.accountant.describe.releases import LaplaceRelease
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.gdp import gdp_price
from jaxdp_episodic.tools.book.book import (
    Order,
    check_in,
    close_book,
    create_book,
    read_book,
)
from jaxdp_episodic.tools.book.content import Protected
from jaxdp_episodic.tools.cli.command import run as command
from jaxdp_episodic.tools.train import run as run_module, search as search_module
from jaxdp_episodic.tools.train.run import protected_by, run_of_config, run_training
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.run_files import files_of_a_run
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.training import Booking, read_config
from training_runs import ONE_RUN, TINY, TINY_LINEAR, search_file

pytestmark = pytest.mark.usefixtures("undrawn")

SCORE = LaplaceRelease(20.0)
# Everybody takes part in every step: the price of a Gaussian is in closed form.
ALL = TINY_LINEAR.replace("probability = 0.5", "probability = 1.0").replace(
    "= 3, pop", "= 20, pop"
)
# No stage is chosen, which would be compared.
ALL = ALL.replace("[evaluation]", "[evaluation]\nselect = false")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(ALL)
    return path


@pytest.fixture
def book(tmp_path, config):
    """A book of the config's data whose total allows one and a half such runs."""
    where = str(tmp_path / "b.book")
    protected = protected_by(read_config(config), tmp_path)
    create_book(where, protected, epsilon=11.000012, delta=1e-5)
    return where


def train(config, out, book, **settings):
    booking = None if book is None else Booking(book)
    return run_training(
        read_config(config), out, base=config.parent, book=booking, **settings
    )


def killed(*args, **kwargs):
    raise KeyboardInterrupt


def nothing(*args, **kwargs):
    raise AssertionError("a step was taken")


def test_a_run_is_charged_and_reported_once(tmp_path, config, book, capsys):
    config.write_text(ALL.replace("[evaluation]", "[evaluation]\nwithout_noise = true"))
    out = tmp_path / "out"
    with ending(Trainer, "step", 2):
        train(config, out, book)
    (entry,) = read_book(book).entries
    assert entry.what == "train" and 1.5 < entry.price["mu"] < 2.0
    shutil.copytree(out, tmp_path / "copy")
    with pytest.raises(ValueError, match="book must be given: the run in"):
        train(config, out, None, resume=True)
    # Also refused without its receipt: the ledger records that a book was charged.
    assert read_ledger(out / "run.sqlite").book == read_book(book).terms.name
    receipt = (out / "book.json").read_text()
    (out / "book.json").unlink()
    with pytest.raises(ValueError, match="book must be .*, got no"):
        train(config, out, None, resume=True)
    with pytest.raises(ValueError, match="book.json is missing: the run is charged"):
        train(config, out, book, resume=True)
    (out / "book.json").write_text(receipt)
    close_book(book)  # a charged run continues
    # A score without noise could choose the next run of the book.
    assert not train(config, out, book, resume=True).without_noise
    assert "not trained without noise" in capsys.readouterr().err
    assert len(read_book(book).entries) == 1
    with pytest.raises(ValueError, match="another copy of it was resumed"):
        train(config, tmp_path / "copy", book, resume=True)
    said = (out / "release" / "privacy.md").read_text()
    assert "no choice among its stages: the choice was turned off" in said
    assert f"entry 1 of the book `{read_book(book).terms.name}`" in said
    guarantee = "(11.000012, 1e-05)-differentially private for one example (add_remove)"
    assert f"are {guarantee}" in said
    facts = json.loads((out / "release" / "run.json").read_text())
    assert facts["guarantee of the book"].startswith("epsilon 11.000012, delta 1e-05")
    assert "entry 1" in (out / "report.md").read_text()


def test_a_run_that_the_book_refuses_draws_nothing(tmp_path, config, book, monkeypatch):
    monkeypatch.setattr(Trainer, "step", nothing)
    out = tmp_path / "out"
    small = str(tmp_path / "small.book")
    protected = protected_by(read_config(config), tmp_path)
    create_book(small, protected, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="the run costs mu .* nothing was charged or"):
        train(config, tmp_path / "free", small)
    assert not files_of_a_run(tmp_path / "free") and not read_book(small).entries
    with pytest.raises(AssertionError, match="a step was taken"):
        train(config, tmp_path / "free", None)  # it never paid
    other = str(tmp_path / "other.book")
    create_book(other, protected._replace(data="00" * 32), epsilon=9.0, delta=1e-5)
    with pytest.raises(ValueError, match="book is for other data"):
        train(config, out, other)
    for line, words in (
        ("seed = 5", "seed must be left out"),
        ("epsilon = inf", "epsilon must be finite"),
    ):
        text = ALL.replace("epsilon = 8.0", line) if "inf" in line else None
        config.write_text(text or ALL.replace("num_steps", f"{line}\nnum_steps", 1))
        with pytest.raises(ValueError, match=words):
            train(config, out, book)
    assert not read_book(book).entries


def test_a_run_that_began_without_a_book(tmp_path, config, book, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(Trainer, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, out, None)
    with pytest.raises(ValueError, match="book must be left out"):
        train(config, out, book, resume=True)


def test_a_run_whose_copy_continued_is_unreleased(tmp_path, config, book, monkeypatch):
    """The folder was copied during the run, and the copy was resumed."""
    out, whole = tmp_path / "out", Trainer.train

    def copied(trainer, folder, **settings):
        content = read_book(book)
        terms, entry = content.terms, content.entries[0]
        wanted = Order(entry.what, entry.name, terms.protected, entry.about, dict)
        shutil.copytree(folder, tmp_path / "copy")
        check_in(book, tmp_path / "copy", wanted, run=entry.run)
        return whole(trainer, folder, **settings)

    monkeypatch.setattr(Trainer, "train", copied)
    with pytest.raises(ValueError, match="another copy of it was resumed while it ran"):
        train(config, out, book)
    assert files_of_a_run(out) and not (out / "release").exists()


@pytest.mark.parametrize("adapts", [False, True], ids=["fixed", "adaptive"])
def test_an_older_copy_of_a_run_that_has_ended_draws_nothing(
    tmp_path, config, book, monkeypatch, adapts
):
    """The folder was copied during the run, or restored from a backup after its end."""
    config.write_text(config.read_text() + (AT_PRICES if adapts else ""))
    out, copy, step = tmp_path / "out", tmp_path / "copy", Trainer.step

    def copying(trainer, prepared=None):
        found = step(trainer, prepared)
        if not copy.exists():
            shutil.copytree(out, copy)
        return found

    with monkeypatch.context() as m:
        m.setattr(Trainer, "step", copying)
        result = train(config, out, book)
    content = read_book(book)
    assert "entry 1 of the book" in (out / "release" / "privacy.md").read_text()
    ends = {content.entries[0].run: result.trainer.num_steps_taken}
    assert dict(content.ends) == ends
    backup = tmp_path / "backup"
    shutil.copytree(copy, backup)

    with monkeypatch.context() as m:
        m.setattr(Trainer, "step", nothing)
        for folder in (copy, backup):
            with pytest.raises(ValueError, match="which has ended after"):
                train(config, folder, book, resume=True)
            assert not (folder / "release").exists()
        assert read_ledger(backup / "run.sqlite").charged == 1
        # The run itself writes its report and release again, and draws nothing.
        train(config, out, book, resume=True)
    again = read_book(book)
    assert (again.ends, again.entries) == (content.ends, content.entries)


@pytest.mark.slow
def test_a_run_killed_between_its_end_and_its_release_is_released(
    tmp_path, config, book, monkeypatch
):
    out = tmp_path / "out"
    with monkeypatch.context() as m:
        m.setattr(run_module, "finished", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, out, book)
    assert len(read_book(book).ends) == 1 and not (out / "release").exists()
    train(config, out, book, resume=True)
    assert (out / "release").exists()


def test_a_run_killed_after_a_charge_pays_nothing(tmp_path, config, book, monkeypatch):
    out = tmp_path / "out"
    for _ in range(2):
        with monkeypatch.context() as m:
            m.setattr(Trainer, "train", killed)
            with pytest.raises(KeyboardInterrupt):
                train(config, out, book)
        assert len(read_book(book).entries) == 1
    # Without its ledger, or with a begun one of another run, it is a new run.
    receipt, _ = (out / "book.json").read_bytes(), (out / "run.sqlite").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing was charged"):
            train(config, out, book)
        (out / "book.json").write_bytes(receipt)


# --- Adaptive runs ---

# At most two steps with quotas, the first with either option; and one with prices.
QUOTAS = """
[adaptive.rule]
type = "SpendRest"
first = "a"
number = 1
rest = "b"
[adaptive.options.a]
most = 1
[adaptive.options.b]
most = 2
"""
AT_PRICES = QUOTAS.replace("most = 1", "").replace("most = 2", "noise = 1.5")


@pytest.mark.slow
def test_an_adaptive_run_with_quotas_costs_its_composition(tmp_path, config):
    """In every kind of book; the rule does not affect the charge."""
    text = config.read_text()
    fixed = run_of_config(read_config(config), tmp_path)
    config.write_text(text + QUOTAS)
    run = run_of_config(read_config(config), tmp_path)
    assert sum(run.counts) == 3 and len(run.steps) == 2
    prices = [gdp_price(one, floor=1e-7).mu for one in (run, fixed)]
    assert prices[0] == pytest.approx(prices[1], rel=1e-6)
    protected = protected_by(read_config(config), tmp_path)
    totals = {"epsilon": 14.0, "delta": 1e-5}
    menu = str(tmp_path / "menu.book")
    create_book(menu, protected, menu={"it": run}, quotas={"it": 1}, **totals)
    train(config, tmp_path / "out", menu)
    (entry,) = read_book(menu).entries
    assert entry.price == {"option": "it"} and entry.about["steps"] == run.to_dict()
    with pytest.raises(ValueError, match="its quota of 1 is used up"):
        train(config, tmp_path / "other", menu)


@pytest.mark.slow
def test_an_adaptive_run_with_prices_is_charged_for_its_worst_strategy(
    tmp_path, config, book, monkeypatch
):
    config.write_text(TINY_LINEAR + AT_PRICES)
    monkeypatch.setattr(Trainer, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "out", book)
    (entry,) = read_book(book).entries
    (part,) = entry.about["parts"]
    run = AdaptiveRun.from_dict(part)
    assert run.prices is not None and read_book(book).composition() is None
    price = gdp_price(run, floor=entry.price["floor"])
    assert entry.price == dataclasses.asdict(price)
    # It is no composition, so no menu can list it.
    with pytest.raises(NotImplementedError, match="adaptive: a run on a menu must"):
        run_of_config(read_config(config), tmp_path)


# --- Searches ---


@pytest.mark.slow
def test_a_search_is_charged_once(tmp_path, config, monkeypatch, capsys):
    search = search_file(tmp_path, target="run_epsilon = 1.0", trials=ONE_RUN)
    book, out = str(tmp_path / "b.book"), tmp_path / "out"
    protected = protected_by(read_config(config), tmp_path)
    create_book(book, protected, epsilon=30.0, delta=1e-5)

    arguments = ["tune", str(search), "--out", str(out), "--book", book]
    # Killed before and after its charge.
    with monkeypatch.context() as m:
        m.setattr(search_module, "check_in", killed)
        assert command(arguments) == 130
    assert not read_book(book).entries
    with monkeypatch.context() as m:
        m.setattr(search_module, "run_training", killed)
        m.chdir(out)
        here = [*arguments[:3], ".", *arguments[4:]]
        assert command([*here, "--resume"]) == 130
    (entry,) = read_book(book).entries
    assert entry.name == "out"  # the folder's book, however its path is written
    # Without its receipt it cannot continue as another run.
    receipt = (out / "book.json").read_bytes()
    (out / "book.json").unlink()
    capsys.readouterr()
    for how, said in (
        (2, "book must be the same on resume: the search in"),
        (0, "copy of it"),
    ):
        assert command([*arguments[: 6 - how], "--resume"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    (out / "book.json").write_bytes(receipt)
    assert entry.what == "tune" and "steps" not in entry.about
    assert command([*arguments, "--resume"]) == 0
    assert len(read_book(book).entries) == 1
    said = (out / "release" / "privacy.md").read_text()
    assert said.count("entry 1 of the book") == 1
    assert "is one run of a search, which as a whole is entry 1 of the book" in said
    assert command(arguments[:4] + ["--resume"]) == 2
    # Each of its runs records the search's charge and continues only with it.
    capsys.readouterr()
    for ledger in [*out.glob("runs/*/run.sqlite")]:
        content = read_ledger(ledger)
        assert (content.book, content.search) == (read_book(book).terms.name, entry.run)
        facts = json.loads((ledger.parent / "release" / "run.json").read_text())
        assert facts["book"].endswith(" for a whole search")
        assert command(["epsilon", "--ledger", str(ledger)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "warning: one run of a search: the search's own epsilon" in said
        assert f"search as a whole is charged to the book {content.book}" in said
        again = ["train", str(config), "--out", str(ledger.parent), "--resume"]
        assert command(again) == 2


# --- The command line ---

QUERY = """
version = 1
num_steps = 1
delta = 1e-5
[step]
type = "LaplaceRelease"
noise_multiplier = 20.0
"""


def test_the_command_creates_shows_and_closes_a_book(tmp_path, config, capsys):
    book, request = str(tmp_path / "new.book"), tmp_path / "count.toml"
    request.write_text(QUERY)
    total = ["--epsilon", "3.0000012", "--delta", "1.0000012e-5"]
    assert command(["book", "create", book, str(config), *total]) == 0
    said = capsys.readouterr().out
    assert "one example (add_remove)" in said and "gets nothing back" in said
    assert command(["book", "charge", book, str(request), "--name", "how many"]) == 0
    picture = tmp_path / "book.png"
    assert command(["book", "show", book, "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    for words in (
        "guarantee   epsilon 3.0000012 at delta 1.0000012e-05 for all runs together",
        "how many",
        "left        a run of mu 0.7",
        "no guarantee where one was chosen in view of another",
    ):
        assert words in said, said
    assert picture.stat().st_size > 5000
    assert command(["book", "close", book]) == 0
    assert command(["book", "show", book, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["is_closed"] and document["guarantee"]["epsilon"] == 3.0000012
    assert document["entries"][0]["name"] == "how many"
    assert command(["book", "charge", book, str(request)]) == 2
    assert "is closed: nothing was charged" in capsys.readouterr().err


@pytest.mark.slow
def test_a_menu_of_configs_and_requests(tmp_path, config, capsys):
    book, query = str(tmp_path / "menu.book"), tmp_path / "query.toml"
    query.write_text(QUERY)
    create = ["book", "create", book, str(config), "--epsilon", "14", "--delta", "1e-5"]
    quotas = [f"{config}=2", f"{query}=5"]
    menu = [part for quota in quotas for part in ("--quota", quota)]
    assert command([*create, *menu]) == 0
    assert "tiny 2 times, query 5 times" in capsys.readouterr().out
    assert command(["book", "charge", book, str(query)]) == 0
    assert command(["book", "show", book]) == 0
    assert "left        tiny 2 times, query 4 times" in capsys.readouterr().out
    for wrong, words in (
        ([*create, "--quota", "nothing"], "--quota must be RUN.toml=N"),
        ([*create, *menu, "--floors", "1e-6"], "--floors does not go with"),
        ([*create, *menu, *menu], "got two named 'tiny'"),
        ([*create, *menu, "--menu", str(query)], "give --quota or --menu, got both"),
        (["train", str(config), "--out", "x", "--floor", "1e-7"], "is for --book"),
    ):
        assert command(wrong) == 2
        assert words in capsys.readouterr().err


def test_a_book_protects_the_data_as_loaded(tmp_path, config):
    found = protected_by(read_config(config), tmp_path)
    features = '[features]\nkind = "wavelets"\n'
    assert found == Protected("example", "add_remove", None, found.data)
    # Features and settings of the run do not change its id; other data do.
    config.write_text(TINY.replace("num_steps = 3", "num_steps = 5") + features)
    assert protected_by(read_config(config), tmp_path) == found
    config.write_text(TINY.replace("small = true", "size = 14"))
    assert protected_by(read_config(config), tmp_path).data != found.data
