"""The classic faults: the lines each changes, and the check that detects it."""

from __future__ import annotations

from jaxdp_episodic.accountant.describe import step as described
from jaxdp_episodic.accountant.questions import contribution_pairs, dominating_pair
from jaxdp_episodic.trainer.draw import rows, sampler
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.gradient.noise import BandMemory
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.run import ledger
from jaxdp_episodic.trainer.run.mechanisms import RunDraws
from jaxdp_episodic.trainer.run.trainer import Trainer
from mutation import audits, band_audits, crashes, person_audits, sampled
from mutation.planting import LEDGER, SAMPLER, Edit, Fault

_CLIP = "clipped, norm, finite = clip_by_norm(contribution, clip)"
_UNCLIPPED = Edit(
    private_gradient._summer,
    _CLIP,
    "_, norm, finite = clip_by_norm(contribution, clip)\n"
    "            clipped = contribution",
)
_ADDED = "return jax.tree.map(jnp.add, totals, added)"
_CLIPPED_SUM = Edit(
    private_gradient._summer,
    _ADDED,
    f"total = {_ADDED.removeprefix('return ')}\n        "
    "return total._replace(gradient=clip_by_norm(total.gradient, clip)[0])",
)
_DONE = "self._now = (state._replace(**self._shared(fields)), number)"
_DRAWN = "draw_units(levels, generator)"
_NORM = "longest(self.clipping) * self._longer"

FAULTS = (
    Fault(
        "noise halved",
        Edit(
            PrivateGradient.noise,
            "self._kind, steps * multiplier,",
            "self._kind, 0.5 * steps * multiplier,",
        ),
        audits.loud_unit,
        "with half the deviation the unit stands out twice as far",
    ),
    Fault(
        "discrete noise without its multiplier",
        Edit(
            PrivateGradient.noise,
            "self._kind, steps * multiplier,",
            "self._kind, steps,",
        ),
        audits.hardened_unit,
        "the noise is that of a multiplier of one, here a quarter of what is claimed",
        is_slow=True,
    ),
    Fault(
        "noise for the mean instead of the sum",
        Edit(PrivateGradient._released, "(x + n) * unit", "(x + n / divisor) * unit"),
        audits.loud_unit,
        "the sum gets the noise of the mean and is then divided once more",
        is_slow=True,
    ),
    Fault(
        "no clipping",
        _UNCLIPPED,
        audits.loud_unit,
        "a contribution of any length goes through",
        is_slow=True,
    ),
    Fault(
        "clip after the sum",
        (_UNCLIPPED, _CLIPPED_SUM),
        audits.loud_unit,
        "one unit that outshouts the others turns the whole sum round: 2C, not C",
        is_slow=True,
    ),
    Fault(
        "realised batch size as divisor",
        Edit(
            PrivateGradient._noised,
            "drawn, float(clip), divisor, bands)",
            "drawn, float(clip), max(float(totals.units), 1.0), bands)",
        ),
        audits.silent_unit,
        "the noise in all other entries shows by what it was divided",
        is_slow=True,
    ),
    Fault(
        "a key used twice, by two layers",
        Edit(
            PrivateGradient.noise,
            "np.split(flat, np.cumsum(sizes)[:-1])",
            "[flat[:size] for size in sizes]",
        ),
        audits.two_layers,
        "the difference of two layers has no noise",
        is_slow=True,
    ),
    Fault(
        "a key used twice, by two steps",
        Edit(
            Keys.new,
            "secrets.token_bytes(KEY_BYTES)",
            "_hashed(purpose, self._seed, 0)",
        ),
        crashes.killed_and_resumed,
        "the same noise in every step hides nothing",
        LEDGER,
    ),
    Fault(
        "dropped Poisson tasks",
        Edit(rows.tree_rows, _DRAWN, f"{_DRAWN}[: int(1.2 * sizes[0])]"),
        sampled.drawn_tasks,
        "a cap on the batch: whether a task takes part depends on the others",
        SAMPLER,
    ),
    Fault(
        "dropped Poisson tasks, behind the first block",
        Edit(
            episode.make_blocks,
            "range(math.ceil(max(len(mine), 1) / block_size))",
            "range(1)",
        ),
        sampled.blocks_of_tasks,
        "the same cap where draws become arrays of one shape",
        SAMPLER,
        is_slow=True,
    ),
    Fault(
        "shuffled epochs charged as Poisson",
        Edit(rows.tree_rows, _DRAWN, "batch_of_an_epoch(levels, generator)"),
        sampled.drawn_examples,
        "batches of one size, no unit twice in an epoch: no coin was tossed",
        SAMPLER,
        {"batch_of_an_epoch": sampled.batch_of_an_epoch},
    ),
    Fault(
        "bins reused in every epoch",
        Edit(
            RunDraws._epoch,
            'self._keys.new("epoch", number)',
            'self._keys.new("epoch", 0)',
        ),
        sampled.bins_of_two_epochs,
        "what a unit's step shows adds up over the rows, as if the noise were less",
        SAMPLER,
    ),
    Fault(
        "batches of fixed size charged as independent bins",
        Edit(rows.epoch_rows, "if isinstance(scheme, RandomAllocation):", "if False:"),
        sampled.bins_of_two_epochs,
        "two units never share a step, so where one is tells of the other",
        SAMPLER,
    ),
    Fault(
        "Poisson's number charged for episodes in epochs",
        Edit(
            dominating_pair._uses,
            "return [_allocated(step, u, scheme, count) for u in _all_units(step)]",
            "return [[(dominating_pair(step), count)]]",
        ),
        audits.episodes_of_epochs,
        "whether the example is drawn is one coin an epoch, and no epoch is idle",
        is_slow=True,
    ),
    Fault(
        "sensitivity C where it is 2C",
        Edit(
            contribution_pairs.one_contribution,
            "np.where(everyone, shift, twice)",
            "shift",
        ),
        audits.swapped_example,
        "without replacement another contribution takes the unit's place",
    ),
    Fault(
        "the product rate with per-example clipping",
        (
            Edit(
                dominating_pair._multistage,
                "outer=product(rates[:clip])",
                "outer=ALWAYS",
            ),
            Edit(
                dominating_pair._multistage,
                "inner if coins else product(rates[clip:])",
                "inner if coins else product(rates)",
            ),
        ),
        audits.classmates,
        "the other examples of its task show that the task was drawn",
        is_slow=True,
    ),
    Fault(
        "a class slot clipped alone in a ProtoNet episode",
        Edit(
            private_gradient._summer,
            _CLIP,
            "clipped, norm, finite = clipped_by_slot(loss, params, unit, clip)",
        ),
        audits.support_example,
        "one support example turns the contributions of all class slots round",
        helpers={"clipped_by_slot": audits.clipped_by_slot},
        is_slow=True,
    ),
    Fault(
        "an emptied unit that vanishes",
        Edit(
            sampler.rows_and_levels,
            "make_levels(sampling.levels, population, slots_of)",
            "make_levels(sampling.levels, without_empty(population), slots_of)",
        ),
        sampled.fixed_number_of_tasks,
        "when its last example leaves, all others are drawn more often",
        SAMPLER,
        {"without_empty": sampled.without_empty},
    ),
    Fault(
        "charge after release",
        (
            Edit(Trainer._step, "self.ledger.charge()", "pass"),
            Edit(
                Trainer._step,
                _DONE,
                f"{_DONE}\n    if number > self.ledger.charged:\n"
                "        self.ledger.charge()",
            ),
        ),
        crashes.killed_and_resumed,
        "whoever is killed in between has released a step that nobody charged",
        LEDGER,
    ),
    Fault(
        "resume that forgets steps",
        Edit(
            ledger.resumed_run,
            '{"charged": content.charged',
            '{"charged": content.charged - 1',
        ),
        crashes.killed_and_resumed,
        "steps after the checkpoint would be released again, of which nobody knew",
        LEDGER,
    ),
    Fault(
        "resume that forgets steps, and takes them again",
        (
            Edit(
                Trainer._apply_releases,
                "store.releases(after=self.num_steps_taken)",
                "()",
            ),
            Edit(Trainer._give_up_unreleased, "if taken == charged:", "if True:"),
        ),
        crashes.killed_and_resumed,
        "steps are taken again, uncharged, with fresh noise: two releases of each",
        LEDGER,
    ),
    # A person's charge, and the draw of a person's examples.
    Fault(
        "a person charged as one example",
        Edit(dominating_pair.in_one_place, "np.greater(bound, 1)", "False"),
        person_audits.person_in_episodes,
        "she is in three classes, and moves the contribution of each",
        is_slow=True,
    ),
    Fault(
        "the mixture of Gaussians charged for a person in episodes",
        Edit(
            contribution_pairs._clip_units,
            "theorem_a(counts * unit.bound, masses, unit.rate, held)",
            "theorem_a(counts * unit.bound, masses, unit.rate * held, 1.0)",
        ),
        person_audits.person_in_episodes,
        "an episode without her contains somebody else, who tells that she is not in "
        "it; the mixture holds where nobody reacts",
        is_slow=True,
    ),
    Fault(
        "group privacy by fewer than a person has",
        Edit(
            contribution_pairs.person_stages,
            "column(step.people.numbers[name])",
            "column(step.people.numbers[name]) // 2",
        ),
        person_audits.examples_of_person,
        "half of her examples are charged, and all of them are drawn",
        is_slow=True,
    ),
    Fault(
        "a person's examples drawn together",
        Edit(rows.tree_rows, _DRAWN, f"together({_DRAWN})"),
        person_audits.examples_of_person,
        "a coin each hides how many of hers are drawn; one coin for all shows her",
        helpers={"together": person_audits.together},
    ),
    Fault(
        "blocks of people by who is in the data",
        Edit(
            rows.random_blocks,
            "generator.permutation(int(np.asarray(design.num_people)))",
            "np.arange(int(np.asarray(design.num_people)))",
        ),
        person_audits.people_in_blocks,
        "who leaves moves everybody behind her into another block",
        SAMPLER,
    ),
    # Correlated noise: the noise, the memory, the turns and the sizes of groups.
    Fault(
        "noise of bands without the norm of their coefficients",
        Edit(PrivateGradient.noise, _NORM, "longest(self.clipping)"),
        band_audits.noised,
        "a contribution is in several releases, and as long as all of its shares",
        is_slow=True,
    ),
    Fault(
        "noise of bands without the count",
        Edit(PrivateGradient.noise, _NORM, "self._longer"),
        band_audits.counted,
        "gradient and vote are one contribution, which is longer than the gradient",
        is_slow=True,
    ),
    Fault(
        "sums kept when a step is given up",
        Edit(
            BandMemory.clear,
            "self._sums: list[list[np.ndarray]] = []",
            "self._sums = getattr(self, '_sums', [])",
        ),
        band_audits.given_up,
        "later releases hold a sum that nobody can decode",
        LEDGER,
        is_slow=True,
    ),
    Fault(
        "groups numbered by released steps",
        (
            Edit(
                ledger.Ledger.turn,
                "number - 1 - len(self._budget.before)",
                "number - 1 - len(self._budget.before) - getattr(self, 'lost', 0)",
            ),
            Edit(
                Trainer._give_up_unreleased,
                "self._now = (state, charged)",
                "self._now = (state, charged)\n"
                "    self.ledger.lost = getattr(self.ledger, 'lost', 0) + 1",
            ),
        ),
        band_audits.given_up,
        "after a step given up the same group is charged again, a step later",
        LEDGER,
        is_slow=True,
    ),
    Fault(
        "the largest group's size charged",
        Edit(described._part, "number // count", "-(-number // count)"),
        band_audits.sizes,
        "of five slots in two groups one group has two, drawn more often",
    ),
)
