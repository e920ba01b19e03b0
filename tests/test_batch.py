"""Batches: every text is the same as when generated alone, whatever other sequences do."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foredraft.api import Generator
from foredraft.contracts import EMPTY_DRAFT, Draft, Needs
from foredraft.engine.batch import steps
from foredraft.errors import ForedraftWarning, OutOfMemoryError, PromptTooLongError, UsageError
from foredraft.model.arena import Arena
from foredraft.model.compiled.attention import replaced_attention
from foredraft.model.joint_passes import JointPasses, joint_passes
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.batches import counted, finish
from support.compilation import compiled_once
from support.families import VOCABULARY, target_of
from support.llamas import small_model
from support.tokenizers import pretrained_words


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def compiled(request, packages):
    """A tiny llama as a target whose forward is compiled."""
    return compiled_once(small_model(request.param), packages)


def generator(target, method="prompt_lookup", options=None, nodes=None):
    options = {"table": "none"} if method in ("adaptix", "auto") and options is None else options
    return Generator(target, None, method=method, options=options or {}, nodes=nodes)


def texts(count, seed=0):
    """Repetitive prompts of 3 to 200 tokens, and the options of each."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        phrase = rng.integers(0, VOCABULARY, rng.integers(3, 40))
        prompt = np.tile(phrase, 5)[: rng.integers(3, 200)].astype(np.int64)
        sampling = SamplingOptions() if number % 3 == 0 else SamplingOptions(True, temperature=0.3, seed=number)
        found.append((prompt, sampling, int(rng.integers(1, 60))))
    return found


def alone(target, prompt, sampling, count):
    run = generator(target, "none").begin(prompt, sampling, max_new_tokens=count)
    return [token for record in steps(run) for token in record.emitted]


def steps_of(batch):
    while len(batch):
        yield batch.step()


def emitted(lane):
    return [token for record in lane.records for token in record.emitted]


@pytest.mark.parametrize(
    ("method", "nodes"), [("none", None), ("prompt_lookup", 5), ("adaptix", None), ("auto", None)], ids=str
)
def test_a_text_does_not_depend_on_its_company(compiled, method, nodes):
    """Texts that join at random steps equal those of plain decoding alone."""
    given, rng = texts(14), np.random.default_rng(5)
    writer = generator(compiled, method, nodes=nodes)
    batch, lanes = writer.batch(), []
    assert isinstance(joint_passes(compiled, 2**20), JointPasses)
    while len(lanes) < len(given) or len(batch):
        while len(lanes) < len(given) and rng.random() < 0.4:
            prompt, sampling, count = given[len(lanes)]
            lanes.append(batch.join(writer.begin(prompt, sampling, max_new_tokens=count)))
        batch.step()
    for lane, (prompt, sampling, count) in zip(lanes, given, strict=True):
        assert emitted(lane) == alone(compiled, prompt, sampling, count)
        assert lane.seq.finish == "length"


ALONE = "falcon"  # a family whose attention is not transformers', so that each text has passes of its own


def test_texts_written_one_by_one_are_the_same():
    target = target_of(ALONE)
    writer = generator(target, "prompt_lookup", nodes=4)
    batch = writer.batch()
    assert joint_passes(target, 2**20) is None
    given = texts(4, seed=3)
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=count)) for prompt, how, count in given]
    finish(batch)
    assert [emitted(lane) for lane in lanes] == [alone(target, *each) for each in given]


def test_a_pass_that_finds_no_memory_ends_its_text_alone(monkeypatch):
    """Of a target that runs a pass for each sequence: one fails in its prompt, one after some tokens."""
    target = target_of(ALONE)
    writer = generator(target, "none")
    batch, given = writer.batch(), [(np.arange(20) + number, SamplingOptions(), 30) for number in range(3)]
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=count)) for prompt, how, count in given]

    def full(layout, cache, limit):
        if any(cache is lane.seq.cache and layout.at >= limit[number] for number, lane in enumerate(lanes[:2])):
            raise OutOfMemoryError("There is no memory.")

    for name in ("forward", "run"):
        theirs = getattr(target, name)

        def limited(layout, cache, *hidden, own=theirs, **options):
            full(layout, cache, (0, 30))
            return own(layout, cache, *hidden, **options)

        monkeypatch.setattr(target, name, limited)
    with pytest.warns(ForedraftWarning, match="There is no memory. The text ends here"):
        finish(batch)
    monkeypatch.undo()
    assert isinstance(lanes[0].failure, OutOfMemoryError)
    expected = [alone(target, *each) for each in given]
    assert (lanes[1].seq.finish, emitted(lanes[1])) == ("memory", expected[1][: len(emitted(lanes[1]))])
    assert (lanes[2].seq.finish, emitted(lanes[2])) == ("length", expected[2])


@pytest.mark.parametrize("family", ["llama", ALONE])
def test_a_draft_that_finds_no_memory_in_a_pass_is_dropped(family, monkeypatch):
    target, given = target_of(family), (np.tile(np.arange(5), 6), SamplingOptions(), 30)
    expected = alone(target, *given)
    theirs = target.forward

    def limited(layout, cache, **options):
        if layout.rows > 1:
            raise OutOfMemoryError("There is no memory.")
        return theirs(layout, cache, **options)

    monkeypatch.setattr(target, "forward", limited)
    writer = Generator(target, None, method="prompt_lookup", nodes=4)
    run = writer.begin(given[0], given[1], max_new_tokens=30)
    assert sum((record.emitted for record in steps(run)), ()) == tuple(expected)
    assert run.seq.finish == "length"


def test_a_text_whose_drafter_reads_states_that_the_batch_does_not_return_is_refused():
    writer = generator(target_of("llama"), "none")
    batch, drafter = writer.conversation(), Bad(lambda: EMPTY_DRAFT)
    drafter.needs = Needs(hidden=(1,))
    writer.attach("bad", drafter, 4)
    with pytest.raises(UsageError, match="another method"):
        batch.join(writer.begin(np.arange(20), SamplingOptions(), max_new_tokens=4))


def test_a_joint_pass_that_finds_no_memory_is_made_in_parts(compiled, monkeypatch):
    writer = generator(compiled, "none")
    batch, given = writer.batch(), [(np.arange(20) + number, SamplingOptions(), 30) for number in range(3)]
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=count)) for prompt, how, count in given]
    theirs = JointPasses._pass

    def limited(self, rows):
        if len(rows) > 1 or (rows[0].cache is lanes[1].seq.cache and rows[0].layout.at > 30):
            raise MemoryError
        return theirs(self, rows)

    monkeypatch.setattr(JointPasses, "_pass", limited)
    with pytest.warns(ForedraftWarning, match="The text ends here"):
        finish(batch)
    expected = [alone(compiled, *each) for each in given]
    assert [lane.seq.finish for lane in lanes] == ["length", "memory", "length"]
    expected[1] = expected[1][: len(emitted(lanes[1]))]
    assert [emitted(lane) for lane in lanes] == expected


class Bad:
    """A drafter that proposes what `propose` returns and cannot be closed."""

    name, needs, source_names = "bad", Needs(), ("bad",)

    def __init__(self, propose):
        self.propose = lambda _view, _budget: propose()

    def open(self, _context):
        return self

    def observe(self, _verdict):
        """Learn nothing."""

    def close(self):
        raise RuntimeError("it stays open")


@pytest.mark.parametrize("proposed", [None, Draft([1], [-1])], ids=["nothing", "lists"])
def test_a_drafter_that_keeps_no_promise_ends_its_text_alone(compiled, proposed):
    writer, prompt = generator(compiled, "none"), np.arange(20)
    broken = generator(compiled, "none")
    broken.attach("bad", Bad(lambda: proposed), 4)
    batch = writer.batch()
    bad = batch.join(broken.begin(prompt, SamplingOptions(), max_new_tokens=9))
    good = batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=9))
    with pytest.warns(ForedraftWarning, match="it stays open"):
        list(steps_of(batch))
    assert isinstance(bad.failure, AttributeError)
    assert emitted(good) == alone(compiled, prompt, SamplingOptions(), 9)
    assert batch.passes.memory_use == 0
    assert repr(bad)


class Raising:
    """A control that raises once it is asked."""

    def budget(self, *_given):
        raise ValueError("out of budget")


def test_a_control_that_raises_ends_its_text_alone(compiled):
    writer, prompt = generator(compiled, "prompt_lookup", nodes=3), np.arange(20)
    batch, run = writer.batch(), writer.begin(prompt, SamplingOptions(), max_new_tokens=9)
    run.control = Raising()
    bad, good = batch.join(run), batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=9))
    list(steps_of(batch))
    assert str(bad.failure) == "out of budget"
    assert emitted(good) == alone(compiled, prompt, SamplingOptions(), 9)


def test_texts_with_passes_of_their_own_learn_what_these_cost():
    writer = generator(target_of(ALONE), "auto")
    batch = writer.batch()
    for number in range(3):
        batch.join(writer.begin(np.arange(20) + number, SamplingOptions(), max_new_tokens=20))
    list(steps_of(batch))
    assert writer._costs.drafted > 0
    assert writer._costs.asking > 0


def test_an_interrupt_of_compiled_code_is_no_failed_text(compiled):
    writer = generator(compiled, "none")
    broken = generator(compiled, "none")

    def interrupted():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error

    broken.attach("bad", Bad(interrupted), 4)
    batch = writer.batch()
    run = batch.join(broken.begin(np.arange(20), SamplingOptions(), max_new_tokens=9))
    with pytest.raises(KeyboardInterrupt):
        list(steps_of(batch))
    assert run.failure is None
    batch = writer.batch()
    batch.join(writer.begin(np.arange(20), SamplingOptions(), max_new_tokens=9))
    batch.passes._pass = lambda _: interrupted()
    with pytest.raises(KeyboardInterrupt):
        batch.step()


def test_a_drafter_that_cannot_be_closed_does_not_take_the_text(compiled):
    writer, prompt = generator(compiled, "none"), np.arange(20)
    writer.attach("bad", Bad(lambda: EMPTY_DRAFT), 4)
    run = writer.begin(prompt, SamplingOptions(), max_new_tokens=9)
    with pytest.warns(ForedraftWarning, match="it stays open"):
        written = [token for record in steps(run) for token in record.emitted]
    assert written == alone(compiled, prompt, SamplingOptions(), 9)


def test_a_batch_takes_new_texts_of_its_own_model(compiled):
    writer, other = generator(compiled, "none"), generator(TorchTarget(compiled.model), "none")
    batch = writer.batch()
    with pytest.raises(UsageError, match="of another model"):
        batch.join(other.begin(np.arange(5), SamplingOptions(), max_new_tokens=3))
    run = batch.join(writer.begin(np.arange(5), SamplingOptions(), max_new_tokens=3))
    for _ in range(2):
        with pytest.raises(UsageError, match="begun already"):
            batch.join(run)
        list(steps_of(batch))


def test_a_text_of_no_tokens_ends_without_any(compiled):
    writer = generator(compiled, "none")
    batch = writer.batch()
    lanes = [batch.join(writer.begin(np.arange(1), SamplingOptions(), max_new_tokens=count)) for count in (0, 4)]
    finish(batch)
    assert [(lane.seq.finish, len(emitted(lane))) for lane in lanes] == [("length", 0), ("length", 4)]


def test_texts_that_leave_do_not_disturb_the_others(compiled):
    given, writer = texts(9, seed=7), generator(compiled, "prompt_lookup", nodes=3)
    batch = writer.batch()
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=40)) for prompt, how, _ in given]
    for number in range(6):
        batch.step()
        if number % 2:
            batch.leave(lanes[number])
    left = [lane for number, lane in enumerate(lanes) if number not in (1, 3, 5)]
    finish(batch)
    kept = [each for number, each in enumerate(given) if number not in (1, 3, 5)]
    assert [emitted(lane) for lane in left] == [alone(compiled, prompt, how, 40) for prompt, how, _ in kept]


def test_a_text_whose_drafter_fails_to_start_leaves_no_memory_in_use(compiled, monkeypatch):
    writer = generator(compiled, "prompt_lookup", nodes=3)
    batch, (prompt, sampling, _) = writer.batch(), texts(1, seed=5)[0]
    prepared = writer.begin(prompt, sampling, max_new_tokens=8)

    def fail(_self, _context):
        raise RuntimeError("no drafting today")

    with monkeypatch.context() as patched:
        patched.setattr(type(prepared.drafter), "open", fail)
        with pytest.raises(RuntimeError, match="no drafting today"):
            batch.join(prepared)
    assert len(batch) == 0
    assert batch.passes.memory_use == 0
    lane = batch.join(writer.begin(prompt, sampling, max_new_tokens=8))
    finish(batch)
    assert emitted(lane) == alone(compiled, prompt, sampling, 8)


def test_what_a_text_shares_with_an_earlier_one_is_not_computed_again(compiled):
    writer = generator(compiled, "none")
    prompt, sampling, _ = texts(1, seed=11)[0]
    prompt = np.tile(prompt, 8)[:150]
    batch = writer.batch()
    first = batch.join(writer.begin(prompt, sampling, max_new_tokens=20))
    finish(batch)
    longer = np.concatenate([prompt, emitted(first), [5, 6, 7]])
    second = batch.join(writer.begin(longer, sampling, max_new_tokens=20))
    other = batch.join(writer.begin(np.append(longer[:100], 3), sampling, max_new_tokens=20))
    assert second.seq.length - 1 - second.seq.cache.length <= 4
    assert other.seq.length - 1 - other.seq.cache.length == 0
    finish(batch)
    assert emitted(second) == alone(compiled, longer, sampling, 20)
    assert emitted(other) == alone(compiled, np.append(longer[:100], 3), sampling, 20)


def test_texts_wait_for_room_and_end_where_there_is_none(compiled):
    slots = 2 * 2 * 2 * 16 * compiled.dtype.itemsize
    writer = generator(compiled, "none")
    given = texts(6, seed=13)
    prepared = [writer.begin(prompt, how, max_new_tokens=count) for prompt, how, count in given]
    batch = writer.batch(2048 * slots)
    lanes = [batch.join(prepared[0]), batch.join(prepared[1])]
    with pytest.raises(OutOfMemoryError, match="2048 slots"):
        lanes.extend(batch.join(each) for each in prepared[2:])
    finish(batch)
    assert [emitted(lane) for lane in lanes] == [alone(compiled, *each) for each in given[: len(lanes)]]
    crowded = writer.batch(768 * slots)
    with pytest.raises(PromptTooLongError, match="1000 tokens"):
        crowded.join(writer.begin(np.zeros(1000, np.int64), SamplingOptions(), max_new_tokens=9))
    lane = crowded.join(writer.begin(given[0][0], SamplingOptions(), max_new_tokens=1500))
    with pytest.warns(ForedraftWarning, match="no room for .* The text ends here"):
        finish(crowded)
    assert lane.seq.finish == "memory"
    assert emitted(lane) == alone(compiled, given[0][0], SamplingOptions(), 1500)[: len(emitted(lane))]


def test_texts_that_grow_beyond_the_memory_go_on_when_others_have_ended(compiled):
    slots = 2 * 2 * 2 * 16 * compiled.dtype.itemsize
    writer = generator(compiled, "prompt_lookup", nodes=4)
    given = [(prompt, sampling, 900) for prompt, sampling, _ in texts(2, seed=19)]
    batch = writer.batch(1600 * slots)
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=count)) for prompt, how, count in given]
    refused = 0
    while len(batch):
        batch.step()
        if len(batch) == 2 and any(lane.seq.cache is None for lane in lanes):
            with pytest.raises(OutOfMemoryError, match="wait for room"):  # those that wait come first
                batch.join(writer.begin(np.arange(5), SamplingOptions(), max_new_tokens=2))
            refused += 1
    assert refused > 0, "there was room for both"
    assert [emitted(lane) for lane in lanes] == [alone(compiled, *each) for each in given]


def test_a_pass_takes_no_more_rows_than_it_can(compiled, monkeypatch):
    """Drafts of a fixed number of nodes, for more texts than fit; a later prompt is prefilled beside them."""
    writer = generator(compiled, "prompt_lookup", {"prompt_lookup_num_tokens": 64}, nodes=64)
    batch = writer.batch()
    rows = counted(batch, monkeypatch)
    given = [(np.tile(np.arange(7 + number), 20), SamplingOptions(), 700) for number in range(8)]
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=count)) for prompt, how, count in given[:7]]
    while not all(lane.records for lane in lanes):
        batch.step()
    assert len(batch) == 7, "the texts ended too soon"
    lanes.append(batch.join(writer.begin(given[7][0], SamplingOptions(), max_new_tokens=700)))
    for _ in range(8):
        batch.step()
    assert lanes[7].records, "its prompt is not prefilled while others draft"
    finish(batch)
    assert 150 < max(rows) <= 256
    assert [emitted(lane) for lane in lanes] == [alone(compiled, *each) for each in given]


def test_each_text_has_its_own_number_of_nodes(compiled):
    """In the batch of a generator that drafts nothing."""
    batch = generator(compiled, "none").batch()
    prompt = np.tile(np.arange(9), 12)
    writers = [generator(compiled, "prompt_lookup", nodes=nodes) for nodes in (3, 12)]
    for writer in writers:
        writer.use("prompt_lookup", nodes=writer.amount.most_nodes, control="measured")
    lanes = [batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=60)) for writer in writers]
    finish(batch)
    few, many = (max(record.drafted for record in lane.records) for lane in lanes)
    assert 0 < few <= 3
    assert 0 < many <= 12
    assert emitted(lanes[0]) == emitted(lanes[1]) == alone(compiled, prompt, SamplingOptions(), 60)


def test_an_error_of_one_text_ends_that_text_alone(compiled):
    def broken(input_ids, scores):
        if input_ids.shape[1] > 30:
            raise ValueError("no more than 30 tokens")
        return scores

    writer = generator(compiled, "prompt_lookup", nodes=3)
    batch, prompt = writer.batch(), np.tile(np.arange(5), 4)
    failing = batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=40, processors=(broken,)))
    lane = batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=40))
    finish(batch)
    assert str(failing.failure) == "no more than 30 tokens"
    assert emitted(lane) == alone(compiled, prompt, SamplingOptions(), 40)


def test_texts_of_one_prompt_compute_it_once(compiled, monkeypatch):
    writer, prompt = generator(compiled, "none"), np.arange(400) % 89
    batch = writer.batch()
    rows = counted(batch, monkeypatch)
    ways = [SamplingOptions(True, temperature=0.7, seed=seed) for seed in range(4)]
    lanes = [batch.join(writer.begin(prompt, how, max_new_tokens=10)) for how in ways]
    finish(batch)
    assert sum(rows) < 2 * len(prompt)
    assert [lane.cached_tokens for lane in lanes] == [0, 399, 399, 399]
    assert [emitted(lane) for lane in lanes] == [alone(compiled, prompt, how, 10) for how in ways]


def test_texts_that_wait_for_a_prefix_may_be_too_long_or_leave(compiled):
    """A text that waits for a prefix, and one whose leader leaves; the others go on."""
    slots, writer = 2 * 2 * 2 * 16 * compiled.dtype.itemsize, generator(compiled, "none")
    prompt = np.arange(1000) % 89
    batch = writer.batch(1200 * slots)
    leader = batch.join(writer.begin(prompt[:600], SamplingOptions(), max_new_tokens=5))
    too_long = batch.join(writer.begin(np.tile(prompt, 2)[:1300], SamplingOptions(), max_new_tokens=5))
    follower = batch.join(writer.begin(prompt[:400], SamplingOptions(), max_new_tokens=5))
    gone = batch.join(writer.begin(prompt[:500], SamplingOptions(), max_new_tokens=5))
    assert [lane.seq.cache is None for lane in (leader, too_long, follower, gone)] == [False, True, True, True]
    batch.leave(gone)
    batch.leave(leader)
    finish(batch)
    assert isinstance(too_long.failure, PromptTooLongError)
    assert emitted(follower) == alone(compiled, prompt[:400], SamplingOptions(), 5)


def test_texts_that_come_and_go_in_little_memory_are_the_same(compiled):
    """Prompts that share beginnings, of two owners, at random steps; some leave, and there is seldom room for all."""
    size = compiled.dtype.itemsize
    slots, rng = 2 * 2 * 2 * 16 * size, np.random.default_rng([0, size])
    writers = [generator(compiled, "prompt_lookup", nodes=nodes) for nodes in (0, 3, 12)] + [
        generator(compiled, "auto")
    ]
    batch, stem = writers[0].batch(1800 * slots), rng.integers(0, VOCABULARY, 500)
    waiting, running, ended, leaving = [], {}, [], 4
    for number in range(16):
        prompt = np.append(stem[: rng.integers(1, 500)], rng.integers(0, VOCABULARY, rng.integers(1, 40)))
        sampling = SamplingOptions() if number % 2 else SamplingOptions(True, temperature=0.4, seed=number)
        waiting.append((prompt, sampling, int(rng.integers(1, 1000))))
    steps = suspended = 0
    while waiting or len(batch):
        steps += 1
        suspended += any(run.seq.cache is None for run in running)
        assert steps < 20_000, "no text goes on"
        if waiting and (rng.random() < 0.5 or not len(batch)):
            run = writers[rng.integers(4)].begin(waiting[0][0], waiting[0][1], max_new_tokens=waiting[0][2])
            run.owner = f"owner {rng.integers(2)}"
            try:
                batch.join(run)
                running[run] = waiting.pop(0)
            except OutOfMemoryError:
                assert len(batch), "there is room for one"
        if running and leaving and rng.random() < 0.02:
            gone, leaving = list(running)[rng.integers(len(running))], leaving - 1
            batch.leave(gone)
            del running[gone]
        ended += [(run, running.pop(run)) for run in batch.step() if run.ended]
    assert not running
    assert len(ended) == 12
    assert suspended > 0
    for run, (prompt, sampling, count) in ended:
        assert (run.failure, run.seq.finish) == (None, "length")
        assert emitted(run) == alone(compiled, prompt, sampling, count)


def test_owners_share_no_prefix(compiled):
    writer, prompt = generator(compiled, "none"), np.arange(300) % 89
    batch = writer.batch()
    for owner, cached in (("one", 0), ("one", 299), ("other", 0)):
        run = writer.begin(prompt, SamplingOptions(), max_new_tokens=5)
        run.owner = owner
        batch.join(run)
        finish(batch)
        assert run.cached_tokens == cached


def test_many_prompts_are_written_as_each_alone(compiled):
    writer = generator(compiled, "prompt_lookup")
    writer.tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), eos_token_id=None)
    prompts = [prompt.tolist() for prompt, _, _ in texts(20, seed=17)]
    options = {"max_new_tokens": 12, "temperature": 0.5, "eos_token_id": []}
    together = writer.generate_all(prompts, count=2, seed=40, **options)
    for number, written in enumerate(together):
        expected = writer.generate(prompts[number // 2], seed=40 + number % 2, **options)
        assert (written.token_ids, written.seed) == (expected.token_ids, expected.seed)
        assert written.finish_reason == "length"


def test_prompts_beyond_a_batchs_usual_memory_are_written_as_each_alone(compiled, monkeypatch):
    """A GiB holds 8,000 tokens of a model of 8 billion parameters."""
    monkeypatch.setattr(Generator.batch, "__defaults__", (256 * 2 * 2 * 2 * 16 * compiled.dtype.itemsize, None))
    writer = generator(compiled, "none")
    assert writer.batch().passes._arena.most_slots == 256
    runs = [writer.begin(np.arange(length) % VOCABULARY, SamplingOptions(), max_new_tokens=90) for length in (300, 20)]
    for run in writer.write(runs):
        prompt = run.seq.view().ids[: run.seq.prompt_length]
        assert emitted(run) == alone(compiled, prompt, SamplingOptions(), 90)


def test_an_arena_keeps_what_it_leases_apart():
    """Random leases compared with copies: written, partly committed, moved, closed and reused."""
    rng = np.random.default_rng(2)
    arena = Arena([(3, 4), (2, 8)] * 2, torch.float32, 8192)
    kept = {}
    for _ in range(400):
        if kept and rng.random() < 0.2:
            lease = list(kept)[rng.integers(len(kept))]
            arena.close(lease)
            del kept[lease]
        if len(kept) < 6 and rng.random() < 0.3:
            tokens = np.arange(rng.integers(1, 300)) % 50
            lease = arena.open(tokens, len(tokens))
            kept[lease] = [*tokens[: lease.length]]
            assert lease.length < len(tokens)
        for lease, tokens in kept.items():
            rows = rng.integers(0, 50, rng.integers(1, 20))
            lease.reserve(rows)
            for plane, buffer in enumerate(arena.buffers):
                at = lease.start + lease.length
                with torch.inference_mode():
                    buffer[0, :, at : at + len(rows)] = torch.from_numpy(rows + 100 * plane)[None, :, None].float()
            taken = np.flatnonzero(rng.random(len(rows)) < 0.6)
            lease.commit(taken.tolist())
            tokens.extend(rows[taken].tolist())
        for lease, tokens in kept.items():
            assert lease.tokens.tolist() == tokens
            for plane, buffer in enumerate(arena.buffers):
                held = buffer[0, :, lease.start : lease.start + lease.length] - 100 * plane
                assert (held == torch.tensor(tokens)[None, :, None]).all()


def test_slots_are_shared_only_where_they_were_copied(monkeypatch):
    """An interrupt while a prefix is copied leaves no lease with slots that were not written."""
    arena, tokens = Arena([(3, 4)] * 2, torch.float32, 2048), np.arange(300) % 50
    source = arena.open(tokens, len(tokens))
    source.reserve(tokens[:-1])
    source.commit(range(len(tokens) - 1))

    def interrupted(*_slots):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arena.open(tokens, len(tokens))
    assert arena.used == source.capacity
    arena.close(source)
    assert arena.open(tokens, len(tokens)) is source


def test_a_finished_sequence_gives_its_slots_where_there_is_no_room_for_a_copy():
    arena, tokens = Arena([(3, 4)] * 2, torch.float32, 1024), np.arange(400) % 50
    first = arena.open(tokens, 800)
    first.reserve(tokens[:-1])
    first.commit(range(len(tokens) - 1))
    arena.close(first)
    changed = np.append(tokens[:300], [7, 8])
    again = arena.open(changed, 800)
    assert (again.start, again.tokens.tolist()) == (first.start, tokens[:300].tolist())
    with pytest.raises(OutOfMemoryError):  # there is none beside a text that is being written
        arena.open(changed, 800)


def test_the_memory_of_a_batch_is_free_as_soon_as_the_batch_is_gone(compiled):
    writer = generator(compiled, "none")
    batch = writer.batch()
    run = batch.join(writer.begin(np.arange(40), SamplingOptions(), max_new_tokens=3))
    finish(batch)
    arena = weakref.ref(batch.passes._arena)
    del batch
    assert arena() is None, "without a search for garbage"
    assert len(emitted(run)) == 3


def test_finished_sequences_take_no_more_than_they_may_though_there_is_room():
    """Of an arena that is made for one long text, in which many short ones end."""
    arena, ends = Arena([(3, 4)] * 2, torch.float32, 65536, most_kept=2048), []
    for number in range(30):
        tokens = np.arange(300) + 1000 * number
        lease = arena.open(tokens, len(tokens))
        lease.reserve(tokens[:-1])
        lease.commit(range(len(tokens) - 1))
        lease.reserve(np.arange(200 * (number % 3)))
        ends.append(lease.start + lease.capacity)
        arena.close(lease)
    assert max(ends) <= 2 * 2048
    assert arena.open(tokens, len(tokens)) is lease


def test_slots_that_were_half_moved_are_not_reused(monkeypatch):
    """Where a lease is moved to slots that overlap its own, an interrupt leaves some layers overwritten."""
    arena, tokens = Arena([(3, 4)] * 2, torch.float32, 1024), np.arange(300) % 50
    other, lease = arena.open(tokens[:40] + 50, 40), arena.open(tokens, len(tokens))
    lease.reserve(tokens[:-1])
    lease.commit(range(len(tokens) - 1))
    arena.close(other)
    copy, start = arena._copy, lease.start

    def interrupted(*slots):
        arena.buffers = arena.buffers[:1]
        copy(*slots)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.reserve(np.arange(650))
    arena.close(lease)
    assert start
    assert arena.open(tokens, len(tokens)).length == 0


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_leaves_a_model_its_own_attention(number, done):
    """Of the two changes of its configuration, either may be interrupted, before it is done or afterwards."""

    class Configuration:
        changes, kernel = 0, "sdpa"

        @property
        def _attn_implementation(self):
            return self.kernel

        @_attn_implementation.setter
        def _attn_implementation(self, name):
            self.changes += 1
            self.kernel = name if done or self.changes != number else self.kernel
            if self.changes == number:
                raise KeyboardInterrupt

    model = SimpleNamespace(config=Configuration())
    with pytest.raises(KeyboardInterrupt), replaced_attention(model, lambda *_: None):
        pass
    assert model.config.kernel == "sdpa"
    assert f"foredraft_{id(model)}" not in ALL_ATTENTION_FUNCTIONS


def test_a_conversation_in_one_batch_computes_each_turn_once(compiled, monkeypatch):
    writer = generator(compiled, nodes=5)
    batch = writer.conversation()
    rows = counted(batch, monkeypatch)
    prompt = np.tile(np.arange(40), 4).astype(np.int64)
    for turn in range(3):
        run, rows[:] = writer.begin(prompt, SamplingOptions(), max_new_tokens=30), []
        written = [token for record in steps(run, batch) for token in record.emitted]
        assert written == alone(compiled, prompt, SamplingOptions(), 30)
        assert turn == 0 or sum(rows) < len(prompt), "the turns before were computed again"
        prompt = np.concatenate([prompt, written, np.full(7, turn)]).astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0, 5], ids=["continued", "changed"])
def test_a_conversation_fills_the_models_window(compiled, changed):
    """Also where the last tokens of each turn are others in the next one, so that its slots are not taken over."""
    writer = generator(compiled, nodes=5)
    batch, prompt = writer.conversation(), np.arange(60) % VOCABULARY
    while len(prompt) < compiled.window - 400:
        run = writer.begin(prompt, SamplingOptions(), max_new_tokens=200)
        written = [token for record in steps(run, batch) for token in record.emitted]
        assert run.seq.finish == "length"
        prompt = np.concatenate([prompt, written[: len(written) - changed], np.arange(30)]).astype(np.int64)
    run = writer.begin(prompt, SamplingOptions(), max_new_tokens=1000)
    for _ in steps(run, batch):
        pass
    assert run.seq.finish == "window"


def test_a_stream_needs_an_empty_batch_and_leaves_it_when_it_is_not_read_to_its_end(compiled):
    writer = generator(compiled, "none")
    batch = writer.batch()
    records = steps(writer.begin(np.arange(20), SamplingOptions(), max_new_tokens=30), batch)
    next(records)
    assert len(batch) == 1
    with pytest.raises(UsageError, match="has 1 unfinished texts"):
        next(steps(writer.begin(np.arange(20), SamplingOptions(), max_new_tokens=30), batch))
    records.close()
    assert len(batch) == 0


def test_a_conversation_goes_on_after_a_stream_that_was_closed_or_dropped(compiled):
    writer = Generator(compiled, pretrained_words(), method="prompt_lookup", nodes=5)
    batch, prompt = writer.conversation(), np.arange(30) % VOCABULARY
    stream = writer.stream(prompt.tolist(), max_new_tokens=20, batch=batch)
    next(stream)
    stream.close()
    assert not len(batch)
    next(writer.stream(prompt.tolist(), max_new_tokens=20, batch=batch))
    assert not len(batch)
    text = writer.stream(prompt.tolist(), max_new_tokens=5, batch=batch)
    assert len(list(text)) >= 5
