"""Checks of arguments: valid values, refusals and their messages."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from jaxdp_episodic import _validation as validation

NAN, INF = float("nan"), float("inf")
CHECKS = {
    "real_array": ([0, -INF, 1.5], [NAN]),
    "probability_array": ([0, 1, 0.5], [-1e-300, 1 + 1e-15, INF, NAN]),
    "nonnegative_array": ([0, 5e-324, INF], [-5e-324, -INF, NAN]),
    "positive_array": ([5e-324, 1e308], [0, -1, INF, NAN]),
    "open_unit_array": ([5e-324, 0.5], [0, 1, NAN]),
    "positive_share_array": ([5e-324, 0.5, 1], [0, 1.5, NAN]),
    "order_array": ([1 + 1e-15, 1e308], [1, 0.5, INF, NAN]),
}
WRONG = (True, [0.5, False], np.True_, "0.5", None, 1j, [[1], [1, 2]], ["a"])


@pytest.mark.parametrize("name", CHECKS)
def test_numbers(name):
    check, (good, bad) = getattr(validation, name), CHECKS[name]
    for value in good:
        got = check("x", value)
        assert got.dtype == np.float64 and got == value
    for value in bad:
        with pytest.raises(ValueError, match="^x must"):
            check("x", value)
    for value in WRONG:
        with pytest.raises(TypeError, match="^x must be a number"):
            check("x", value)
    masked = np.ma.masked_array([0.1, 0.2], mask=[False, True])
    with pytest.raises(TypeError, match="must not be a masked array"):
        check("x", masked)


def test_whole_numbers():
    for value in (2, 2.0, 1e6, 2**53, np.int8(3), [2, 3]):
        got = validation.integer_array("n", value, minimum=2)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, value)
    for value in (1, 2.5, 2**53 + 1, 1e300, INF, NAN, [4, 1]):
        with pytest.raises(ValueError, match="^n must be a whole number >= 2"):
            validation.integer_array("n", value, minimum=2)


def test_the_offending_element_is_shown_with_its_index():
    for value, shown in (([[0.5], [7.0]], r"7.0 at index \(1, 0\)"), (np.int8(9), "9")):
        with pytest.raises(ValueError, match=f"got {shown}$"):
            validation.probability_array("x", value)


def test_choice():
    assert validation.choice("unit", "pupil", ("school", "pupil")) == "pupil"
    assert validation.flag("is_unit", np.True_) is True
    with pytest.raises(ValueError, match="did you mean 'pupil'"):
        validation.choice("unit", "pupils", ("school", "pupil"))
    with pytest.raises(TypeError, match="unit must be one of"):
        validation.choice("unit", 3, ("school", "pupil"))


def test_shapes_that_disagree_are_named():
    assert validation.broadcast_shape(a=np.ones((3, 1)), b=np.ones(2)) == (3, 2)
    with pytest.raises(ValueError, match=r"a: \(3,\), b: \(2,\)"):
        validation.broadcast_shape(a=np.ones(3), b=np.ones(2))


def test_minus_zero_becomes_zero():
    """Its inverse is minus infinity, which would pass as a large noise."""
    for check in (validation.real_array, validation.nonnegative_array):
        assert not np.signbit(check("noise", [-0.0, 1.0])).any()


def test_a_number_while_another_thread_imports_jax(monkeypatch):
    """A partially imported JAX is already in sys.modules."""
    half = types.ModuleType("jax")
    monkeypatch.setitem(sys.modules, "jax", half)
    assert validation.nonnegative_array("x", 1.0) == 1.0
    monkeypatch.setattr(half, "core", types.ModuleType("jax.core"), raising=False)
    assert validation.nonnegative_array("x", 1.0) == 1.0
