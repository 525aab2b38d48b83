"""Missing packages, and unknown versions."""

import importlib
import importlib.metadata
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from dp_accounting import dp_event

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event
from jaxdp_episodic.files.optional import check_version

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of theirs, at import
    from jax_privacy import accounting

    from jaxdp_episodic.interop import jax_privacy

PARAMS = accounting.DpParams(
    noise_multipliers=4.0, num_samples=1_000, delta=1e-6, batch_size=50
)


ASK = {
    "event": lambda: from_dp_event(dp_event.NoOpDpEvent()),
    "plan": lambda: jax_privacy.from_execution_plan(None),
    "config": jax_privacy.training_config,
    "params": lambda: jax_privacy.from_dp_params(PARAMS, num_updates=3),
}


@pytest.mark.parametrize(
    ("distribution", "found", "ask"),
    [
        ("dp-accounting", "0.61.0", "event"),
        ("jax-privacy", "2.30.1", "plan"),
        ("jax-privacy", "2.4.0", "config"),
        # Plans of 2.2 are supported as well, parameters of 2.0 only.
        ("jax-privacy", "2.2.0", "params"),
        ("dp-accounting", "0.6.1.dev0", None),
    ],
)
def test_unknown_versions_are_refused_by_name(distribution, found, ask, monkeypatch):
    true = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: found if name == distribution else true(name),
    )
    check_version.cache_clear()
    try:
        if ask is None:
            assert ASK["event"]().counts == (0,)
            return
        with pytest.raises(NotImplementedError, match=f"{distribution} {found} is not"):
            ASK[ask]()
    finally:
        check_version.cache_clear()


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("jaxdp_episodic.accountant.interop.opacus", "opacus.accountants"),
        ("jaxdp_episodic.trainer.draw.step_loader", "torch.utils.data"),
    ],
)
def test_a_missing_package_is_named(module, needed, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(
        ImportError, match=r"clone .* pip install '\.\[opacus\]' brings it"
    ):
        importlib.import_module(module)


def test_no_message_names_an_unregistered_package():
    """Anybody could register the name."""
    root = Path(__file__).parents[3]
    folders = ("jaxdp_episodic", "docs", "configs", "experiments")
    files = [path for name in folders for path in (root / name).rglob("*.*")]
    for path in [*files, *root.glob("*.md"), root / "Makefile"]:
        if path.suffix in (".py", ".md", ".toml", ".js", ".html", ""):
            advised = re.findall(
                r"pip install[^\n]*?jaxdp[-_]episodic\b[^/\n]*",
                path.read_text(encoding="utf-8"),
            )
            assert advised == [], path


# --- Optimizers of opacus's engine; opacus is not needed ---


DELTA = 1e-5


class IAccountant:
    """Stand-in for opacus 1.6: the hook records the noise of any optimizer."""

    def get_optimizer_hook_fn(self, sample_rate):
        def hook(optimizer):
            self.step(
                noise_multiplier=optimizer.noise_multiplier,
                sample_rate=sample_rate * optimizer.accumulated_iterations,
            )

        return hook


@pytest.fixture
def bridge(monkeypatch):
    """The bridge, with a stand-in for opacus's accountants."""
    theirs = ModuleType("opacus.accountants")
    theirs.IAccountant = IAccountant
    theirs.register_accountant = lambda *_, **__: None
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


def step(noise, rate, relation="add_remove"):
    return jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate),
        noise_multiplier=noise,
        neighboring_relation=relation,
    )


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        *(("DPOptimizer", True), ("DPPerLayerOptimizer", True)),
        *(("AdaClipDPOptimizer", False), ("DPOptimizerOfLater", False)),
    ],
)
def test_optimizers_that_may_release_more_are_refused_by_name(bridge, name, fits):
    accountant = bridge().EpisodicAccountant()
    hook = accountant.get_optimizer_hook_fn(0.125)
    if fits:
        hook(optimizer(name))
        expected = jde.epsilon(step(1.1, 0.125), num_steps=1, delta=DELTA)
        assert accountant.get_epsilon(DELTA) == expected
    else:
        with pytest.raises(NotImplementedError, match=f"{name} is not covered"):
            hook(optimizer(name))
        assert accountant.history == []


@pytest.mark.parametrize(
    ("method", "relation"),
    [("exact", "add_remove"), ("rdp", "replace_one"), ("rdp", "zero_out")],
)
def test_a_history_costs_its_composition(bridge, method, relation):
    """Opacus draws with a multiple of 2**-24: 17 of them for a rate of 1e-6."""
    accountant = bridge().EpisodicAccountant(method, relation)
    accountant.history = [(1.5, 0.25, 100), (0.8, 1e-6, 50), (1.5, 0.25, 20)]
    parts = (step(1.5, 0.25, relation), 120), (step(0.8, 17 / 2**24, relation), 50)
    expected = jde.epsilon(jde.compose(*parts), delta=DELTA, method=method)
    assert accountant.get_epsilon(DELTA) == expected
    for arguments in (("prv",), (method, "add")):
        with pytest.raises(ValueError, match="method|neighboring_relation"):
            type(accountant)(*arguments)


@pytest.mark.parametrize(
    ("noise", "rate"), [(-1.0, 0.1), (float("nan"), 0.1), (1.0, 1.5)]
)
def test_wrong_numbers_are_refused(bridge, noise, rate):
    accountant = bridge().EpisodicAccountant()
    with pytest.raises(ValueError, match="noise_multiplier|sample_rate"):
        accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert accountant.history == []
    accountant.history = [(noise, rate, 1)]  # as opacus's search writes it
    with pytest.raises(ValueError, match="noise_multiplier|sample_rate"):
        accountant.get_epsilon(DELTA)


def test_histories_with_unknown_fields_are_refused(bridge):
    accountant = bridge().EpisodicAccountant()
    accountant.history = [(1.0, 0.1, 5), (1.0, 0.1, 5, "adaptive")]
    with pytest.raises(ValueError, match="history must have entries.*adaptive"):
        accountant.get_epsilon(DELTA)


@pytest.mark.parametrize(("found", "fits"), [("1.6.0", True), ("1.7.0", False)])
def test_supported_versions_of_opacus(bridge, monkeypatch, found, fits):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_version.cache_clear()
    if fits:
        assert bridge().NAME == "episodic"
    else:
        with pytest.raises(NotImplementedError, match=r"opacus 1\.7\.0 is not"):
            bridge()
