"""The pages show the committed results of `make trust`, which are of full counts."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def page():
    path = ROOT / "experiments" / "trust" / "page.py"
    spec = importlib.util.spec_from_file_location("trust_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date(page):
    tables = page.tables(page.read_tables())
    shown = set()
    for name in page.PAGES:
        text = (page.DOCS / name).read_text(encoding="utf-8")
        assert page.filled(text, tables) == text
        shown |= set(re.findall(r"<!-- trust: (\w+) -->", text))
    assert shown == tables.keys()


def test_the_results_are_of_full_counts_and_nothing_broke(page):
    results = page.read_tables()
    audit, fuzz = results["audit"], results["fuzz"]
    assert min(audit["draws"]["one step"], audit["draws"]["100 steps"]) >= 10**8
    assert not audit["is_violated"]
    for row in audit["rows"]:
        assert not row["is_above"]
        if row["name"].startswith(page.ASKED) and page.PAIR in row["attacker"]:
            assert row["share_of_exact"] >= 0.8
    epochs, pairs = results["epochs"], results["allocation"]
    people = results["people"]
    assert people["draws"]["people"] >= 10**4 and not people["is_violated"]
    assert min(map(page.share, people["rows"])) >= 0.8
    assert min(epochs["draws"]["epochs"], pairs["draws"]) >= 10**8
    assert not epochs["is_violated"]
    assert not any(row["is_refuted"] for row in pairs["rows"])
    assert results["mutations"]["all_caught"]
    assert results["kills"]["facts"]["processes killed"] >= 200
    assert results["kills"]["violations"] == []
    assert fuzz["cases"] >= 100_000
    assert [r["target"] for r in fuzz["results"] if r["failure"]] == []


def test_a_part_is_filled_and_the_rest_left(page):
    text = "a\n<!-- trust: kills -->\nold\n<!-- end of trust -->\nb\n"
    once = page.filled(text, {"kills": "| new |"})
    assert once.startswith("a\n<!-- trust: kills -->\n\n| new |\n")
    assert once.endswith("<!-- end of trust -->\nb\n")
    assert page.filled(once, {"kills": "| new |"}) == once
