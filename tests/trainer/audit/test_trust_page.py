"""The docs show the committed results of `make trust`, run with full counts."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

TRUST = Path(__file__).resolve().parents[3] / "experiments" / "trust"


def loaded(name):
    """A script of `make trust` as a module."""
    spec = importlib.util.spec_from_file_location(f"trust_{name}", TRUST / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TRUST)  # for `provenance`, beside it
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page():
    return loaded("page")


def test_the_pages_are_up_to_date(page):
    tables = page.tables(page.read_tables())
    shown = set()
    for name in page.PAGES:
        text = (page.DOCS / name).read_text(encoding="utf-8")
        assert page.filled(text, tables) == text
        shown |= set(re.findall(r"<!-- trust: (\w+) -->", text))
    assert shown == tables.keys()


def test_the_results_have_full_counts_and_no_failure(page):
    results = page.read_tables()
    audit, fuzz, pairs = results["audit"], results["fuzz"], results["allocation"]
    assert audit["draws"]["games"] >= 20_000 and not audit["is_violated"]
    games = [row for row in audit["rows"] if page.DESIGN.fullmatch(row["name"])]
    assert len(games) > 30 and min(map(page.share, games)) >= 0.5
    assert pairs["draws"] >= 10**8
    assert not any(row["is_refuted"] for row in pairs["rows"])
    # A tenth less noise is detected.
    assert any(r["is_planted_found"] for r in pairs["rows"] if r["is_attained"])
    assert results["mutations"]["all_caught"]
    assert results["kills"]["facts"]["processes killed"] >= 200
    assert results["kills"]["violations"] == []
    assert fuzz["cases"] >= 100_000
    assert [r["target"] for r in fuzz["results"] if r["failure"]] == []


def test_the_simulation_of_two_bins_against_the_definition():
    """If both steps are taken, the dominating pair of a replacement is a Gaussian's."""
    script = loaded("allocation")
    case = script.Case("replace_one", 2, 1.0, 1.0, 2, (0.5, 1.0))
    script.CASES += (case,)
    mean, error = script.simulated(case, 300_000, 1)
    move, epsilon = np.sqrt(2), np.array(case.epsilons)
    first, second = (ndtr(sign * move / 2 - epsilon / move) for sign in (1, -1))
    true = first - np.exp(epsilon) * second
    assert np.all(np.abs(mean - true) < 5.5 * error)
    assert np.all(error < 0.01 * true)
