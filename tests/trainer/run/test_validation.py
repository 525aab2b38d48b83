"""Noisy validation: what one unit can change of it, and what is charged for it."""

import dataclasses

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.run.validation import GRID, PrivateValidation
from training_runs import SHOTS, WAYS, classes, protonet

EVERYBODY = jde.GaussianStep(
    jde.GroupedClasses(
        num_classes=12,
        ways=WAYS,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        examples=jde.WithoutReplacement("example", size=6, population=6),
    ),
    noise_multiplier=0.0,
    neighboring_relation="zero_out",
)


def validation(step=EVERYBODY, data=None, **changes):
    data = classes(num_classes=12, seed=5) if data is None else data
    return PrivateValidation(data, step, shots=SHOTS, **changes)


def released(one, number=1, seed=3, params=None):
    learner, initial = protonet()
    return one.release(
        learner, initial if params is None else params, Keys(seed), number
    )


def test_without_noise_it_is_the_mean_score_of_all_episodes():
    one = validation()
    value = one.score(released(one)).value
    assert 0.5 < value <= 1  # clusters that are far apart
    # Twelve classes make four episodes of 15 queries: the score is a sixtieth.
    assert value * 60 == pytest.approx(round(value * 60), abs=60 / GRID)
    assert one.deviation == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", ["discrete", "gaussian"])
def test_its_noise_is_that_of_the_step(noise):
    step = dataclasses.replace(EVERYBODY, noise_multiplier=3.0)
    quiet, one = validation(fixed=True), validation(step, fixed=True, noise=noise)
    score = released(quiet)  # everybody's, of episodes that stay
    assert all(released(quiet, n) == score for n in (2, 300))
    found = [float(released(one, n) - score) for n in range(1, 301)]
    assert one.deviation == 3.0 / 8
    # 300 scores: the deviation is within 16 % but for one in 10^4 times.
    assert np.std(found) / 2 == pytest.approx(one.deviation, rel=0.16)
    assert len(set(found)) == 300


def test_one_unit_moves_the_sum_by_at_most_what_is_charged():
    """All slots of a class are emptied one by one: at most one episode changes."""
    data = classes(num_classes=12, seed=5)
    most = 0.0
    for row in range(0, 72, 5):
        rows = np.delete(np.arange(72), row)
        fewer = ExampleTable.from_records(
            data.features[rows], units={"class": np.repeat(np.arange(12), 6)[rows]}
        )
        both = [
            released(validation(data=table, fixed=True)) * 4  # times the normalizer
            for table in (data, fewer)
        ]
        most = max(most, abs(float(both[0] - both[1])))
    assert 0 < most <= 1


def test_padding_and_nulls_give_nothing():
    """An episode with an empty slot gives zero, and not the score of a guess."""
    learner, params = protonet()
    data = classes(num_classes=12, examples=5, seed=5)  # a slot of each class is empty
    one = validation(data=data)
    assert released(one) == 0
    draw = one._draw(Keys(1), 1)
    assert draw.holds_null is not None and draw.holds_null.all()
    whole = validation(data=classes(num_classes=12, seed=5))
    draw = whole._draw(Keys(1), 1)
    found = whole._contributions(learner, params, draw)
    assert len(found) == 50 and not found[4:].any()  # a block with four episodes


def test_a_score_that_is_no_number_gives_nothing():
    learner, params = protonet()
    data = dataclasses.replace(
        classes(num_classes=12, seed=5), targets=np.zeros(72, np.float32)
    )
    step = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("class", sampling_probability=1.0),
            jde.WithoutReplacement("example", size=6, population=6),
        ),
        noise_multiplier=0.0,
        clip_unit="class",
        privacy_unit="example",
        neighboring_relation="zero_out",
    )
    one = PrivateValidation(data, step, shots=2, error_bound=4.0)

    @dataclasses.dataclass(frozen=True)
    class Broken:
        value: float
        is_regression = True

        def predict(self, params, episode):
            return 0 * episode.query_targets + self.value

    def score(value):
        return one.score(one.release(Broken(value), params, Keys(1), 1)).value

    assert score(np.nan) == 0.5  # nothing: the middle
    assert score(0.0) == 1 and score(1.0) == pytest.approx(0.75, abs=1e-4)
    assert score(1e9) == 0  # cut at the bound


def test_a_fixed_draw_is_one_and_a_fresh_one_is_not():
    fixed, fresh = validation(fixed=True), validation()
    a, b = (fixed._draw(Keys(None), n) for n in (1, 2))
    assert a is b
    a, b = (fresh._draw(Keys(None), n) for n in (1, 2))
    assert not np.array_equal(a.examples, b.examples)


def test_what_cannot_be_a_validation_is_refused():
    half = dataclasses.replace(
        EVERYBODY.design,
        examples=jde.WithoutReplacement("example", size=3, population=6),
    )
    some = dataclasses.replace(EVERYBODY, sampling=half)
    with pytest.raises(ValueError, match="fixed must be False"):
        validation(some, fixed=True)
    by_class = dataclasses.replace(
        some, privacy_unit="class", neighboring_relation="add_remove"
    )
    with pytest.raises(ValueError, match="fixed must be False"):
        validation(by_class, fixed=True)
    epochs = dataclasses.replace(
        EVERYBODY,
        sampling=jde.GroupedClasses(
            num_classes=12,
            ways=WAYS,
            episodes=jde.RandomAllocation("episode", steps_per_epoch=4),
            examples=jde.WithoutReplacement("example", size=6, population=6),
        ),
        neighboring_relation="add_remove",
    )
    with pytest.raises(NotImplementedError, match="epoch"):
        validation(epochs)
    together = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("class", sampling_probability=1.0),
            jde.Poisson("example", sampling_probability=1.0),
        ),
        noise_multiplier=1.0,
        clip_unit="class",
        privacy_unit="example",
    )
    with pytest.raises(ValueError, match="clip_unit must be one episode"):
        validation(together)
    with pytest.raises(ValueError, match="targets with error_bound"):
        validation(error_bound=1.0)
    with pytest.raises(ValueError, match="more examples .* than shots=6"):
        PrivateValidation(classes(num_classes=12), EVERYBODY, shots=6)
    with pytest.raises(ValueError, match="error_bound must be given"):
        validation().check_learner(_Numbers())


class _Numbers:
    is_regression = True
