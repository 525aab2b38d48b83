"""The page in a real browser: every control works, every number is the API's."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

import jaxdp_episodic as jde
from browsers import chromium
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.explore import questions
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from pages import ROOT

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright, of [explore-test], is not installed"
)
pytestmark = pytest.mark.slow

OMNIGLOT = ROOT / "configs" / "omniglot.toml"
SETTLED = 'body[data-settled="true"]'


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-m", "jaxdp_episodic", "explore", str(OMNIGLOT)]
    with subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        try:
            said = server.stdout.readline()
            server.address = re.search(r"http://127\.0\.0\.1:\d+/\S+/", said)[0]
            yield server
        finally:
            server.send_signal(signal.SIGINT)
            said = server.communicate(timeout=30)[0]
    assert (server.returncode, said) == (0, "ended\n")


@pytest.fixture
def open_page(browser, server):
    """Opens the page; errors in it and requests to other hosts fail the test."""
    faults, contexts = [], []

    def opened():
        size = {"width": 1440, "height": 1000}
        context = browser.new_context(viewport=size, accept_downloads=True)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: m.type == "error" and faults.append(m.text))
        ours = (server.address, "blob:", "data:")
        page.on(
            "request", lambda r: r.url.startswith(ours) or faults.append(f"to {r.url}")
        )
        page.goto(server.address)
        page.wait_for_selector(SETTLED, timeout=60_000)
        return page

    opened.faults = faults
    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def box(page, label):
    return page.get_by_label(label, exact=True)


def epsilon(page, design=0):
    """The epsilon of a design, once it is shown."""
    tab = page.locator(f"#tab-{design}[data-epsilon]:not([data-epsilon=''])")
    return float(tab.get_attribute("data-epsilon"))


def with_noise(noise, **changes):
    request = read_request(OMNIGLOT, EpsilonRequest).to_dict()
    request["step"] |= {"noise_multiplier": noise, **changes}
    return EpsilonRequest.from_dict(request)


def test_a_moved_slider_updates_every_number(open_page):
    page = open_page()
    assert epsilon(page) == with_noise(2.0).answer()
    slider = box(page, "noise, in clip norms, slider")
    slider.fill("700")  # of 1,000: as if dragged there
    noise = float(box(page, "noise, in clip norms").input_value())
    assert noise == float(f"{0.1 * 1000**0.7:.3g}")
    request = with_noise(noise)
    assert epsilon(page) == request.answer()
    page.wait_for_selector(SETTLED, timeout=60_000)
    for level in ("class", "example"):
        row = page.locator(f"tr[data-level={level}]")
        ends = [float(row.get_attribute(f"data-{end}")) for end in ("lower", "upper")]
        step = with_noise(noise, privacy_unit=level).step
        run = {"num_steps": 300, "delta": 1e-5}
        assert float(row.get_attribute("data-epsilon")) == jde.epsilon(step, **run)
        assert tuple(ends) == jde.epsilon_interval(step, **run)
    shown = page.locator("#noise tbody tr").all_inner_texts()
    target, least = shown[1].split("\t")
    exact = jde.calibrate_noise_multiplier(
        request.step, epsilon=2.0, delta=1e-5, num_steps=300
    )
    assert target == "2" and exact <= float(least) < exact * 1.0001
    found = page.locator("#facts tbody tr").first.inner_text().split("\t")
    assert float(found[1]) >= jde.advantage(request.step, num_steps=300)
    box(page, "target epsilon, to find the noise").fill("3")
    page.locator("#noise tbody tr >> text=/^3$/").wait_for()


def test_old_answers_are_never_shown_beside_new_settings(open_page):
    """Answers are delayed: the page shows none of them until the last one arrives."""
    page = open_page()
    held = []
    page.route("**/answer/epsilon", lambda route: held.append(route))
    noise, tab = box(page, "noise, in clip norms"), page.locator("#tab-0")
    noise.fill("3")
    page.wait_for_timeout(300)
    assert "…" in tab.inner_text() and "3.057" not in page.content()
    assert tab.get_attribute("data-epsilon") == ""
    assert page.locator("#facts tbody td").first.inner_text() == "…"
    assert page.locator("#run[aria-busy=true]").count() == 1
    assert page.locator("#save-svg").is_disabled()
    noise.fill("4")
    page.wait_for_timeout(300)
    assert len(held) == 2
    with contextlib.suppress(playwright.Error):  # the page has cancelled it
        held[0].continue_()
    page.wait_for_timeout(300)
    assert tab.get_attribute("data-epsilon") == ""
    held[1].continue_()
    assert epsilon(page) == with_noise(4.0).answer()


_TARGET = "target epsilon, to find the noise"


@pytest.mark.parametrize(
    ("label", "value", "message"),
    [
        ("noise, in clip norms", "two", "must be a number"),
        ("out of how many", "0", "must be a whole number >= 1"),
        ("delta", "", "must be a number, got ''"),
        (_TARGET, "5e-324", "must be at least 1e-06"),
    ],
)
def test_an_error_is_shown_beside_its_field(open_page, label, value, message):
    page = open_page()
    field = box(page, label)
    before = field.input_value()
    field.fill(value)
    said = page.locator(".field:has([aria-invalid=true]) .error")
    said.wait_for()
    assert said.inner_text().startswith(f"{label} {message}")
    assert field.get_attribute("aria-invalid") == "true"
    assert field.get_attribute("aria-describedby") == said.get_attribute("id")
    ticks = page.locator("figure text").all_text_contents()  # also without curves
    assert ticks and not [text for text in ticks if text.startswith("0.00000")]
    field.fill(before)
    page.wait_for_selector(SETTLED, timeout=60_000)
    assert page.locator("[aria-invalid]").count() == 0
    assert epsilon(page) == with_noise(2.0).answer()


def test_other_designs_and_levels(open_page):
    page = open_page()
    box(page, "design").select_option("MultistageSampling")
    page.wait_for_selector(SETTLED, timeout=60_000)
    levels = page.locator("#levels tr[data-level]")
    assert levels.count() == 3
    assert [r.get_attribute("data-epsilon") is None for r in levels.all()] == [
        False
    ] * 3
    page.get_by_label("called", exact=True).nth(0).fill("school")
    page.get_by_label("called", exact=True).nth(0).blur()
    assert "each school" in box(page, "clipped").inner_text()
    page.get_by_label("drawn", exact=True).nth(0).select_option("RandomAllocation")
    page.locator("#tab-0[aria-busy=false]").wait_for(timeout=60_000)
    assert epsilon(page) > 0  # the tables of an epoch; its pictures take long
    box(page, "design").select_option("IndependentEpisodes")
    example = questions.start(None)["examples"]["IndependentEpisodes"]
    del example["small_units"]
    for relation in ("replace_one", "zero_out"):
        box(page, "which").select_option(relation)
        step = {**example, "neighboring_relation": relation}
        step = jde.GaussianStep.from_dict(step)
        assert epsilon(page) == jde.epsilon(step, num_steps=300, delta=1e-5)


def test_saved_files(open_page, tmp_path, capsys):
    page = open_page()
    box(page, "noise, in clip norms").fill("2.5")
    page.wait_for_selector(SETTLED, timeout=60_000)
    files = {}
    for button, name in {
        "save-toml": "omniglot.toml",
        "save-svg": "privacy.svg",
        "save-png": "privacy.png",
    }.items():
        with page.expect_download() as download:
            page.locator(f"#{button}").click()
        assert download.value.suggested_filename == name
        files[name] = tmp_path / name
        download.value.save_as(files[name])
    assert cli.run(["epsilon", str(files["omniglot.toml"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == epsilon(page)
    root = ET.parse(files["privacy.svg"]).getroot()
    text = "".join(root.itertext())
    assert f"A  omniglot: epsilon {with_noise(2.5).answer():.2f}"[:24] in text
    assert len(root.findall(".//{*}polyline")) == 4
    assert "style" not in files["privacy.svg"].read_text()
    assert files["privacy.png"].read_bytes().startswith(b"\x89PNG\r\n")
    assert files["privacy.png"].stat().st_size > 20_000


def test_a_dead_server_is_reported(open_page):
    page = open_page()
    page.route("**/answer/*", lambda route: route.fulfill(status=500, body="broken"))
    box(page, "noise, in clip norms").fill("3")
    page.locator("#said:not(:empty)").wait_for()
    assert "Is the program still running?" in page.locator("#said").inner_text()
    assert page.locator("#tab-0").get_attribute("data-epsilon") == ""
    assert "500" in open_page.faults.pop()
