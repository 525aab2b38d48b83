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
    audit, fuzz, pairs = results["audit"], results["fuzz"], results["allocation"]
    assert audit["draws"]["games"] >= 20_000 and not audit["is_violated"]
    games = [row for row in audit["rows"] if page.DESIGN.fullmatch(row["name"])]
    assert len(games) > 30 and min(map(page.share, games)) >= 0.5
    assert pairs["draws"] >= 10**8
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
