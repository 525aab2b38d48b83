"""Takes the picture of the page of `jaxdp-episodic explore`, with two designs.

Needs Chromium and the extra [explore-test].

    python experiments/explore_page.py --out results/explore_page
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxdp_episodic.files.optional import require

REQUEST = Path(__file__).resolve().parents[1] / "configs" / "omniglot.toml"
SETTLED = 'body[data-settled="true"]'


def main() -> None:
    """Starts the page, sets it, and takes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    driver = require("playwright.sync_api", purpose="this", extra="explore-test")
    command = [sys.executable, "-m", "jaxdp_episodic", "explore", str(REQUEST)]
    with (
        subprocess.Popen(
            [*command, "--no-browser"], stdout=subprocess.PIPE, text=True
        ) as server,
        driver.sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        try:
            assert found is not None
            _draw(browser, found[0], out / "explore.png")
        finally:
            browser.close()
            server.terminate()


def _draw(browser: Any, address: str, path: Path) -> None:
    """Compares with a fixed number of episodes, and takes the picture."""
    page = browser.new_page(viewport={"width": 1440, "height": 1010})
    page.goto(address)
    page.get_by_label("Design A", exact=True).fill("Poisson draws")
    page.locator("#add").click()
    page.get_by_label("Design B", exact=True).fill("a fixed number")
    drawn = page.get_by_label("drawn", exact=True)
    drawn.select_option("WithoutReplacement")
    page.get_by_label("number drawn (episode)", exact=True).fill("65")
    page.locator("#tab-0").click()
    page.wait_for_selector(SETTLED, timeout=120_000)
    page.screenshot(path=path)
    # Few colours do: a quarter of the bytes.
    image = require("PIL.Image", purpose="this")
    image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
