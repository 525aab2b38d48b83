"""Every reader survives whatever Hypothesis makes of valid files: a clear error.

The full count is that of ``experiments/trust/fuzz.py``.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzzing.targets import outcome, targets

TARGETS = {target.name: target for target in targets()}


def fuzz(name: str, cases: int) -> None:
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:

        @settings(
            max_examples=cases, suppress_health_check=list(HealthCheck), database=None
        )
        @given(target.cases)
        def run(case):
            outcome(target, case, Path(folder))

        run()


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_hundred_cases(name):
    fuzz(name, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_cases(name):
    fuzz(name, 1000)
