"""The queueing model, its simulation, and what they must agree on."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not (BENCHMARKS / "scaling_model.py").is_file():
    pytest.skip("benchmarks/ is not here", allow_module_level=True)


def loaded(name):
    """Import a benchmark, which finds the modules beside it."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


theory, simulation, model = map(loaded, ("scaling_theory", "scaling_simulation", "scaling_model"))
Engine, Lengths, Setup, Trainer, Work = (
    getattr(theory, name) for name in ("Engine", "Lengths", "Setup", "Trainer", "Work")
)
analytic, simulate = theory.analytic, simulation.simulate

TEN = Engine(base_s=0.01, row_s=0.001, context_s=0.0, prompt_s=0.0, slots=64)
EQUAL = Work(64, Lengths.fixed(100), prompt=20)
SPREAD = Work(2048, Lengths.log_normal(100, 0.8, 1000), prompt=20)
TRAINER = Trainer(token_s=1e-3)


def test_lengths_have_the_mean_that_they_are_drawn_with():
    lengths = Lengths.log_normal(600, 0.8, 4096)
    drawn = lengths.draw(40_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert (drawn > 600).mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.max() == 4096
    longest = drawn.reshape(-1, 8).max(1).mean()
    assert lengths.mean_longest(8) == pytest.approx(longest, rel=0.02)
    observed = Lengths.observed([3, 5, 5, 7])
    assert observed.mean == 5
    assert set(observed.draw(500, np.random.default_rng(0)).tolist()) == {3, 5, 7}


def test_colocated_with_equal_lengths_is_the_sum_of_its_parts():
    setup = Setup("colocated", 1, TEN, 1, TRAINER, sync_s=0.5, switch_s=0.25)
    seconds = 100 * (0.01 + 64 * 0.001) + 64 * 120 * 1e-3 + 0.5 + 0.25
    for way in (analytic, simulate):
        assert way(setup, EQUAL).step_s == pytest.approx(seconds)
        assert way(setup, EQUAL).idle == pytest.approx(0.75 / seconds)


def test_context_costs_what_its_tokens_cost():
    engine = replace(TEN, context_s=1e-5)
    setup = Setup("colocated", 1, engine, 1, Trainer(0.0), sync_s=0.0)
    read = 64 * sum(range(20, 120))
    assert simulate(setup, EQUAL).step_s == pytest.approx(7.4 + 1e-5 * read)
    assert analytic(setup, EQUAL).step_s == pytest.approx(7.4 + 1e-5 * read)


def test_one_step_off_takes_the_longer_of_its_sides():
    for token_s, slower in ((1e-4, 7.4), (2e-3, 64 * 120 * 2e-3)):
        setup = Setup("one_step_off", 2, TEN, 1, Trainer(token_s), sync_s=0.5)
        busy = 7.4 + 64 * 120 * token_s
        for way in (analytic, simulate):
            assert way(setup, EQUAL).step_s == pytest.approx(slower + 0.5)
            assert way(setup, EQUAL).idle == pytest.approx(1 - busy / 2 / (slower + 0.5))


def test_one_step_off_on_one_gpu_hides_scoring_and_nothing_else():
    shared = Setup("one_step_off", 1, TEN, 1, TRAINER, sync_s=0.5)
    turns = replace(shared, layout="colocated")
    slow = replace(EQUAL, score_s=0.5, workers=8)
    waiting_s = 64 * 0.5 / 8
    for way in (simulate, analytic):
        assert way(shared, EQUAL).step_s == pytest.approx(way(turns, EQUAL).step_s)
    assert simulate(turns, slow).step_s - simulate(shared, slow).step_s == pytest.approx(waiting_s)


@pytest.mark.parametrize("layout", ["colocated", "one_step_off"])
def test_model_and_simulation_agree_on_long_tails(layout):
    engine = replace(TEN, context_s=1e-6, prompt_s=0.01)
    for engines in (4, 16, 64):  # 512 to 32 completions an engine of 64 slots
        setup = Setup(layout, 2 * engines, engine, engines, TRAINER, sync_s=0.5)
        seen, expected = simulate(setup, SPREAD, steps=3), analytic(setup, SPREAD)
        assert seen.step_s == pytest.approx(expected.step_s, rel=0.06)
        assert seen.idle == pytest.approx(expected.idle, abs=0.05)


def separate(token_s, staleness=4, engines=4):
    return Setup("separate", engines + 1, TEN, engines, Trainer(token_s), 0.0, staleness=staleness)


def test_separate_is_bound_by_the_trainer_where_it_is_slow():
    seen = simulate(separate(1e-3), SPREAD, steps=4)
    assert seen.step_s == pytest.approx(SPREAD.tokens * 1e-3, rel=0.03)
    assert analytic(separate(1e-3), SPREAD).step_s == pytest.approx(SPREAD.tokens * 1e-3)


def test_separate_is_bound_by_its_slots_where_sampling_is_slow():
    engine_tokens_s = 64 / (0.01 + 64 * 0.001)
    seconds = 2048 * SPREAD.lengths.mean / engine_tokens_s / 4
    setup = separate(1e-6)
    assert simulate(setup, SPREAD, steps=4).step_s == pytest.approx(seconds, rel=0.03)
    assert analytic(setup, SPREAD).step_s == pytest.approx(seconds, rel=0.01)


def test_separate_is_bound_by_staleness_where_completions_are_long():
    rates = []
    for staleness in (1, 2, 4):
        setup = separate(1e-5, staleness, engines=32)
        seen, expected = simulate(setup, SPREAD, steps=6), analytic(setup, SPREAD)
        assert seen.rollouts_s == pytest.approx(expected.rollouts_s, rel=0.15)
        rates.append(seen.rollouts_s)
    assert rates[0] * 1.1 < rates[1]
    assert rates[1] < rates[2]


def test_without_staleness_separate_takes_turns():
    setup = Setup("separate", 2, TEN, 1, TRAINER, 0.5, staleness=0)
    assert simulate(setup, EQUAL).step_s == pytest.approx(7.4 + 64 * 120 * 1e-3 + 0.5)


@pytest.mark.parametrize("layout", ["colocated", "one_step_off", "separate"])
def test_scoring_is_the_limit_where_workers_are_few(layout):
    work = replace(SPREAD, score_s=0.5, workers=8)
    setup = Setup(layout, 5, TEN, 4, Trainer(1e-5), sync_s=0.0)
    least = 2048 * 0.5 / 8
    assert analytic(setup, work).step_s == pytest.approx(least, rel=0.1)
    # Workers wait for the first groups to stop, but where engines never drain.
    slack = 1.03 if layout == "separate" else 1.15
    assert least * 0.99 <= simulate(setup, work, steps=3).step_s <= least * slack


def test_workers_needed_are_enough_and_no_more():
    work = replace(SPREAD, score_s=0.5)
    setup = Setup("colocated", 4, TEN, 4, TRAINER, sync_s=0.0)
    needed = simulation.workers_needed(setup, work)
    free = simulate(setup, replace(work, workers=2048), steps=3).step_s
    assert simulate(setup, replace(work, workers=needed), steps=3).step_s < free * 1.06
    assert simulate(setup, replace(work, workers=needed // 2), steps=3).step_s > free * 1.1


def test_the_same_seed_gives_the_same_figures():
    setup = separate(1e-3)
    assert simulate(setup, SPREAD, steps=2) == simulate(setup, SPREAD, steps=2)
    assert simulate(setup, SPREAD, steps=2, seed=1) != simulate(setup, SPREAD, steps=2)


def test_what_does_not_fit_is_not_proposed():
    hardware, large = model.Hardware(), model.MODELS[1]
    for layout in model.LAYOUTS:
        assert model.best(hardware, large, model.work_for(1), layout, 1) is None
    found = model.best(hardware, large, model.work_for(64), "separate", 64)
    used = found.engines * found.engine.gpus + found.trainer.gpus
    assert used <= 64
    assert large.parameters * 16 / found.trainer.gpus < hardware.memory


def test_decoding_is_bound_by_reading_the_weights_at_least():
    hardware, small = model.Hardware(), model.MODELS[0]
    engine = model.engine_for(hardware, small, model.work_for(1), 1, resident=0.0)
    assert engine.base_s > small.parameters * 2 / hardware.hbm
    assert math.isclose(small.token_bytes, 28_672)
