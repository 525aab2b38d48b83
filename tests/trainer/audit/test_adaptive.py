"""An adaptive rule that follows a canary, against the guarantee and a naive claim."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import beta

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.adaptive import AdaptiveTrainer

# The delta at which claims are tested; a smaller one needs more runs.
DELTA = 0.05
RUNS = 800
# False-alarm rate: the probability of rejecting a true claim.
FALSE_ALARMS = 1e-4
STEP = jde.GaussianStep(
    jde.MultistageSampling(
        jde.Poisson("class", sampling_probability=1.0),
        jde.Poisson("example", sampling_probability=1.0),
    ),
    noise_multiplier=4.0,
    clip_unit="example",
    privacy_unit="example",
)
OPTIONS = {"loud": STEP, "quiet": dataclasses.replace(STEP, noise_multiplier=2.5)}
QUOTAS = {"loud": 3, "quiet": 3}


@dataclasses.dataclass(frozen=True)
class Sum:
    """The gradient of an example is the example."""

    is_regression = True
    couples_examples = False

    def loss(self, params, episode):
        return jnp.sum(episode.query_inputs @ params)


class Hunter:
    """A rule that adds up the canary's privacy loss and chooses by it."""

    def begin(self):
        self.loss, self.seen = 0.0, 0.0

    def see(self, params, option):
        now = -float(params[0])
        noise = float(OPTIONS[option].noise_multiplier)
        self.loss += (now - self.seen - 0.5) / noise**2
        self.seen = now

    def __call__(self, released):
        if released.last is not None:
            self.see(released.params, released.last)
        first = "quiet" if self.loss > 0 else "loud"
        order = [first, *(name for name in OPTIONS if name != first)]
        return next((name for name in order if released.left[name]), None)


def hunted(is_in):
    """The final privacy losses of many real runs."""
    hunter, rows = Hunter(), [[0.0], [0.0], *([[5.0]] if is_in else [])]
    data = ExampleTable.from_records(
        np.array(rows, np.float32),
        np.zeros(len(rows), np.float32),
        units={"class": np.zeros(len(rows), int)},
    )
    run = AdaptiveTrainer(
        Sum(),
        jnp.zeros(1),
        data=data,
        budget=AdaptiveBudget((jde.AdaptiveRun(OPTIONS, quotas=QUOTAS),), DELTA),
        rule=hunter,
        optimizer=optax.sgd(1.0),
        shots=0,
        l2_clip_norm=1.0,
        normalizer=1.0,
    )
    start, found = run._now, []
    for _ in range(RUNS):
        run._now, run.ledger = start, type(run.ledger)(run.budget)
        hunter.begin()
        while run.choose() is not None:
            run.step()
        if not any(run.ledger.now.left.values()):
            # The rule is not asked after the last step.
            hunter.see(run.params, run.ledger.options[-1])
        found.append(hunter.loss)
    return np.array(found)


def bounds(count):
    """The Clopper-Pearson interval for the probability of an event."""
    share = FALSE_ALARMS / 4
    low = beta.ppf(share, count, RUNS - count + 1) if count else 0.0
    high = beta.ppf(1 - share, count + 1, RUNS - count) if count < RUNS else 1.0
    return low, high


def shown(losses_in, losses_out, claim):
    """Bounds of P_in(E) - e^claim P_out(E), E: the loss exceeds the claim."""
    there, away = (int(np.sum(one > claim)) for one in (losses_in, losses_out))
    (in_low, in_high), (out_low, out_high) = bounds(there), bounds(away)
    factor = math.exp(claim)
    return in_low - factor * out_high, in_high - factor * out_low


def paid(losses, claims):
    """Mean and error of (1 - e^(claim - loss))_+, the hockey-stick divergence."""
    values = np.maximum(1 - np.exp(claims - losses), 0.0)
    return values.mean(), values.std(ddof=1) / math.sqrt(RUNS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:delta=")
def test_a_canary_hunting_rule_stays_within_the_guarantee():
    """From counts alone, without assumptions about the noise."""
    guarantee = float(jde.AdaptiveRun(OPTIONS, quotas=QUOTAS).epsilon(delta=DELTA))
    inside, outside = hunted(True), hunted(False)
    low, high = shown(inside, outside, guarantee)
    assert low <= DELTA <= high
    # The claim for a single step is refuted.
    one = float(jde.epsilon(STEP, num_steps=1, delta=DELTA))
    assert shown(inside, outside, one)[0] > DELTA
    mean, error = paid(inside, guarantee)
    assert abs(mean - DELTA) < 4 * error < DELTA / 2  # the guarantee is tight
