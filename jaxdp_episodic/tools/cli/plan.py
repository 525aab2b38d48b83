"""``plan``, ``init`` and ``report``: designs, configs, and a run in plain words."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic._progress import standard_error
from jaxdp_episodic.accountant.report.in_words import adaptive_in_words, report_in_words
from jaxdp_episodic.accountant.report.report import privacy_report
from jaxdp_episodic.files.atomic import owner_only, write_atomically
from jaxdp_episodic.files.toml_file import read_toml, to_toml
from jaxdp_episodic.tools.cli import command
from jaxdp_episodic.tools.cli.answers import caveats_on_ledger
from jaxdp_episodic.tools.cli.flags import PROGRAM
from jaxdp_episodic.tools.plan import plan as plans
from jaxdp_episodic.tools.plan.first_config import Wishes, first_config
from jaxdp_episodic.tools.plan.pipelines import Pipeline, recommended_pipeline
from jaxdp_episodic.tools.plan.plan import Plan as Candidates, advice, make_plan
from jaxdp_episodic.tools.plan.question import PlanDescription, plan_around, read_plan
from jaxdp_episodic.tools.plan.source import Source, described_source
from jaxdp_episodic.tools.plots.plan import draw_plan
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.data.folders import STORED
from jaxdp_episodic.trainer.data.splits import SPLITS, TRAIN
from jaxdp_episodic.trainer.run.ledger_file import read_ledger

PICTURE = "plan.png"
_NO_CONFIG = (
    "no config: the file has no data or no table train, or the design is in blocks of "
    "people, for which a plan does not say what an episode draws"
)


def do_plan(o: command.Options) -> list[str]:
    """The command ``plan``."""
    what, out = read_plan(o.file), o.out
    plan, pipeline, config, weighed = _searched(what, o.file.parent, standard_error())
    target, draws = what.request, pipeline.learner is None  # episodes, of a design
    out.mkdir(parents=True, exist_ok=True)
    plans.write_table(out / plans.TABLE, plan)
    written = [str(out / plans.TABLE)]
    lines = _table(plan, draws)
    if config is not None:
        lines += ["", weighed] if weighed else []
        heads = ["Written by `jaxdp-episodic plan`."]
        heads += [f"{pipeline.name}: {pipeline.reason}."] if pipeline.name else []
        if draws:
            best = plan.recommended
            heads += [
                f"{weighed}.",
                f"{best.design.name}: {best.episodes_per_step:,.6g} episodes a step, "
                f"signal to noise {best.signal_to_noise:.4g} at a noise multiplier of "
                f"about {best.noise_multiplier:.4g}, which `train` calibrates.",
            ]
        head = "".join(f"# {line}\n" for line in heads)
        write_atomically(out / plans.CONFIG, f"{head}\n{to_toml(config)}")
        written.append(str(out / plans.CONFIG))
    if pipeline.name:
        lines += ["", *pipeline.lines]
        left = plan.recommended.design.request.epsilon
        if left != target.epsilon:
            lines += [f"steps are planned with the epsilon that is left, {left:.4g}"]
    try:
        title = f"epsilon {target.epsilon:.15g} at delta {target.delta:.15g}"
        draw_plan(plan, out / PICTURE, title=title, draws=draws)
        written.append(str(out / PICTURE))
    except (ImportError, ValueError) as error:
        lines.append(f"no picture: {error}")
    lines += [f"{name}: {why}" for name, why in plan.gains.items()]
    lines += [f"left out: {'; '.join(v)}: {k}" for k, v in plan.left_out.items()]
    lines += advice(plan)
    shape, tasks = target.episode, what.population.level_names[:1]
    counts_tasks = shape.ways is None and target.privacy_unit in tasks
    # A pipeline that was weighed was chosen by the number of units.
    uses_sizes = pipeline.weighed or shape.population is None or counts_tasks
    if target.neighboring_relation == "add_remove" and uses_sizes:
        lines.append(
            "note: the plan used sizes of the data, which are private under "
            "add_remove; so is everything written here. If examples are protected, "
            "episode.population, a public lower bound, avoids this"
        )
    lines += [] if config else [_NO_CONFIG]
    return [*lines, f"written: {', '.join(written)}"]


def _searched(
    what: PlanDescription, base: Path, console: Any
) -> tuple[Candidates, Pipeline, dict[str, Any] | None, str]:
    """The candidates, the pipeline, its config, and what correlated noise gives."""
    pipeline, weighed = recommended_pipeline(what), ""
    plan = make_plan(pipeline.left_for_steps(what.request), what.population, console)
    config = plans.training_config(plan, what)
    if config is not None:
        config = pipeline.config(config)
        if pipeline.learner is None:
            config, weighed = plans.with_bands(config, plan)
        config = relocated(config, base)
        TrainingConfig.from_dict(config, where="config")
    return plan, pipeline, config, weighed


def relocated(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """Returns the config with absolute paths, which are valid in any folder."""
    moved = {}
    for part, keys in (("data", ("path", *SPLITS)), ("features", ("path", "cache"))):
        table = config.get(part, {})
        paths = {k: table[k] for k in keys if isinstance(table.get(k), str)}
        if paths:
            absolute = {k: str((base / path).resolve()) for k, path in paths.items()}
            moved[part] = {**table, **absolute}
    return config | moved


def _table(plan: Candidates, draws: bool) -> list[str]:
    """The best setting of each design as a table; the recommended one is marked."""
    names = "design,episodes,complete,steps,noise,signal/noise,effective steps"
    rows = [("", *names.split(","))]
    for one in plan.best:
        is_best = one.design is plan.recommended.design and draws
        numbers = (
            f"{one.episodes_per_step:,.4g}",
            f"{one.complete_per_step:,.3g}",
            f"{one.num_steps:,}",
            f"{one.noise_multiplier:.4g}",
            f"{one.signal_to_noise:.4g}",
            f"{one.effective_steps:.3g}",
        )
        rows.append(("*" * is_best, one.design.name, *numbers))
    best = "* recommended" if draws else "no design is recommended, as below"
    counts = (
        f"{best}; {len(plan.candidates):,} candidates, {sum(plan.is_on_front):,} on "
        "the front of signal to noise, steps and episodes"
    )
    return [*command.aligned(rows, left=2), "", counts]


_OF_SOURCE = ("owner", "size", "grey", "label", "features", "target", "rotations")
_HELD_OUT = ("validation", "test")
_MOST_SHOWN = 20  # columns that are named


def do_init(o: command.Options) -> list[str]:
    """The command ``init``."""
    for name in ("out", "plan", "tune"):
        if (path := getattr(o, name)) is not None:
            if path.exists():
                raise FileExistsError(f"{path} exists; name another file by --{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
    given = o.given(*_OF_SOURCE, *_HELD_OUT)
    how = {"ways": o.ways, "keep_duplicates": o.keep_duplicates}
    source = described_source(o.source, o.out, **how, **given)
    wishes = Wishes(**{field.name: getattr(o, field.name) for field in fields(Wishes)})
    text, remarks = first_config(source, wishes)
    table, base = tomllib.loads(text), o.out.parent
    with command.waiting("checking the config as training would (all data are read)"):
        from jaxdp_episodic.trainer.run.assemble import checked_run

        try:
            config = TrainingConfig.from_dict(table, where="config")
            checked_run(config, base)
        except command.USER_ERRORS as error:
            raise ValueError(
                f"nothing is written, as training would refuse the config: {error}; "
                "change the data or the options (--population, --relation, --shots, "
                "--ways, --unit, --epsilon)"
            ) from error
    written = {o.out: text}
    if o.plan is not None:
        head = f"# For `{PROGRAM} plan {o.plan} --out DIR`.\n\n"
        written[o.plan] = head + to_toml(relocated(plan_around(config, table), base))
    if o.tune is not None:
        if config.evaluation is None:
            raise ValueError(
                "--tune needs held-out data, on which runs are compared; give them by "
                "--validation PATH"
            )
        from jaxdp_episodic.tools.train.search import search_around

        note = "runs are compared on held-out data: set true if they are public"
        search = search_around(relocated(table, base), config, base)
        head = f"# For `{PROGRAM} tune {o.tune} --out DIR`.\n\n"
        written[o.tune] = head + to_toml(search, {"held_out_is_public": note})
    for path, content in written.items():
        with open(path, "x", encoding="utf-8", opener=owner_only) as file:
            file.write(content)  # it holds private numbers
    last = {
        "written": f"{', '.join(map(str, written))}; read the comments, then",
        "next": f"{PROGRAM} train {shlex.quote(str(o.out))} --out runs/1",
    }
    return [*_described(o.source, source), *remarks, *command.facts(last, 10)]


def _described(path: Path, source: Source) -> list[str]:
    """The parts of a source, and how its columns were chosen."""
    rows = {"source": f"{path} ({source.layout})"}
    for split, part in source.parts.items():
        rows[split] = ", ".join(f"{k} {n:,}" for k, n in part.num_units.items())
    if set(source.parts) == {TRAIN}:
        advice = (
            "give the classes names (an array 'classes' or 'labels'), or paths of "
            "other data as validation and test under [data], and an [evaluation]"
        )
        if source.layout == STORED:
            advice = "import the data with --validation and --test"
        rows["held out"] = source.notes.get("held out") or (
            "nothing, so no stage is chosen and there is no score: the last stage is "
            f"released even if it is worse than the features; {advice}"
        )
    for key in ("label", "groups", "features"):
        if key in source.notes:
            names = source.table[key]
            names = [names] if isinstance(names, str) else names
            shown = ", ".join(names[:_MOST_SHOWN])
            if (rest := len(names) - _MOST_SHOWN) > 0:
                shown += f" and {rest:,} more"
            rows[key] = f"{shown} ({source.notes[key]})"
    return command.facts(rows, 10)


def do_report(o: command.Options) -> list[str]:
    """The command ``report``."""
    with command.waiting():
        if o.file.is_dir() or o.file.suffix in (".sqlite", ".jsonl"):
            content = read_ledger(o.file)
            said = [f"{_validation.steps_are(content.charged)} charged."]
            said += caveats_on_ledger(content)
            if (budget := content.adaptive_taken) is not None:
                return [adaptive_in_words(budget, said)]
            step, number = content.run_charged()
            report = privacy_report(step, num_steps=number, delta=content.delta)
            return [report_in_words(report), "", *(f"* {text}" for text in said)]
        keys = read_toml(o.file).keys()
        if "episode" in keys:  # a plan
            description = read_plan(o.file)
            for table in ("data", "train"):
                if getattr(description, table) is None:
                    plan = f"a plan without the table {table}"
                    raise ValueError(f"{plan} recommends no run to report on")
            *_, planned, _ = _searched(description, o.file.parent, None)
            if planned is None:
                raise ValueError(f"a plan recommends no run here; {_NO_CONFIG}")
            config = TrainingConfig.from_dict(planned, where="config")
            return [_of_config(config, o.file.parent)]
        if "learner" in keys:  # a run
            return [_of_config(read_config(o.file), o.file.parent)]
        request = read_request(o.file, EpsilonRequest)
        if request.delta is None:
            raise ValueError("a report needs a delta, got a request with an epsilon")
        asked: Any = {"delta": request.delta, "method": request.method}
        step: Any = request.planned("report")
        report = privacy_report(step, num_steps=request.num_steps, **asked)
        return [report_in_words(report)]


def _of_config(config: TrainingConfig, base: Path) -> str:
    """The words of a run before it begins, if training would begin it."""
    from jaxdp_episodic.trainer.run import assemble, report as reports

    budget: Any
    if config.adaptive is None:
        trainer, tables = assemble.checked_run(config, base)
        budget = trainer.budget
        people = reports.people_of(trainer.data, str(budget.step.privacy_unit))
    else:
        tables = assemble.Tables(config, base, keeps_features=False)
        budget, checks = assemble.budget_of(config, tables.load)
    is_seeded = config.seed is not None
    lines = reports.opening(is_private=budget.is_private, is_seeded=is_seeded)[2:]
    if not budget.is_private:
        return "\n".join(lines)
    cut, bounds = tables.truncation, []
    if cut is not None:
        bounds.append(reports.bounded(cut, for_release=False))
    if config.adaptive is None:
        is_default = config.normalizer is None and budget.takes_steps
        report = reports.report_of_budget(
            budget, budget.num_steps, people, has_default_normalizer=is_default
        )
        words = "\n\n".join([report_in_words(report), *bounds])
    else:
        fixed = [name for name, check in checks.items() if check.fixed]
        how = config.noise_law, fixed, config.clipping
        said = reports.adaptive_methods(budget, *how)
        words = adaptive_in_words(budget, [*said, *bounds])
    return "\n".join([*lines, words])
