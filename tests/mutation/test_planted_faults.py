"""Every planted fault is caught by a check that the unchanged code passes."""

import functools

import pytest

from mutation.faults import FAULTS
from mutation.planting import planted
from mutation.verdicts import QUICK

SLOW = [pytest.mark.slow]


@functools.cache
def sound_verdict(check):
    """The check's verdict without a fault; several faults share a check."""
    return check(QUICK)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=SLOW * f.is_slow, id=f.name) for f in FAULTS]
)
def test_a_planted_fault_is_caught(fault):
    sound = sound_verdict(fault.check)
    assert not sound.is_caught, f"without the fault: {sound.evidence}"
    faulty = fault.verdict(QUICK)
    assert faulty.is_caught, faulty.evidence


def test_every_fault_fits_the_code():
    """Slow ones too: otherwise a change of the code could disarm them unnoticed."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) == 31
    for fault in FAULTS:
        with planted(fault.all_edits, fault.helpers):
            pass
