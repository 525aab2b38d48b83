"""Opacus with a loader for people in many classes; needs opacus: `make test-peers`."""

import warnings

import numpy as np
import pytest

import jaxdp_episodic as jde

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of opacus and torch, at import
    torch = pytest.importorskip("torch")
    opacus = pytest.importorskip("opacus")

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch.utils.data import TensorDataset

from jaxdp_episodic.accountant.interop.opacus import StepAccountant
from jaxdp_episodic.trainer.draw.step_loader import step_loader

pytestmark = pytest.mark.filterwarnings("ignore")  # opacus warns about its hooks

DELTA = 1e-5
# 12 classes of 5 examples, one of each of five people: 12 examples a person.
CLASSES, OWNERS = np.divmod(np.arange(60), 5)


def examples_step(**options):
    """Poisson sampled examples, each clipped."""
    options = {"people": jde.PersonBounds(examples=12), **options}
    return jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.1),
        noise_multiplier=4.0,
        privacy_unit="person",
        **options,
    )


def classes_step(**options):
    """Poisson sampled classes, two examples of each; the loss of a class is clipped."""
    options = {"people": jde.PersonBounds(examples=1, classes=12), **options}
    return jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("class", sampling_probability=0.25),
            jde.WithoutReplacement("example", size=2, population=5),
        ),
        noise_multiplier=4.0,
        clip_unit="class",
        privacy_unit="person",
        **options,
    )


STEPS = {
    # The probability that a clip unit contains the person, of 12 units.
    "examples": (examples_step, None, 0.1),
    "classes": (classes_step, {"class": CLASSES}, 0.25 * 2 / 5),
}


@pytest.mark.parametrize("kind", list(STEPS))
def test_the_draws_of_a_person_are_as_charged(kind):
    make, units, chance = STEPS[kind]
    data = TensorDataset(torch.arange(60))
    given = {"units": units, "owners": OWNERS, "entropy": 3}
    held = np.zeros((3_000, 5), int)
    loader = step_loader(data, make(), num_steps=len(held), **given)
    for number, rows in enumerate(loader.batch_sampler):
        drawn = np.asarray(rows, int).reshape(-1)
        held[number] = np.bincount(OWNERS[drawn[drawn >= 0]], minlength=5)
    # One person's number of drawn units has the law that the theorem is about.
    law = stats.binom.pmf(np.arange(13), 12, chance)
    found = np.bincount(held[:, 2], minlength=13)[:5]
    spread = np.sqrt(len(held) * law[:5])
    assert np.all(np.abs(found - len(held) * law[:5]) < 5 * spread)
    # The accountant describes this step with opacus's noise.
    features = TensorDataset(torch.randn(60, 3), torch.as_tensor(CLASSES % 2))
    loader = step_loader(features, make(), num_steps=20, **given)
    engine = opacus.PrivacyEngine(accountant="episodic")
    engine.accountant = StepAccountant(loader)
    model = torch.nn.Linear(3, 2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=4.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        loss_reduction="sum",
    )
    for inputs, labels, *mask in loader:
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(
            model(inputs).reshape(-1, 2), labels.reshape(-1), reduction="none"
        )
        if mask:
            losses = losses * mask[0].reshape(-1)
        losses.sum().backward()
        optimizer.step()
    spent = engine.get_epsilon(DELTA)
    assert spent == jde.epsilon(make(), num_steps=20, delta=DELTA)
    mixture = dp_event.MixtureOfGaussiansDpEvent(
        4.0, np.arange(13.0), stats.binom.pmf(np.arange(13), 12, chance)
    )
    theirs = PLDAccountant(value_discretization_interval=1e-2)
    alone = theirs.compose(mixture, 20).get_epsilon(DELTA)
    if kind == "examples":  # other draws do not react: the mixture is exact
        assert spent <= alone <= spent * (1 + 1e-2)
    else:  # the example in the person's place reveals it, too, and moves 2 norms
        assert 1.5 * alone < spent < 3 * alone


def test_people_are_within_their_bounds_or_truncated():
    data = TensorDataset(torch.arange(60))
    step = examples_step(people=jde.PersonBounds(examples=11))
    for arguments, message in (
        ({"owners": OWNERS}, "5 of 5 are beyond examples=11, the largest with 12"),
        ({}, "must say whose"),
        ({"owners": np.where(OWNERS == 3, -1, OWNERS)}, "owner"),
    ):
        with pytest.raises(ValueError, match=message):
            step_loader(data, step, num_steps=1, **arguments)
    everybody = jde.Poisson("example", sampling_probability=1.0)
    step = jde.GaussianStep(
        everybody, noise_multiplier=1.0, privacy_unit="person", people=step.people
    )
    cut = step_loader(data, step, num_steps=1, owners=OWNERS, truncate=True)
    ((places,),) = cut
    assert np.bincount(OWNERS[places.numpy()]).tolist() == [11] * 5
    assert cut.batch_sampler.truncation.examples_dropped == 5
