"""A browser for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Starts Chromium, or skips the test if it is not installed."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright, of [explore-test], is not installed"
    )
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(
                executable_path=path, args=["--no-sandbox"]
            )
        except playwright.Error:
            if path is not None:
                raise
            pytest.skip("no Chromium: `apt install chromium`, `playwright install`")
        yield started
        started.close()
