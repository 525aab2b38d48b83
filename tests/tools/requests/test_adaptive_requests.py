"""Requests about adaptive runs, in files and in batches."""

import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request

TEXT = """
version = 1
delta = 1e-5

[step]
type = "AdaptiveRun"
quotas = {bold = 4, careful = 6}

[step.options.bold]
type = "GaussianStep"
noise_multiplier = 2.0
sampling = {type = "Poisson", name = "example", sampling_probability = 0.1}

[step.options.careful]
type = "GaussianStep"
noise_multiplier = 3.0
sampling = {type = "Poisson", name = "example", sampling_probability = 0.1}
"""


def asked(tmp_path, text, **changes):
    path = tmp_path / "request.toml"
    path.write_text(text)
    return read_request(path, EpsilonRequest, **changes)


def test_quotas_and_prices_in_a_file(tmp_path):
    request = asked(tmp_path, TEXT)
    options = request.step.options
    every = jde.compose((options["bold"], 4), (options["careful"], 6))
    assert request.answer() == jde.epsilon(every, delta=1e-5)
    assert request.nature == "exact, rounded up"
    prices = TEXT.replace(
        "quotas = {bold = 4, careful = 6}",
        "prices = {bold = 2, careful = 1}\nbudget = 6",
    )
    request = asked(tmp_path, prices)
    value, info = request.answer_with_info()
    assert request.nature == "certified upper bound" and info.is_certified_bound
    assert value == request.step.epsilon(delta=1e-5) and 0 < info.error < 1e-3


def test_questions_about_planned_runs_refuse_adaptive_ones(tmp_path):
    with pytest.raises(ValueError, match="num_steps must be left out"):
        asked(tmp_path, TEXT, num_steps=3)
    with pytest.raises(ValueError, match="'exact' or 'pld'"):
        asked(tmp_path, TEXT, method="rdp")
    with pytest.raises(NotImplementedError, match="audit covers runs fixed in advance"):
        asked(tmp_path, TEXT).planned("audit")
    wrong = TEXT.replace("careful = 6}", "care = 6}")
    with pytest.raises(ValueError, match="options of quotas"):
        asked(tmp_path, wrong)
