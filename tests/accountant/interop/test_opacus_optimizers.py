"""Supported optimizers of opacus's engine; opacus is not needed."""

import importlib
import importlib.metadata
import sys
from types import ModuleType

import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.files.optional import check_version

DELTA = 1e-5


class IAccountant:
    """Stand-in for opacus 1.6: the hook records the noise of any optimizer."""

    def get_optimizer_hook_fn(self, sample_rate):
        def hook(optimizer):
            self.step(  # pyright: ignore[reportAttributeAccessIssue]: of ours
                noise_multiplier=optimizer.noise_multiplier,
                sample_rate=sample_rate * optimizer.accumulated_iterations,
            )

        return hook


@pytest.fixture
def bridge(monkeypatch):
    """The bridge, with a stand-in for opacus's accountants."""
    theirs = ModuleType("opacus.accountants")
    theirs.IAccountant = IAccountant  # pyright: ignore[reportAttributeAccessIssue]: made here
    theirs.register_accountant = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]: made here
    monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))
    monkeypatch.setitem(sys.modules, "opacus.accountants", theirs)
    name = "jaxdp_episodic.accountant.interop.opacus"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda: importlib.import_module(name)
    sys.modules.pop(name, None)
    check_version.cache_clear()


def optimizer(name):
    made = type(name, (), {})()
    made.noise_multiplier, made.accumulated_iterations = 1.1, 1
    return made


@pytest.mark.parametrize("name", ["DPOptimizer", "DPPerLayerOptimizer"])
def test_noised_sums_are_accounted(bridge, name):
    accountant = bridge().EpisodicAccountant()
    accountant.get_optimizer_hook_fn(0.125)(optimizer(name))
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.125), noise_multiplier=1.1
    )
    expected = jde.epsilon(step, num_steps=1, delta=DELTA)
    assert accountant.get_epsilon(DELTA) == expected


@pytest.mark.parametrize("name", ["AdaClipDPOptimizer", "DPOptimizerOfLater"])
def test_optimizers_that_may_release_more_are_refused_by_name(bridge, name):
    accountant = bridge().EpisodicAccountant()
    with pytest.raises(NotImplementedError, match=f"{name} is not covered"):
        accountant.get_optimizer_hook_fn(0.125)(optimizer(name))
    assert accountant.history == []


def test_histories_with_unknown_fields_are_refused(bridge):
    accountant = bridge().EpisodicAccountant()
    accountant.history = [(1.0, 0.1, 5), (1.0, 0.1, 5, "adaptive")]
    with pytest.raises(ValueError, match="history must have entries.*adaptive"):
        accountant.get_epsilon(DELTA)


@pytest.mark.parametrize(("found", "fits"), [("1.6.0", True), ("1.7.0", False)])
def test_versions(bridge, monkeypatch, found, fits):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_version.cache_clear()
    if fits:
        assert bridge().NAME == "episodic"
    else:
        with pytest.raises(NotImplementedError, match=r"opacus 1\.7\.0 is not"):
            bridge()
