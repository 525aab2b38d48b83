"""Every planted fault is caught by a check that the unchanged code passes."""

import functools

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.gradient import private_gradient
from mutation import audits, band_audits
from mutation.faults import FAULTS
from mutation.planting import Edit, planted
from mutation.verdicts import FULL, QUICK


@functools.cache
def sound_verdict(check, effort):
    """The check's verdict without a fault; several faults share a check."""
    return check(effort)


def assert_caught(fault, effort):
    sound = sound_verdict(fault.check, effort)
    assert not sound.is_caught, f"without the fault: {sound.evidence}"
    faulty = fault.verdict(effort)
    assert faulty.is_caught, faulty.evidence


def by_name(faults):
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


@by_name([fault for fault in FAULTS if not fault.is_slow])
def test_a_planted_fault_is_caught(fault):
    assert_caught(fault, QUICK)


@pytest.mark.slow
@by_name(FAULTS)
def test_a_planted_fault_is_caught_at_full_strength(fault):
    assert_caught(fault, FULL)


def test_every_fault_fits_the_code():
    """Slow ones too: otherwise a change of the code could disarm them unnoticed."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) == 34
    for fault in FAULTS:
        with planted(fault.all_edits, fault.helpers):
            pass


def test_a_fault_ends_with_its_block():
    before = private_gradient._diagnostics
    edit = Edit(before, "totals.units, 1.0", "helper(), 1.0")
    with planted([edit], {"helper": lambda: 0.0}):
        assert private_gradient._diagnostics is not before
        assert vars(private_gradient)["helper"]() == 0.0
    for old in ("no such text", "totals"):  # nowhere, several times
        with pytest.raises(LookupError, match="private_gradient._diagnostics has"):
            with planted([Edit(before, old, "0.0")]):
                pass
    assert private_gradient._diagnostics is before
    assert not hasattr(private_gradient, "helper")


@pytest.mark.slow
def test_a_run_with_bands_that_is_killed_three_times_keeps_its_claim():
    # Single runs show 0.38 to 0.78 of the claim.
    runs = [band_audits.canaries(FULL) for _ in range(3)]
    assert not any(found.is_caught for found in runs)
    assert max(found.audited / found.claimed for found in runs) > 0.4


@pytest.mark.slow
def test_the_claim_about_an_episode_is_that_of_its_design():
    claims = [
        jde.epsilon(step, num_steps=1, delta=list(audits.DELTAS))
        for step in (audits.TWICE, audits.EPISODE)
    ]
    np.testing.assert_allclose(*claims, rtol=1e-6)
