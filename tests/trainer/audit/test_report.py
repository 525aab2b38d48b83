import json
import math

import pytest

from jaxdp_episodic.tools.plots.figures import plot_audit
from jaxdp_episodic.trainer.audit.bounds import EpsilonBound, Guesses, log_ratio_bound
from jaxdp_episodic.trainer.audit.report import (
    AuditRow,
    audit_document,
    audit_markdown,
    downward,
    upward,
)


def bound(epsilon):
    return EpsilonBound(epsilon, 1e-5, 0.95, "forward", 1.5, 900, 20, 10_000)


def row(audited=1.2, exact=2.0, rdp=2.5):
    return AuditRow("a design", "fixed data", 1e-5, rdp, exact, bound(audited))


def test_rows_know_their_gap_and_share():
    one = row()
    assert one.gap == pytest.approx(0.8)
    assert one.share == pytest.approx(0.6)
    assert not one.is_violated
    assert row(audited=2.1).is_violated
    assert row(audited=2.1, exact=3.0, rdp=2.05).is_violated
    assert not row(rdp=None).is_violated
    assert row(audited=0.0, exact=0.0, rdp=0.0).share == 0


def test_a_bound_above_the_claim_by_chance_disproves_nothing():
    found = EpsilonBound(1.0, 0.0, 0.95, "forward", 1.5, 400, 100, 10_000)
    bound_here = float(log_ratio_bound(400, 100, 10_000, delta=0.0, error=0.05))
    surely = float(log_ratio_bound(400, 100, 10_000, delta=0.0, error=1e-4))
    assert surely < bound_here - 0.1
    found = found._replace(epsilon=bound_here)
    for claim, is_above, is_violated in (
        (bound_here + 1e-3, False, False),
        (bound_here - 1e-3, True, False),
        (surely + 1e-3, True, False),
        (surely - 1e-3, True, True),
    ):
        one = AuditRow("x", "fixed data", 0.0, None, claim, found)
        assert (one.is_above, one.is_violated) == (is_above, is_violated)
        mark = "violated" if is_violated else "above" if is_above else ""
        assert mark in audit_markdown([one])


def test_the_document_is_json():
    guesses = Guesses(0.5, 1e-5, 0.95, 100, 20, 18)
    rows = [row(), AuditRow("run", "one run", 1e-5, math.inf, math.inf, guesses)]
    text = json.dumps(audit_document(rows, seed=0), allow_nan=False)
    document = json.loads(text)
    assert document["seed"] == 0
    assert document["is_violated"] is False
    assert document["rows"][0]["evidence"]["hits"] == 900
    assert document["rows"][1]["claimed_exact"] == "inf"
    assert document["rows"][1]["evidence"]["num_correct"] == 18


def test_claims_are_rounded_up_and_audits_down():
    assert upward(1.23401) == "1.235"
    assert downward(1.23499) == "1.234"
    assert upward(0.0) == downward(0.0) == "0"
    assert upward(math.inf) == "inf"
    table = audit_markdown([row(), row(audited=2.1)])
    assert table.count("violated") == 1
    assert len(table.splitlines()) == 4


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "audit.png"
    plot_audit([row(), row(rdp=None)], path, title="two")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="png"):
        plot_audit([row()], tmp_path / "audit.pdf")
    with pytest.raises(ValueError, match="rows"):
        plot_audit([], path)
