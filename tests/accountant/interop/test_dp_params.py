"""jax_privacy's user-level training parameters, against its accountant."""

import warnings

import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.jax_privacy import from_dp_params

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of theirs, at import
    from jax_privacy import accounting

Sampling = accounting.SamplingMethod
USERS = accounting.DpsgdTrainingUserLevelAccountant(
    accounting.PldAccountantConfig(value_discretization_interval=1e-2)
)


def params(**options):
    options = {
        "noise_multipliers": 4.0,
        "num_samples": 1_000,
        "delta": 1e-6,
        "batch_size": 50,
        "examples_per_user": 6,
        **options,
    }
    return accounting.DpParams(**options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("relation", "given"),
    [
        ("zero_out", params()),
        (
            "add_remove",
            params(
                noise_multipliers=[(0, 5.0), (15, 3.0)],
                batch_size_scale_schedule={10: 2},
            ),
        ),
    ],
)
def test_poisson_sampled_users_agree_with_jax_privacy(relation, given):
    theirs = USERS.compute_epsilon(40, given)
    run = from_dp_params(given, num_updates=40, neighboring_relation=relation)
    assert sum(int(count) for count in run.counts) == 40
    value = jde.epsilon(run, delta=1e-6)
    assert value <= theirs <= value * (1 + 2e-3)


def test_fixed_size_batches_agree_under_add_remove():
    given = params(sampling_method=Sampling.FIXED_BATCH_SIZE)
    theirs = USERS.compute_epsilon(20, given)
    value = jde.epsilon(from_dp_params(given, num_updates=20), delta=1e-6)
    assert value <= theirs <= value * (1 + 2e-3)
    replaced = from_dp_params(given, num_updates=20, neighboring_relation="replace_one")
    assert jde.epsilon(replaced, delta=1e-6, method="rdp") > 1.1 * value


def test_without_users_examples_are_protected():
    run = from_dp_params(params(examples_per_user=None), num_updates=3)
    assert run.steps[0].privacy_unit == "example"
    nothing = from_dp_params(params(), num_updates=0)
    assert jde.epsilon(nothing, delta=1e-6) == 0
    bare = from_dp_params(params(is_finite_guarantee=False), num_updates=3)
    assert jde.epsilon(bare, delta=1e-6) == float("inf")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cycle_length": 3}, NotImplementedError, "training_config"),
        ({"truncated_batch_size": 60}, NotImplementedError, "training_config"),
        ({"noise_multipliers": [(5, 1.0)]}, ValueError, "begin at step 0"),
        ({"batch_size": 2_000}, ValueError, "sampling_probability"),
        ({"examples_per_user": 0}, ValueError, "examples"),
    ],
)
def test_unsupported_parameters_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        from_dp_params(params(**change), num_updates=10)
    with pytest.raises(TypeError, match="DpParams"):
        from_dp_params(3.0, num_updates=1)
