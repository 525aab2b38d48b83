"""Opacus's engine with our accountant; needs opacus: `make test-peers`."""

import io
import json
import warnings

import numpy as np
import pytest

import jaxdp_episodic as jde

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of opacus and torch, at import
    torch = pytest.importorskip("torch")
    opacus = pytest.importorskip("opacus")

from opacus.accountants import IAccountant, RDPAccountant, create_accountant
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from jaxdp_episodic.accountant.interop.opacus import (
    EpisodicAccountant,
    StepAccountant,
    drawn_rate,
)
from jaxdp_episodic.trainer.draw.step_loader import step_loader

pytestmark = pytest.mark.filterwarnings("ignore")  # opacus warns about its hooks

DELTA = 1e-5
NUM_EXAMPLES = 64


def dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_EXAMPLES, 3, generator=generator)
    return TensorDataset(inputs, torch.arange(NUM_EXAMPLES) % 2)


def parts():
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def private(engine, loader, **options):
    model, optimizer = parts()
    options = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, **options}
    return engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )


def train(model, optimizer, loader, passes=1):
    steps = 0
    for _ in range(passes):
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            steps += 1
    return steps


def train_masked(model, optimizer, loader):
    """Trains on a step's loader; the losses of a clipped user's rows are summed."""
    for inputs, labels, *mask in loader:
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(
            model(inputs).reshape(-1, 2), labels.reshape(-1), reduction="none"
        )
        if mask:
            losses = losses * mask[0].reshape(-1)
        losses.sum().backward()
        optimizer.step()


def of_poisson(noise, rate, num_steps):
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate), noise_multiplier=noise
    )
    return jde.epsilon(step, num_steps=num_steps, delta=DELTA)


# --- The accountant ---


def test_opacus_creates_an_accountant_of_its_history_format():
    ours, theirs = create_accountant("episodic"), RDPAccountant()
    assert isinstance(ours, EpisodicAccountant) and isinstance(ours, IAccountant)
    assert ours.mechanism() == "episodic" and ours.get_epsilon(DELTA) == 0
    for noise, rate in [(1.0, 0.1)] * 3 + [(2.0, 0.1), (1.0, 0.1)]:
        for accountant in (ours, theirs):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert ours.history == theirs.history and len(ours) == len(theirs) == 3
    ours.step(noise_multiplier=0.0, sample_rate=0.1)
    assert ours.get_epsilon(DELTA) == np.inf


def test_state_is_saved_and_loaded():
    accountant = EpisodicAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    state = accountant.state_dict({"mine": 1})
    assert state["mine"] == 1 and state["mechanism"] == "episodic"
    assert state["history"] == accountant.history
    assert state["history"] is not accountant.history
    other = EpisodicAccountant()
    other.load_state_dict(json.loads(json.dumps(state)))
    other.step(noise_multiplier=1.0, sample_rate=0.1)
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert other.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
    for wrong in ({}, {"history": []}, {"history": [], "mechanism": "rdp"}):
        with pytest.raises(ValueError):
            other.load_state_dict(wrong)


# --- The draws of opacus's loader ---


def test_the_true_rate_of_24_bit_coins():
    """The number of the 2**24 values below the rate, as torch compares them."""
    rng = np.random.default_rng(7)
    rates = [2.0**-24, 2.0**-25, 1e-12, 0.5, 1 - 2.0**-25, 1 - 1e-9, 1 / 3, 1.0, 1e-6]
    rates += list(10 ** rng.uniform(-9, 0, 500)) + list(1 - rng.uniform(0, 1e-6, 100))
    for rate in map(float, rates):
        number = int(drawn_rate(rate) * 2**24)  # at most one value more
        values = torch.tensor([number - 1, number, number + 1]) / 2**24
        below = (values.to(torch.float32) < rate).tolist()
        assert below[2] is False or number == 2**24
        if rate * 2**24 < 2**23:  # finer than the values, so the count is exact
            assert below[:2] == [True, False]
        assert rate <= drawn_rate(rate) <= max(rate * (1 + 1e-7), rate + 2.0**-24)
    assert drawn_rate(0.0) == 0.0


def test_torch_draws_multiples_of_2_to_the_minus_24():
    """2**28 draws at rate 0.01 * 2**-24: 0.16 expected at that rate, 16 as drawn."""
    generator = torch.Generator().manual_seed(3)
    rate, heads = 0.01 * 2.0**-24, 0
    for _ in range(16):
        heads += int((torch.rand(2**24, generator=generator) < rate).sum())
    assert 4 <= heads <= 36  # 16 on average; missed with chance 1e-4


# --- The engine ---


def test_the_engine_accounts_its_steps(tmp_path):
    engine = opacus.PrivacyEngine(accountant="episodic")
    model, optimizer, loader = private(engine, DataLoader(dataset(), batch_size=8))
    steps = train(model, optimizer, loader)
    assert engine.get_epsilon(DELTA) == of_poisson(1.1, 1 / 8, steps)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model)
    file.seek(0)
    again = opacus.PrivacyEngine(accountant="episodic")
    fresh, optimizer, loader = private(again, DataLoader(dataset(), batch_size=8))
    again.load_checkpoint(path=file, module=fresh)
    train(fresh, optimizer, loader)
    assert again.get_epsilon(DELTA) == of_poisson(1.1, 1 / 8, 2 * steps)


def test_the_engine_calibrates():
    engine = opacus.PrivacyEngine(accountant="episodic")
    model, optimizer = parts()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(dataset(), batch_size=8),
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=1.0,
    )
    train(model, optimizer, loader, passes=2)
    assert 2.98 <= engine.get_epsilon(DELTA) <= 3.0


def test_gradient_accumulation_is_refused():
    engine = opacus.PrivacyEngine(accountant="episodic")
    loader = DataLoader(dataset(), batch_size=8)
    model, optimizer, loader = private(engine, loader, poisson_sampling=False)
    for inputs, labels in list(loader)[:2]:
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(ValueError, match="accumulated_iterations must be 1"):
        optimizer.step()
    assert engine.get_epsilon(DELTA) == 0


# --- Draws of a step: users, then their examples ---

HALVES = np.repeat([0, 1], 32)
USERS = np.arange(NUM_EXAMPLES) * 7 % 16  # 16 users of 4 examples, interleaved


def user_step(clip_unit, privacy_unit="user", population=4, **options):
    design = jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=0.25),
        jde.WithoutReplacement("example", size=3, population=population),
    )
    options = {"noise_multiplier": 1.1, **options}
    return jde.GaussianStep(
        design, clip_unit=clip_unit, privacy_unit=privacy_unit, **options
    )


def numbered():
    return TensorDataset(torch.arange(NUM_EXAMPLES), torch.as_tensor(USERS))


def user_loader(clip_unit, data=None, **options):
    options = {"num_steps": 8, "units": {"user": USERS}, "entropy": 5, **options}
    return step_loader(data or numbered(), user_step(clip_unit), **options)


def test_examples_are_drawn_by_user():
    hits, drawn_users, batches = np.zeros(NUM_EXAMPLES), 0, 0
    for places, users in user_loader("example", num_steps=2_000):
        assert users.tolist() == USERS[places.numpy()].tolist()
        sizes = np.bincount(users.numpy(), minlength=16)
        assert set(sizes) <= {0, 3}  # a drawn user gives three different examples
        assert len(set(places.tolist())) == len(places)
        hits += np.bincount(places.numpy(), minlength=NUM_EXAMPLES)
        drawn_users += int((sizes > 0).sum())
        batches += 1
    assert batches == 2_000
    # Four standard deviations, 5 for the largest of 64: missed with chance 1e-4.
    assert abs(drawn_users - 8_000) < 4 * np.sqrt(32_000 * 0.25 * 0.75)
    assert np.all(np.abs(hits - 375) < 5 * np.sqrt(2_000 * 0.1875 * 0.8125))


def test_rows_are_users_if_users_are_clipped():
    loader = user_loader("user", num_steps=50)
    for places, users, mask in loader:
        assert places.shape == users.shape == mask.shape and mask.shape[1:] == (3,)
        assert mask.all() and mask.dtype == torch.bool
        assert (users == users[:, :1]).all()  # a row holds one user's examples
        assert len(set(users[:, 0].tolist())) == len(users)
        assert users.tolist() == USERS[places.numpy()].tolist()
    assert loader.batch_sampler.sampler.expected_units == 4.0


def test_small_users_have_empty_slots():
    users = np.array([0, 0, 0, 0, 0, 1])
    data = [{"x": torch.full((2,), 9.0), "y": 1} for _ in users]
    design = jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=1.0),
        jde.WithoutReplacement("example", size=2, population=1),
    )
    step = jde.GaussianStep(design, noise_multiplier=1.0, clip_unit="user")
    loader = step_loader(data, step, num_steps=1, units={"user": users}, entropy=1)
    (batch,) = loader
    assert batch["x"].shape == (2, 2, 2) and batch["y"].shape == (2, 2)
    assert sorted(batch["mask"].sum(1).tolist()) == [1, 2]
    assert bool((batch["x"][~batch["mask"]] == 0).all())
    assert bool((batch["x"][batch["mask"]] == 9).all())


@pytest.mark.parametrize("clip_unit", ["user", "example"])
def test_an_empty_draw_is_an_empty_batch(clip_unit):
    design = jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=0.0),
        jde.WithoutReplacement("example", size=3, population=4),
    )
    step = jde.GaussianStep(design, noise_multiplier=1.0, clip_unit=clip_unit)
    loader = step_loader(dataset(), step, num_steps=2, units={"user": USERS}, entropy=1)
    inside = (3,) if clip_unit == "user" else ()
    for batch in loader:
        assert [part.shape for part in batch[:2]] == [(0, *inside, 3), (0, *inside)]
    model, optimizer, loader = private(
        opacus.PrivacyEngine(accountant="episodic"), loader, poisson_sampling=False
    )
    if clip_unit == "example":
        assert train(model, optimizer, loader) == 2


def test_every_draw_is_fresh_and_a_function_of_entropy_and_number():
    def passes(loader, number):
        return [places.tolist() for _ in range(number) for places, _ in loader]

    once = passes(user_loader("example"), 2)
    assert len({tuple(batch) for batch in once}) == 16
    half = user_loader("example")
    assert passes(half, 1) == once[:8]
    assert half.batch_sampler.next_step == 8
    resumed = user_loader("example", first_step=8)
    assert passes(resumed, 1) == once[8:]
    assert passes(user_loader("example", num_workers=1), 1) == once[:8]
    assert passes(user_loader("example", entropy=6), 1) != once[:8]
    assert passes(user_loader("example", entropy=None), 1) != once[:8]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"units": {"user": USERS[:5]}}, ValueError, "same length"),
        ({"units": None}, ValueError, "2 levels"),
        ({"num_steps": 0}, ValueError, "num_steps"),
        ({"batch_size": 4}, ValueError, "batch_sampler"),
        ({"step": "poisson"}, TypeError, "GaussianStep"),
        (
            {"step": user_step("user", neighboring_relation="zero_out")},
            NotImplementedError,
            "zero_out",
        ),
        # 40 examples of a user, not 4: too small a rate.
        (
            {"step": user_step("user", population=40), "units": {"user": HALVES}},
            ValueError,
            "population",
        ),
    ],
)
def test_unsuitable_loaders_are_refused(change, error, message):
    arguments = {
        "step": user_step("user"),
        "num_steps": 3,
        "units": {"user": USERS},
        **change,
    }
    with pytest.raises(error, match=message):
        step_loader(numbered(), arguments.pop("step"), **arguments)


@pytest.mark.parametrize("clip_unit", ["user", "example"])
def test_the_engine_accounts_what_the_loader_draws(clip_unit):
    engine = opacus.PrivacyEngine(accountant="episodic")
    loader = user_loader(clip_unit, dataset())
    engine.accountant = StepAccountant(loader)
    train_masked(*private(engine, loader, poisson_sampling=False, loss_reduction="sum"))
    expected = jde.epsilon(user_step(clip_unit), num_steps=8, delta=DELTA)
    assert engine.get_epsilon(DELTA) == expected


def test_the_step_accountant_refuses_other_steps():
    loader = user_loader("example")
    accountant = StepAccountant(loader)
    with pytest.raises(ValueError, match="sample_rate must be 0.125"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.25)
    accountant.step(noise_multiplier=1.0, sample_rate=1 / 8)
    engine = opacus.PrivacyEngine(accountant="episodic")
    engine.accountant = accountant
    model, optimizer = parts()
    with pytest.raises(ValueError, match="episodic step"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=3.0,
            target_delta=DELTA,
            epochs=2,
            max_grad_norm=1.0,
        )
    state = json.loads(json.dumps(accountant.state_dict()))
    again = StepAccountant(loader)
    again.load_state_dict(state)
    assert again.get_epsilon(DELTA) == accountant.get_epsilon(DELTA) > 0
    with pytest.raises(ValueError, match="must have the step of this loader"):
        StepAccountant(user_loader("user")).load_state_dict(state)
    with pytest.raises(ValueError):
        EpisodicAccountant().load_state_dict(state)


# --- People in many classes ---

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


def test_people_are_within_their_bounds_or_truncated():
    data = TensorDataset(torch.arange(60))
    step = examples_step(people=jde.PersonBounds(examples=11))
    for arguments, message in (
        ({"owners": OWNERS}, "5 of 5 exceed examples=11, the largest with 12"),
        ({}, "must name the owner"),
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
