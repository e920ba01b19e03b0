"""Quick drafts while drafting rests: asked for where the text repeats itself and that pays, at no cost to the rest."""

import itertools
import math

import numpy as np
import pytest

from foredraft.contracts import EMPTY_DRAFT, CostCurve, Draft, Verdict
from foredraft.control import Beside, MeasuredControl
from foredraft.graph.tree import chain_parents
from foredraft.index.copied import copied

CHEAP = CostCurve((1, 64), (1.0, 1.0))
MODERATE = CostCurve((1, 2, 64), (1.0, 1.1, 7.3))
DEAR = CostCurve((1, 2, 64), (1.0, 2.0, 64.0))


def rested(**known):
    """What texts tell the next one behind which drafting did not pay: it begins with a rest of 64 steps."""
    return Beside(unpaid=9, plain_pace=1.0, plain_steps=9, **known)


def write(control, text, prompt=(), *, curve=MODERATE, late=0.0, behind=0.0, jump=None):
    """Write `text` by plain and quickly drafted steps; return each quick budget's nodes by where it was asked for.

    `late` is what a quickly drafted step takes beside its pass, `behind` what a plain one behind it takes more; `jump`
    is what the clock says of every seventh step.
    """
    table, asked, at, steps, after = curve.table(64), {}, 0, itertools.count(), False
    while at < len(text):
        budget = control.budget(50)
        ids = np.array([*prompt, *text[:at]], np.int64)
        draft = EMPTY_DRAFT
        if budget.quick:
            asked[at] = budget.nodes
            draft = control.trim(copied(ids, np.zeros(budget.nodes, np.uint8)), budget)
            assert len(draft) == budget.nodes, "what is asked for is there"
        right = 0
        while right < len(draft) and at + right < len(text) - 1 and draft.tokens[right] == text[at + right]:
            right += 1
        tokens = tuple(text[at : at + right + 1])
        jumps = jump is not None and next(steps) % 7 == 6
        seconds = jump if jumps else float(table[len(draft) + 1]) + behind * (after and not len(draft))
        after = len(draft) > 0
        in_vain = budget.nodes > 0 and not budget.quick  # other drafts are none, and asking for them takes time
        verdict = Verdict(tokens, tuple(range(right)), draft, 0)
        control.observe(verdict, seconds, late * (len(draft) > 0) + in_vain, float(in_vain))
        at += len(tokens)
    return asked


def resting(curve=MODERATE, prompt=None, beside=None, *, quick=True, most_nodes=64):
    prompt = None if prompt is None else np.array(prompt)
    return MeasuredControl(curve, most_nodes, rested() if beside is None else beside, prompt, quick=quick)


PROMPT = list(range(40))
COPYING = [token for n in range(8) for token in (100 + n, 4 * n + 1, 4 * n + 2, 4 * n + 3, 200 + n)]
"""Pieces of the prompt, three tokens each, which is too short to end a rest."""


def found(text, prompt):
    """Where the two tokens before occurred earlier."""
    pairs = list(itertools.pairwise([*prompt, *text]))
    last = [len(prompt) + at - 2 for at in range(len(text))]  # where the last pair begins
    return {at for at, place in enumerate(last) if pairs[place] in pairs[:place]}


def test_a_rest_copies_where_the_text_repeats_itself_or_its_prompt_and_nowhere_else():
    places = found(COPYING, PROMPT)
    asked = set(write(resting(prompt=PROMPT), COPYING, PROMPT))
    assert asked <= places
    assert {at for at in places if at > 10} <= asked | {at + 1 for at in asked}, "all but what a copy wrote itself"
    assert write(resting(prompt=PROMPT), list(range(100, 160)), PROMPT) == {}
    assert write(resting(), [*COPYING, *COPYING]), "its own text too"


def test_a_drafter_that_cannot_is_not_asked():
    assert write(resting(prompt=PROMPT, quick=False), COPYING, PROMPT) == {}


def behind(*tokens):
    """A resting control that has read three new tokens, and then these."""
    control = resting(CostCurve((1, 64), (1.0, 12.0)), PROMPT)
    for verdict in ((900,), (901,), (902,), tokens):
        control.observe(Verdict(verdict, (), EMPTY_DRAFT, 0), 1.0, 0.0)
    return control


def test_no_more_is_asked_for_than_is_allowed_or_useful():
    assert max(write(resting(CHEAP, PROMPT), COPYING, PROMPT, curve=CHEAP).values()) > 2
    assert max(write(resting(CHEAP, PROMPT, most_nodes=2), COPYING, PROMPT, curve=CHEAP).values()) == 2
    control = behind(10, 11, 12, 13)
    assert control.budget(2).nodes == 2
    assert control.budget(0).nodes == 0


def test_the_more_was_repeated_the_more_is_asked_for():
    new, short, long = (behind(*range(10, 10 + count)).budget(50).nodes for count in (2, 4, 8))
    assert new == 0, "where nothing was copied yet, two tokens may be the same by chance"
    assert 0 < short < long


def test_nothing_is_copied_where_verifying_costs_what_it_gains():
    assert set(write(resting(DEAR, PROMPT), COPYING, PROMPT, curve=DEAR).values()) <= {0}


def test_where_pairs_come_again_but_not_what_followed_copying_ends():
    copies = [token for number in range(15) for token in (10, 11, 12, 100 + number)]
    others = [token for number in range(60) for token in (1, 2, 1000 + number)]
    places = [at for at, nodes in write(resting(), [*copies, *others]).items() if nodes]
    assert len([at for at in places if at < len(copies)]) > 8
    assert len([at for at in places if at > len(copies) + 60]) < 4, places


def test_copying_that_takes_longer_than_it_gains_ends_and_is_tried_again():
    text = [token for number in range(200) for token in (10, 11, 12, 1000 + number, 2000 + number, 3000 + number)]
    quick, slow = ([at for at, n in write(resting(), text, late=late).items() if n] for late in (0.0, 1.5))
    assert len(slow) < len(quick) / 2
    assert slow[-1] > 600


@pytest.mark.parametrize("jump", [0.0, -5.0, math.inf, -math.inf, math.nan, 3600.0])
def test_a_clock_that_jumps_does_not_end_copying(jump):
    text = [token for number in range(60) for token in (10, 11, 12, 1000 + number)]
    with np.errstate(all="raise"):
        steady, asked = (write(resting(), text, jump=each) for each in (None, jump))
    assert len([n for n in asked.values() if n]) > 0.5 * len([n for n in steady.values() if n]) > 10


def chain(length, rate):
    score = (rate ** np.arange(1, length + 1)).astype(np.float32)
    return Draft(np.arange(length, dtype=np.int32), chain_parents(length), score)


def times_asked(saves):
    """Of 60 steps. Each draft is right in its first node: 2 tokens in 1.4 passes."""
    control = MeasuredControl(CHEAP, beside=Beside(plain_pace=1.0, plain_steps=9, saves=saves), quick=True)
    asked = 0
    for number in range(60):
        budget = control.budget(50)
        full = budget.nodes > 0 and not budget.quick
        draft = control.trim(chain(2, 0.9), budget) if full else EMPTY_DRAFT
        path = (0,) if len(draft) else ()
        tokens = tuple(range(10 * number, 10 * number + 1 + len(path)))
        control.observe(Verdict(tokens, path, draft, 0), 1.0, 0.4 * full, 0.0)
        asked += full
    return asked


def test_drafting_that_pays_less_than_quick_drafts_rests():
    assert times_asked(saves=0.0) > 55
    assert times_asked(saves=0.4) < 40, "rests write a token in 0.6 passes"


def test_what_copying_saves_is_known_to_the_next_text():
    beside = rested()
    for number in range(3):
        text = [token for each in range(20) for token in (10, 11, 12, 13, 1000 * number + each)]
        write(resting(beside=beside), text)
    assert 0.2 < beside.saves < 0.8
    for number in range(6):
        write(resting(beside=beside), list(range(100 * number, 100 * number + 60)))
    assert beside.saves < 0.05


def test_a_plain_step_that_takes_longer_behind_a_copy_is_put_down_to_it():
    text = [token for number in range(60) for token in (10, 11, 12, 1000 + number)]
    for takes in (0.0, 0.2):
        beside = rested()
        write(resting(beside=beside), text, behind=takes)
        assert beside.behind == pytest.approx(takes, abs=0.05)


def test_a_copy_in_a_text_that_seldom_copies_is_learned_from_too():
    beside = rested()
    control = resting(CostCurve((1, 64), (1.0, 12.0)), PROMPT, beside)
    for verdict in (range(500, 560), range(600, 660), range(700, 760), (10, 11, 12, 13)):
        control.observe(Verdict(tuple(verdict), (), EMPTY_DRAFT, 0), 1.0, 0.0)
    budget = control.budget(50)
    assert budget.quick
    assert budget.nodes > 0
    draft = copied(np.array([*PROMPT, 10, 11, 12, 13]), np.zeros(budget.nodes, np.uint8))
    control.observe(Verdict((900,), (), draft, 0), 3.0, 0.0)
    assert beside.quick > 0
    assert beside.saves < 0
