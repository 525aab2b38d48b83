"""The pytest plug-in: puts our accountants in place, and writes a verdict a test.

``PEER_STAND_INS`` names what is put in place ("dp_accounting", "opacus" or nothing, for
the peer's own accountant), ``PEER_ONLY`` the tests that run, as JSON (all of them where
it is empty), ``PEER_VERDICTS`` the file that is written.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

_STAND_INS = {
    "dp_accounting": "experiments.peers.stand_ins",
    "opacus": "experiments.peers.opacus_stand_ins",
}
_found: dict[str, tuple[str, str]] = {}


def pytest_configure(config: Any) -> None:
    """Before any test module is imported."""
    wanted = os.environ.get("PEER_STAND_INS", "")
    if wanted:
        importlib.import_module(_STAND_INS[wanted]).install()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leaves what was asked for."""
    only = json.loads(os.environ.get("PEER_ONLY") or "[]")
    if only:
        items[:] = [item for item in items if _name(item) in only]


def _name(item: Any) -> str:
    return f"{item.cls.__name__}.{item.name}" if item.cls else item.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """One verdict a test, from how it ended."""
    report = yield
    if report.when == "setup":
        _asked().clear()
    if report.when == "call" or report.failed:
        name = _name(item)
        error = call.excinfo.value if call.excinfo and report.failed else None
        if report.skipped:
            _found[name] = ("skipped", str(report.longrepr))
        elif os.environ.get("PEER_STAND_INS"):
            from experiments.peers.verdicts import verdict

            _found[name] = verdict(name, error)
        else:
            _found[name] = ("failed" if error else "passed", repr(error)[:200])
    return report


def pytest_sessionfinish(session: Any) -> None:
    """Writes them."""
    Path(os.environ["PEER_VERDICTS"]).write_text(json.dumps(_found))


def _asked() -> list[Any]:
    from experiments.peers.stand_ins import ASKED

    return ASKED
