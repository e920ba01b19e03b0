"""How much of a server's chains is handed over: simulated servers with known costs, and kernels against naive ones."""

import numpy as np
import pytest

import naive
from foredraft.control.evidence import Evidence
from foredraft.integrations.batch_control import BatchControl, verified, worth_verifying
from foredraft.integrations.batches import Batch, Chains

MOST = 8


class Server:
    """Requests whose drafted tokens are each right with probability `right`, and a clock that steps move on.

    A step takes `fixed` seconds and `a_token` for each drafted token; looking for drafts takes `drafting`.
    """

    def __init__(self, rows, right, fixed=1.0, a_token=0.0, drafting=0.0):
        self.right, self.fixed, self.a_token, self.drafting = right, fixed, a_token, drafting
        self.rows, self.now, self.drawn = rows, 0.0, np.random.default_rng(7)
        self.control = BatchControl(rows, MOST, clock=lambda: self.now)
        self.token_ids, self.lengths = np.zeros((rows, 100_000), np.int32), np.full(rows, 5)
        self.known, self.steps = np.zeros(rows, np.int64), []

    def step(self):
        """Draft and verify once; note how many tokens each request was given and how many were right."""
        rows = np.arange(self.rows)
        batch = Batch(self.token_ids, rows, self.lengths.copy(), rows, self.known.copy(), np.full(self.rows, MOST))
        drafts = self.control.begin(batch, whole=True)
        chains = batch.no_chains(MOST)
        if drafts:
            self.now += self.drafting
            chains.tokens[:], chains.counts[:] = 1, MOST
            chains.scores[:] = self.right ** np.arange(1, MOST + 1)
        kept = self.control.trim(batch, chains)
        self.now += self.fixed + self.a_token * kept.sum()
        self.known = self.lengths.copy()
        accepted = []
        for row in rows:
            right = np.cumprod(self.drawn.random(kept[row]) < self.right).sum()
            end = self.lengths[row] + right
            self.token_ids[row, self.lengths[row] : end], self.token_ids[row, end] = 1, 2
            self.lengths[row] = end + 1
            accepted.append(int(right))
        self.steps.append((kept.tolist(), accepted, drafts))

    def run(self, steps):
        """Return tokens per second of the steps, and the mean number of tokens given to a request."""
        start, before = self.now, self.lengths.sum()
        for _ in range(steps):
            self.step()
        given = np.mean([each for kept, _, _ in self.steps[-steps:] for each in kept])
        return (self.lengths.sum() - before) / (self.now - start), given


def test_tokens_that_cost_nothing_are_all_handed_over():
    server = Server(2, right=0.5)
    assert server.run(300)[1] > 0.9 * MOST


def test_a_server_is_never_much_slower_than_without_drafts_where_nothing_is_right():
    server = Server(4, right=0.0, a_token=0.2, drafting=0.1)
    speed, _ = server.run(2000)
    assert speed > 0.97 * 4
    drafting = np.flatnonzero([drafts for _, _, drafts in server.steps[200:]])
    assert len(drafting) > 0  # it is tried again
    assert np.diff(drafting).max() > 100  # ever more seldom


@pytest.mark.parametrize("rows", [1, 6])
def test_what_is_handed_over_is_about_what_is_best(rows):
    right, fixed, a_token = 0.6, 1.0, 0.15 / rows
    speeds = [
        rows * sum(right**k for k in range(count + 1)) / (fixed + a_token * rows * count) for count in range(MOST + 1)
    ]
    server = Server(rows, right, fixed, a_token)
    server.run(300)
    speed, given = server.run(1500)
    assert 0 < np.argmax(speeds) < MOST
    assert speed > 0.95 * max(speeds)
    assert abs(given - np.argmax(speeds)) < 1.5


def test_costs_that_change_are_followed():
    server = Server(1, 0.7)
    assert server.run(300)[1] > 0.9 * MOST
    server.a_token = 2.0
    server.run(300)
    assert server.run(600)[0] > 0.9
    server.a_token = 0.0
    server.run(1500)
    assert server.run(300)[1] > 0.8 * MOST


def test_drafting_that_pays_goes_on_while_the_machine_grows_slow_and_quick_again():
    server = Server(1, right=0.7, a_token=0.05)
    for number in range(2400):
        slow = 1 + number // 150 % 2  # twice as slow in every other stretch
        server.fixed, server.a_token = slow, 0.05 * slow
        server.step()
    assert np.mean([drafts for _, _, drafts in server.steps[150:]]) > 0.8


def test_drafting_that_pays_goes_on_where_times_are_erratic():
    server, drawn = Server(1, right=0.7), np.random.default_rng(3)
    for _ in range(1500):
        factor = drawn.choice([1, 1.3, 6], p=[0.6, 0.25, 0.15])
        server.fixed, server.a_token = factor, 0.05 * factor
        server.step()
    assert np.mean([drafts for _, _, drafts in server.steps[150:]]) > 0.8


def test_steps_that_read_a_prompt_or_stall_are_not_timed():
    def given(disturbed):
        server = Server(1, right=0.5, a_token=0.02)
        for number in range(600):
            if disturbed and number % 10 == 5:
                server.known[:] = 0  # a new text: its prompt was read meanwhile
                server.now += 50
            if disturbed and number % 100 == 7:
                server.now += 1000
            server.step()
        return server.run(300)[1]

    assert given(disturbed=True) == pytest.approx(given(disturbed=False), abs=1)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_worth_verifying_are_those_of_all_numbers_tried(seed):
    drawn = np.random.default_rng(seed)
    rows = int(drawn.integers(1, 5))
    counts = drawn.integers(0, MOST + 1, rows).astype(np.int32)
    scores = np.cumprod(drawn.choice([0.25, 0.5, 0.8, 1.0], (rows, MOST)), axis=1).astype(np.float32)
    seen = drawn.integers(0, 30, 12).astype(np.float64)
    evidence = Evidence(seen, np.floor(seen * drawn.random(12)), seen * 0.7 ** np.arange(1, 13))
    costs = (1.0, 1.0 + 0.2 * drawn.random(), 0.3 * drawn.random())
    expected = naive.worth_verifying(scores, counts, evidence, *costs)
    assert worth_verifying(scores, counts, evidence, *costs).tolist() == expected


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20))
def test_what_was_verified_is_told_apart_from_what_was_right(seed):
    drawn = np.random.default_rng(seed)
    rows, slots = 4, 6
    chains = Chains(
        drawn.integers(0, 2, (slots, MOST)).astype(np.int32),
        drawn.random((slots, MOST)).astype(np.float32),
        drawn.integers(0, MOST + 1, slots).astype(np.int32),
    )
    token_ids = drawn.integers(0, 2, (rows, 40)).astype(np.int32)
    known = drawn.integers(0, 20, rows) * drawn.integers(0, 2, rows)
    lengths, slot = known + drawn.integers(1, MOST, rows), drawn.permutation(slots)[:rows]
    arguments = (token_ids, np.arange(rows), lengths, known, slot, *chains)
    scores, path = verified(*arguments)
    assert (scores.tolist(), path.tolist()) == naive.verified(*arguments)
