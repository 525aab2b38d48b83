"""The classic faults: the lines each changes, and the check that detects it."""

from __future__ import annotations

from jaxdp_episodic.accountant.questions import contribution_pairs, dominating_pair
from jaxdp_episodic.trainer.draw import generators, rows, sampler
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.run import ledger, mechanisms, trainer
from mutation import audits, crashes, draw_audits, sampled
from mutation.band_faults import BAND_FAULTS
from mutation.person_faults import PERSON_FAULTS
from mutation.planting import AUDIT, LEDGER, SAMPLER, Edit, Fault


def _noise(new: str) -> Edit:
    drawn = "self._kind, steps * multiplier,"
    return Edit(private_gradient.PrivateGradient, "noise", drawn, new)


_CLIP = "clipped, norm, finite = clip_by_norm(contribution, clip)"
_UNCLIPPED = Edit(
    private_gradient,
    "_summer",
    _CLIP,
    "_, norm, finite = clip_by_norm(contribution, clip)\n"
    "            clipped = contribution",
)
_ADDED = "return jax.tree.map(jnp.add, totals, added)"
_CLIPPED_SUM = Edit(
    private_gradient,
    "_summer",
    _ADDED,
    f"total = {_ADDED.removeprefix('return ')}\n        "
    "return total._replace(gradient=clip_by_norm(total.gradient, clip)[0])",
)
_DONE = "self._now = (state._replace(**fields), number)"
_SHUFFLED = Edit(
    rows.TreeRows,
    "draw",
    "draw_units(self.levels, generator)",
    "batch_of_an_epoch(self, generator)",
)
_VANISHED = Edit(
    sampler,
    "rows_and_levels",
    "make_levels(sampling.levels, population, slots_of)",
    "make_levels(sampling.levels, without_empty(population), slots_of)",
)

FAULTS = (
    Fault(
        "noise halved",
        (_noise("self._kind, 0.5 * steps * multiplier,"),),
        AUDIT,
        audits.loud_unit,
        "with half the deviation the unit stands out twice as far",
    ),
    Fault(
        "noise halved, in a run of the trainer",
        (_noise("self._kind, 0.5 * steps * multiplier,"),),
        AUDIT,
        audits.trainer_steps,
        "the same, seen in the steps of two real runs",
        is_slow=True,
    ),
    Fault(
        "discrete noise without its multiplier",
        (_noise("self._kind, steps,"),),
        AUDIT,
        audits.hardened_unit,
        "the noise is that of a multiplier of one, here a quarter of what is claimed",
        is_slow=True,
    ),
    Fault(
        "noise for the mean instead of the sum",
        (
            Edit(
                private_gradient.PrivateGradient,
                "_released",
                "(x + n) * unit",
                "(x + n / divisor) * unit",
            ),
        ),
        AUDIT,
        audits.loud_unit,
        "the sum gets the noise of the mean and is then divided once more",
        is_slow=True,
    ),
    Fault(
        "no clipping",
        (_UNCLIPPED,),
        AUDIT,
        audits.loud_unit,
        "a contribution of any length goes through",
    ),
    Fault(
        "clip after the sum",
        (_UNCLIPPED, _CLIPPED_SUM),
        AUDIT,
        audits.loud_unit,
        "one unit that outshouts the others turns the whole sum round: 2C, not C",
        is_slow=True,
    ),
    Fault(
        "realised batch size as divisor",
        (
            Edit(
                private_gradient.PrivateGradient,
                "_noised",
                "drawn, float(clip), divisor, bands)",
                "drawn, float(clip), max(float(totals.units), 1.0), bands)",
            ),
        ),
        AUDIT,
        audits.silent_unit,
        "the noise in all other entries shows by what it was divided",
        is_slow=True,
    ),
    Fault(
        "a key used twice, by two layers",
        (
            Edit(
                private_gradient.PrivateGradient,
                "noise",
                "np.split(flat, np.cumsum(sizes)[:-1])",
                "[flat[:size] for size in sizes]",
            ),
        ),
        AUDIT,
        audits.two_layers,
        "the difference of two layers has no noise",
        is_slow=True,
    ),
    Fault(
        "a key used twice, by two steps",
        (
            Edit(
                generators.Keys,
                "new",
                "_hashed(purpose, self._seed, number)",  # the audit's run has a seed
                "_hashed(purpose, self._seed, 0)",
            ),
        ),
        AUDIT,
        audits.trainer_steps,
        "the same noise in every step hides nothing",
        is_slow=True,
    ),
    Fault(
        "dropped Poisson tasks",
        (
            Edit(
                rows.TreeRows,
                "draw",
                "draw_units(self.levels, generator)",
                "draw_units(self.levels, generator)[: int(1.2 * self.expected)]",
            ),
        ),
        SAMPLER,
        sampled.drawn_tasks,
        "a cap on the batch: whether a task takes part depends on the others",
    ),
    Fault(
        "dropped Poisson tasks, behind the first block",
        (
            Edit(
                episode,
                "make_blocks",
                "range(math.ceil(max(number, 1) / block_size))",
                "range(1)",
            ),
        ),
        SAMPLER,
        sampled.blocks_of_tasks,
        "the same cap where draws become arrays of one shape",
        is_slow=True,
    ),
    Fault(
        "shuffled epochs charged as Poisson",
        (_SHUFFLED,),
        SAMPLER,
        sampled.drawn_examples,
        "batches of one size, no unit twice in an epoch: no coin was tossed",
        {"batch_of_an_epoch": sampled.batch_of_an_epoch},
    ),
    Fault(
        "shuffled epochs charged as Poisson, over an epoch",
        (_SHUFFLED,),
        AUDIT,
        draw_audits.epoch,
        "in an epoch every unit takes part for certain, by coins perhaps never",
        {"batch_of_an_epoch": sampled.batch_of_an_epoch},
        is_slow=True,
    ),
    Fault(
        "bins reused in every epoch",
        (
            Edit(
                mechanisms.RunDraws,
                "_epoch",
                'self._keys.new("epoch", number)',
                'self._keys.new("epoch", 0)',
            ),
        ),
        SAMPLER,
        sampled.bins_of_two_epochs,
        "what a unit's step shows adds up over the rows, as if the noise were less",
    ),
    Fault(
        "batches of fixed size charged as independent bins",
        (
            Edit(
                rows.EpochRows,
                "begin",
                "if isinstance(self._scheme, RandomAllocation):",
                "if False:",
            ),
        ),
        AUDIT,
        draw_audits.swapped_in_an_epoch,
        "the others' sums are known, and a swap moves one of them by 2C",
        is_slow=True,
    ),
    Fault(
        "Poisson's number charged for episodes in epochs",
        (
            Edit(
                dominating_pair,
                "_uses",
                "return [_allocated(step, u, scheme, count) for u in _all_units(step)]",
                "return [[(dominating_pair(step), count)]]",
            ),
        ),
        AUDIT,
        audits.episodes_of_epochs,
        "whether the example is drawn is one coin an epoch, and no epoch is idle",
        is_slow=True,
    ),
    Fault(
        "sensitivity C where it is 2C",
        (
            Edit(
                contribution_pairs,
                "one_contribution",
                "np.where(everyone, shift, twice)",
                "shift",
            ),
        ),
        AUDIT,
        audits.swapped_example,
        "without replacement another contribution takes the unit's place",
    ),
    Fault(
        "the product rate with per-example clipping",
        (
            Edit(
                dominating_pair,
                "_multistage",
                "outer=product(rates[:clip])",
                "outer=ALWAYS",
            ),
            Edit(
                dominating_pair,
                "_multistage",
                "rate, inner = rates[clip],",
                "rate, inner = product(rates[: clip + 1]),",
            ),
        ),
        AUDIT,
        audits.classmates,
        "the other examples of its task show that the task was drawn",
        is_slow=True,
    ),
    Fault(
        "a class slot clipped alone in a ProtoNet episode",
        (
            Edit(
                private_gradient,
                "_summer",
                _CLIP,
                "clipped, norm, finite = clipped_by_slot(loss, params, unit, clip)",
            ),
        ),
        AUDIT,
        audits.support_example,
        "one support example turns the contributions of all class slots round",
        {"clipped_by_slot": audits.clipped_by_slot},
        is_slow=True,
    ),
    Fault(
        "an emptied unit that vanishes",
        (_VANISHED,),
        SAMPLER,
        sampled.fixed_number_of_tasks,
        "when its last example leaves, all others are drawn more often",
        {"without_empty": sampled.without_empty},
    ),
    Fault(
        "an emptied unit that vanishes, in what is released",
        (_VANISHED,),
        AUDIT,
        draw_audits.last_of_its_class,
        "the other class is then drawn every time, with all of its examples",
        {"without_empty": sampled.without_empty},
        is_slow=True,
    ),
    Fault(
        "charge after release",
        (
            Edit(trainer.Trainer, "_step", "self.ledger.charge()", "pass"),
            Edit(
                trainer.Trainer,
                "_step",
                _DONE,
                f"{_DONE}\n    if number > self.ledger.charged:\n"
                "        self.ledger.charge()",
            ),
        ),
        LEDGER,
        crashes.killed_and_resumed,
        "whoever is killed in between has released a step that nobody charged",
    ),
    Fault(
        "resume that forgets steps",
        (
            Edit(
                ledger,
                "resumed_run",
                '{"charged": content.charged',
                '{"charged": content.charged - 1',
            ),
        ),
        LEDGER,
        crashes.killed_and_resumed,
        "steps after the checkpoint would be released again, of which nobody knew",
    ),
    Fault(
        "resume that forgets steps, and takes them again",
        (
            Edit(
                trainer.Trainer,
                "_apply_releases",
                "store.releases(after=self.num_steps_taken)",
                "()",
            ),
            Edit(
                trainer.Trainer,
                "_give_up_unreleased",
                "if taken == charged:",
                "if True:",
            ),
        ),
        LEDGER,
        crashes.killed_and_resumed,
        "steps are taken again, uncharged, with fresh noise: two releases of each",
    ),
    *PERSON_FAULTS,
    *BAND_FAULTS,
)
