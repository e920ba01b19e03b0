"""Passes of fixed shapes at fixed addresses: scores and texts equal the unrecorded model's; and recorded on a GPU."""

import contextlib
import gc
import warnings

import numpy as np
import pytest
import torch

from foredraft.api import Generator, load
from foredraft.cli.job import load_plain
from foredraft.contracts import Scores, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.engine.batch import steps
from foredraft.errors import ForedraftWarning, NumericsError, UsageError
from foredraft.graph.layout import lay_out, lay_out_text
from foredraft.model import kv_cache, named_target, recordings
from foredraft.model.fused import COLUMNS, ScoredPass, compiled_pass
from foredraft.model.growth import Rollout
from foredraft.model.layers import LAST
from foredraft.model.loading import load_model
from foredraft.model.mask import slot_mask
from foredraft.model.recordings import ROW_COUNTS, RecordedForward, Rows, recorded_forward, slots_for
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from foredraft.sampling.chooser import Sampler
from foredraft.sampling.logits import top_probabilities
from support.compilation import METHODS, SAMPLINGS, written
from support.families import FAMILIES, VOCABULARY, configuration, each_of, prompt_of, random_tree, tiny_model
from support.llamas import llama, small_model
from support.recorded import Watch, begun, caches_of, exact_products, finished, finished_in_store, recorded_target
from support.tokenizers import pretrained_words
from support.toys import TOY, TOY_DRAFT

# torch's products of several experts cannot be run on the meta device in float32
SINGLE = [family for family in FAMILIES if family not in ("mixtral", "gpt_oss")]
UNCOMPILED = "gemma2"  # on a GPU with torch 2.11, whose exporter refuses it
CHAIN = np.arange(5, dtype=np.int32), np.arange(-1, 4, dtype=np.int32)


def prefilled(target, ids):
    cache = target.new_cache()
    target.prefill(ids, cache)
    return cache


def assert_same_passes(model, sizes=(0, 1, 2, 9, 40)):
    """Compare trees and a chain, each after the root and the first node of the one before, which were kept."""
    rng, ids = np.random.default_rng(4), prompt_of(12)
    plain, target = TorchTarget(model), recorded_target(model)
    expected, given = (prefilled(each, ids[:-1]) for each in (plain, target))
    for tokens, parents in [*(random_tree(rng, nodes) for nodes in sizes), CHAIN]:
        layout = lay_out(int(ids[-1]), tokens, parents, expected.length)
        scores, own = target.forward(layout, given, hidden=(LAST,)), plain.forward(layout, expected, hidden=(LAST,))
        assert given.store is not None
        torch.testing.assert_close(scores.logits, own.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(scores.hidden, own.hidden, atol=1e-4, rtol=1e-4)
        assert scores.best.tolist() == own.logits.argmax(dim=-1).tolist()
        top, probabilities = top_probabilities(own.logits, 8)
        if own.logits.is_cuda:  # near ties may come in another order
            found = (own.logits.cpu().gather(1, torch.from_numpy(each).long()) for each in (scores.top[0], top))
            torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
            assert all(len(set(row)) == len(row) for row in scores.top[0].tolist())
        else:
            assert scores.top[0].tolist() == top.tolist()
        np.testing.assert_allclose(scores.top[1], probabilities, rtol=0.031)
        for cache in (given, expected):
            cache.commit([0, len(tokens)] if len(tokens) and parents[-1] < 0 else [0])
    ours, theirs = (cache.reserved_buffers(0) for cache in (given, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(*(each[:, :, : given.length] for each in (one, other)), atol=1e-4, rtol=1e-4)


@each_of(FAMILIES)
def test_rows_score_as_the_model_does(family):
    assert_same_passes(tiny_model(configuration(family)))


@pytest.fixture
def traced(monkeypatch):
    """Have recorded passes go through the exporter and torch's compiler, up to the code that it writes for a device."""
    monkeypatch.setattr(recordings, "scored_pass", lambda *given: compiled_pass(*given, backend="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gemma3_text", "falcon"])
def test_rows_of_a_compiled_pass_score_as_the_model_does(family, traced):
    sizes = (1, 9) if family == "gpt2" else (9,)  # each number of rows is exported by itself
    assert_same_passes(tiny_model(configuration(family)), sizes=sizes)


@pytest.mark.slow
def test_a_compiled_pass_writes_the_same_text_and_shares_the_models_weights(traced):
    model = llama()
    expected = written(TorchTarget(model), *METHODS[-1], {})
    pointers = {each.untyped_storage().data_ptr() for each in model.parameters()}
    assert written(recorded_target(model), *METHODS[-1], {}) == expected
    assert len({each.untyped_storage().data_ptr() for each in model.parameters()}) < len(pointers)
    assert not any(each.is_inference() for each in model.parameters())
    assert written(TorchTarget(model), "none", {}, 0, {}) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "options", "nodes"), METHODS, ids=[each[0] for each in METHODS])
def test_texts_equal_plain_texts(method, options, nodes, sampling):
    expected = written(TorchTarget(small_model()), "none", {}, 0, sampling)
    assert written(recorded_target(small_model()), method, options, nodes, sampling) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_draft_model_may_have_fixed_shapes_too(sampling):
    target = recorded_target(small_model())
    resources = Resources(VOCABULARY, draft_model=lambda _: target)
    generator = Generator(TorchTarget(small_model()), None, method="none", options={}, nodes=8)
    generator.attach(
        "draft_graph", make_drafter("draft_graph", {"model": "itself", "least_probability": 0.0}, resources), nodes=8
    )
    run = generator.begin(prompt_of(20), SamplingOptions(**sampling), max_new_tokens=48)
    assert list(finished(run)) == written(TorchTarget(small_model()), "none", {}, 0, sampling)
    assert run.statistics.tokens_per_target_step > 1.3  # it is its own draft model


def grown(target, ids):
    """Return the scores of a tree of more than COLUMNS rows, ten a level, and of the next tree's root and first row."""
    rollout, scores = Rollout(target, COLUMNS + 20), []
    scores.append(rollout.start(SequenceView(ids, len(ids))))
    for level in range(COLUMNS // 10 + 2):
        rows = np.arange(10, dtype=np.int32)
        scores.append(rollout.expand(rows + 3, rows + 10 * (level - 1) if level else np.full(10, -1, np.int32)))
    rollout.keep([0, 10])
    ids = np.concatenate([ids, [3, 3, 7]])
    return [
        *scores,
        rollout.start(SequenceView(ids, len(ids))),
        rollout.expand(np.array([5], np.int32), np.array([-1], np.int32)),
    ]


def test_rows_that_are_held_are_seen_and_beyond_the_columns_the_model_runs_as_it_is():
    ours, theirs = (grown(each, prompt_of(20)) for each in (recorded_target(small_model()), TorchTarget(small_model())))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_more_rows_than_the_largest_count_run_as_they_are_and_may_grow_out_of_the_store(monkeypatch):
    monkeypatch.setattr(recordings, "_LEAST_SLOTS", 32)
    ids, target, plain = prompt_of(12), recorded_target(llama()), TorchTarget(llama())
    given, expected = (prefilled(each, ids) for each in (target, plain))
    for nodes, kept in ((ROW_COUNTS[-1] - 1, range(120)), (ROW_COUNTS[-1], [0, 2, 5]), (3, [0])):
        layout = lay_out_text(np.arange(nodes + 1) % VOCABULARY, given.length)
        scores = target.forward(layout, given)
        assert (scores.best is None) == (nodes == ROW_COUNTS[-1])
        torch.testing.assert_close(scores.logits, plain.forward(layout, expected).logits, atol=1e-4, rtol=1e-4)
        for cache in (given, expected):
            cache.commit(kept)


def test_what_lies_in_slots_that_are_not_committed_changes_nothing():
    ids, target, plain = prompt_of(40), recorded_target(small_model()), TorchTarget(small_model())
    given, expected = (prefilled(each, ids[:-1]) for each in (target, plain))
    layout = lay_out(int(ids[-1]), *random_tree(np.random.default_rng(1), 20), len(ids) - 1)
    target.forward(layout, given)
    given.commit([])
    with torch.inference_mode():
        given.store[:, :, given.length :] = 1e4
    torch.testing.assert_close(
        target.forward(layout, given).logits, plain.forward(layout, expected).logits, atol=1e-4, rtol=1e-4
    )


def test_the_store_grows_with_a_sequence_and_is_kept_for_the_next(monkeypatch):
    monkeypatch.setattr(recordings, "_LEAST_SLOTS", 32)
    target, capacities = recorded_target(small_model()), []
    caches = caches_of(target)
    for length in (20, 230, 20):
        text, store = finished_in_store(begun(target, length), caches)
        assert text == finished(begun(TorchTarget(small_model()), length))
        capacities.append(store.shape[2])
    assert capacities == [256, 384, 384]


def test_two_sequences_at_once_are_each_their_own_text():
    target, plain = recorded_target(small_model()), TorchTarget(small_model())
    lengths = (20, 33)
    runs = [begun(target, length, do_sample=True, seed=5) for length in lengths]
    writing = [steps(run) for run in runs]
    while any([next(each, None) is not None for each in writing]):  # noqa: C419  # each takes its step
        pass
    for run, length in zip(runs, lengths, strict=True):
        assert tuple(run.seq.emitted.tolist()) == finished(begun(plain, length, do_sample=True, seed=5))


def test_a_sequence_that_made_room_keeps_the_rows_of_its_last_pass():
    ids, target, plain = prompt_of(20), recorded_target(small_model()), TorchTarget(small_model())
    given, expected = (prefilled(each, ids) for each in (target, plain))
    layout = lay_out(7, *random_tree(np.random.default_rng(1), 9), len(ids))
    for each, cache in ((target, given), (plain, expected)):
        each.forward(layout, cache)
    newer = prefilled(target, prompt_of(31)[:20])
    target.forward(layout, newer)
    assert given.store is None
    for cache in (given, expected):
        cache.commit([0, 2])
    after = lay_out_text(np.array([4]), given.length)
    wanted = plain.forward(after, expected).logits
    for is_recorded in (False, True):  # it does not take the store back before the newer sequence has ended
        scores = target.forward(after, given)
        assert (scores.best is not None, given.store is not None) == (is_recorded, is_recorded)
        torch.testing.assert_close(scores.logits, wanted, atol=1e-4, rtol=1e-4)
        newer = None


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_sequence_that_finds_no_memory_outside_of_the_store_stays_whole(fails_at, monkeypatch):
    target, calls = recorded_target(small_model()), []
    older = begun(target, 20)
    records = steps(older)
    for _ in range(3):
        next(records)
    allocated = kv_cache.allocated

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("out of memory")
        return allocated(*arguments)

    ids = prompt_of(25)
    newer = prefilled(target, ids[:-1])
    monkeypatch.setattr(kv_cache, "allocated", full)
    with pytest.warns(ForedraftWarning, match="find no memory to be recorded"):
        target.forward(lay_out_text(ids[-1:], 24), newer)
    monkeypatch.undo()
    newer.commit([])
    del newer
    for _ in records:
        pass
    assert len(calls) >= fails_at
    assert tuple(older.seq.emitted.tolist()) == finished(begun(TorchTarget(small_model()), 20))


def test_a_text_without_memory_for_a_larger_store_goes_on_and_the_next_is_recorded(monkeypatch):
    monkeypatch.setattr(recordings, "_LEAST_SLOTS", 32)
    target, slots = recorded_target(small_model()), recordings.slots_for
    caches = caches_of(target)

    def full(needed):
        if needed > 300:
            raise torch.OutOfMemoryError("out of memory")
        return slots(needed)

    monkeypatch.setattr(recordings, "slots_for", full)
    for length in (20, 330, 20):
        context = pytest.warns(ForedraftWarning, match="no memory") if length == 330 else contextlib.nullcontext()
        with context:
            text, store = finished_in_store(begun(target, length), caches)
        assert text == finished(begun(TorchTarget(small_model()), length))
        assert (store is None) == (length == 330)


def test_many_prompts_are_written_one_after_the_other_all_recorded():
    target, used = recorded_target(small_model()), []
    forward = target.recordings.forward

    def counted(*arguments, **options):
        used.append(forward(*arguments, **options))
        return used[-1]

    target.recordings.forward = counted
    prompts, tokenizer = [prompt_of(length).tolist() for length in (12, 20, 31)], pretrained_words()
    alone, ours = (Generator(each, tokenizer, method="none") for each in (TorchTarget(small_model()), target))
    texts = ours.generate_all(prompts, max_new_tokens=12)
    assert [text.token_ids for text in texts] == [alone.generate(each, max_new_tokens=12).token_ids for each in prompts]
    assert used
    assert all(scores is not None for scores in used)


def test_models_that_draft_for_a_recorded_target_are_recorded_too():
    generator = load(TOY, method="none", dtype="float32", device="cpu", compile=False)
    generator.target.recordings = RecordedForward(generator.target.model)
    generator.use("draft_model", {"model": TOY_DRAFT}, nodes=4)
    (draft,) = generator.drafter.needs.models
    assert draft.recordings is not None
    assert generator.generate("Once upon a time", max_new_tokens=8).statistics.drafted > 0
    assert not draft.recordings.failed


def test_a_finished_sequence_is_gone_without_a_search_for_cycles_and_leaves_nothing_behind():
    target = recorded_target(small_model())
    caches = caches_of(target)
    gc.disable()
    try:
        run = begun(target, 20)
        _, store = finished_in_store(run, caches)
        assert [cache() for cache in caches] == [None]
    finally:
        gc.enable()
    with torch.inference_mode():
        store.fill_(float("nan"))
    assert finished(begun(target, 25)) == finished(begun(TorchTarget(small_model()), 25))


def warned_once(target):
    with pytest.warns(ForedraftWarning, match="cannot be recorded on its device") as told:
        texts = [finished(begun(target, length)) for length in (20, 25)]
    assert len(told) == 1
    assert texts == [finished(begun(TorchTarget(small_model()), length)) for length in (20, 25)]
    return str(told[0].message)


def test_a_failure_to_record_is_told_once_and_the_text_goes_on(monkeypatch):
    calls = []

    def fails_later(compute, **_):
        calls.append(compute)
        if len(calls) > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return compute

    monkeypatch.setattr(recordings, "recorded", fails_later)
    assert "(RuntimeError: operation not permitted when stream is capturing); it runs" in warned_once(
        recorded_target(small_model())
    )
    assert len(calls) == 2


def test_scores_that_are_not_the_models_own_are_told_and_not_used(monkeypatch):
    def wrong(*arguments):
        logits, *others = scored(*arguments)
        return (-logits, *others)

    scored = ScoredPass.forward
    monkeypatch.setattr(ScoredPass, "forward", wrong)
    assert "not the model's own, relative error 2.0e+00" in warned_once(recorded_target(small_model()))


@pytest.mark.parametrize("same_bits", [True, False])
def test_passes_whose_rows_round_in_another_way_are_padded_unless_that_is_allowed(same_bits, monkeypatch):
    sizes = []

    def of_few_rows_rounds_otherwise(own, bounds, token_ids, *others):
        sizes.append(len(token_ids))
        logits, *outputs = scored(own, bounds, token_ids, *others)
        return ((logits * 64).round() / 64 + (len(token_ids) < 16) / 64, *outputs)

    scored = ScoredPass.forward
    monkeypatch.setattr(ScoredPass, "forward", of_few_rows_rounds_otherwise)
    monkeypatch.setattr(recordings, "error_beyond_rounding", lambda *_: 0.0)
    model, ids = small_model(), prompt_of(12)
    target = TorchTarget(model, recordings=RecordedForward(model, same_bits=same_bits))
    cache, used = prefilled(target, ids[:-1]), []
    for nodes in (12, 4, 0, 12, 20):
        rows = random_tree(np.random.default_rng(nodes), nodes)
        target.forward(lay_out(int(ids[-1]), *rows, cache.length), cache)
        used.append(sizes[-1])
    assert used == ([16, 64, 16, 16, 64] if same_bits else [16, 8, 2, 16, 24])


def test_keys_and_values_are_those_of_the_recorded_pass_also_at_its_first_use(monkeypatch):
    def writes_its_own(own, bounds, token_ids, positions, sees, keys, values):
        outputs = scored(own, bounds, token_ids, positions, sees, keys, values)
        keys[0][:, :, int(bounds[1])] = 7.0
        return outputs

    scored = ScoredPass.forward
    monkeypatch.setattr(ScoredPass, "forward", writes_its_own)
    ids, target = prompt_of(12), recorded_target(small_model())
    cache = prefilled(target, ids[:-1])
    target.forward(lay_out_text(ids[-1:], 11), cache)
    assert (cache.store[0, :, 11] == 7).all()


@each_of(SINGLE)
def test_what_is_recorded_neither_waits_for_values_nor_copies_from_the_host(family):
    """Run on torch's meta device, which fails wherever a value is needed."""
    target = recorded_target(tiny_model(configuration(family)))
    kinds = tuple(dict.fromkeys(target.support.windows))
    buffers = prefilled(target, prompt_of(4)).reserved_buffers(0)
    target.model.to("meta")
    rows, buffers = Rows(8, len(kinds), device="meta"), [each.to("meta") for each in buffers]
    keys, values = buffers[: len(buffers) // 2], buffers[len(buffers) // 2 :]
    with torch.inference_mode(), Watch() as watch:
        logits, hidden, found = ScoredPass(target.model, kinds, by_position=False)(
            rows.bounds, rows.token_ids, rows.positions, rows.sees, keys, values
        )
    assert (logits.shape, hidden.shape, found.shape) == ((8, VOCABULARY), (8, 32), (8, 1 + 2 * 8))
    assert not watch.seen


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("committed", "width"), [(0, 7), (30, 20), (3, COLUMNS), (500, 12)])
def test_a_row_sees_what_is_committed_within_its_window_and_what_it_is_told_to(committed, width, window):
    sees = torch.zeros(5, COLUMNS, dtype=torch.bool)
    sees[:, :width] = torch.rand(5, width, generator=torch.Generator().manual_seed(1)) < 0.5
    sees[0, width - 1] = True
    positions = committed + torch.tensor([0, 1, 1, 2, 6])
    mask = slot_mask(torch.tensor(committed), positions, sees, window, 512, torch.float16)
    expected = torch.zeros(5, 512, dtype=torch.bool)
    for row, at in enumerate(positions.tolist()):
        expected[row, max(0, at - (window or 512) + 1) : committed] = True
        told = sees[row, : 512 - committed]
        expected[row, committed : committed + len(told)] = told
    assert mask.shape == (1, 1, 5, 512)
    assert mask.unique().tolist() == [torch.finfo(torch.float16).min, 0]
    assert (mask[0, 0] == 0).equal(expected)


def test_missing_rows_repeat_the_first():
    layout = lay_out(7, np.array([8, 9], np.int32), np.array([-1, 0], np.int32), at=20)
    rows = Rows(4, 2)
    rows.memory.fill_(1)
    rows.write(layout, 20, (None, 2))
    assert rows.bounds.tolist() == [20, 20]
    assert rows.token_ids.tolist() == [7, 8, 9, 7]
    assert rows.positions.tolist() == [20, 21, 22, 20]
    assert [[np.flatnonzero(row).tolist() for row in each] for each in rows.sees.numpy()] == [
        [[0], [0, 1], [0, 1, 2], [0]],
        [[0], [0, 1], [1, 2], [0]],  # a window of two tokens
    ]


def test_numbers_of_slots_are_few_and_never_too_few():
    assert [slots_for(needed) for needed in (1, 512, 513, 768, 769, 1024, 1025, 1537)] == [
        512, 512, 768, 768, 1024, 1024, 1536, 2048,
    ]  # fmt: skip
    assert all(needed <= slots_for(needed) <= max(512, needed * 1.5) for needed in range(1, 5000))


def test_greedy_decoding_reads_the_tokens_that_the_forward_found():
    scores = Scores(torch.zeros(2, 5), best=np.array([3, -1]))
    choose = Sampler(SamplingOptions()).chooser(scores, at=0)
    assert choose(0, []) == 3
    with pytest.raises(NumericsError, match="position 2"):
        choose(1, [3])


def test_what_is_not_recorded_is_told_and_runs_as_it_is():
    model, sentence = llama(), "spread over cpu, meta.*one device"
    model.lm_head.to("meta")
    with pytest.raises(UsageError, match=sentence):
        RecordedForward(model)
    with pytest.warns(ForedraftWarning, match=sentence):
        assert recorded_forward(model) is None


def test_states_of_several_shapes_are_told_and_run_as_they_are(monkeypatch):
    target = recorded_target(small_model())
    ids = prompt_of(12)
    cache = prefilled(target, ids[:-1])
    cache.layers[0].values = cache.layers[0].values[..., :4]
    with pytest.warns(ForedraftWarning, match="values of several shapes"):
        assert target.recordings.forward(lay_out_text(ids[-1:], 11), cache, lambda: None) is None


def on_gpu(name, *_):
    """Return the embedded model, with a device that claims to be a GPU."""
    model = load_model(name, "float32", "cpu")
    model.__class__ = type("OnGpu", (type(model),), {"device": property(lambda _: torch.device("cuda"))})
    return model


@pytest.mark.parametrize("asked", [True, "auto"])
def test_graphs_are_used_on_a_gpu_where_they_are_asked_for(asked, monkeypatch):
    monkeypatch.setattr(named_target, "load_model", on_gpu)
    generator = load(TOY_DRAFT, method="none", compile=asked)
    assert (generator.target.recordings is not None) == (asked is True)
    assert generator.target.compiled is None
    if asked == "auto":
        generator.compile()
    plain = load(TOY_DRAFT, method="none", dtype="float32", device="cpu", compile=False)
    assert generator.generate("def f(", max_new_tokens=12).text == plain.generate("def f(", max_new_tokens=12).text


@pytest.mark.parametrize("eager", [False, True])
def test_commands_that_compare_methods_record_passes_on_a_gpu(eager, monkeypatch):
    monkeypatch.setattr(named_target, "load_model", on_gpu)
    generator = load_plain(TOY_DRAFT, "float32", eager, lambda *_: None)
    assert (generator.target.recordings is None) == eager


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch sees 0 CUDA devices here; use one of them, or cpu"):
        load(TOY_DRAFT, device="cuda", compile=True)


@pytest.mark.gpu
@each_of(SINGLE)  # torch copies the experts' offsets from the host in float32, which cannot be recorded
def test_recorded_rows_score_as_the_model_does(family):
    with exact_products():
        if family == UNCOMPILED:
            warnings.filterwarnings("ignore", "This model's forward cannot be compiled", ForedraftWarning)
        assert_same_passes(tiny_model(configuration(family)).to("cuda"))


@pytest.mark.gpu
@each_of([family for family in FAMILIES if family not in SINGLE])
def test_experts_that_cannot_be_recorded_in_float32_are_told_and_the_text_goes_on(family):
    model = tiny_model(configuration(family)).to("cuda")
    target = recorded_target(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ForedraftWarning)
        ours = finished(begun(target, 20))
    assert any("cannot be recorded on its device" in str(each.message) for each in told)
    assert ours == finished(begun(TorchTarget(model), 20))


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "options", "nodes"), METHODS, ids=[each[0] for each in METHODS])
def test_recorded_texts_equal_plain_texts(method, options, nodes, sampling):
    model = llama().to("cuda")
    with exact_products():
        expected = written(TorchTarget(model), "none", {}, 0, sampling)
        assert written(recorded_target(model), method, options, nodes, sampling) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_drafts_do_not_change_a_recorded_text_in_reduced_precision(sampling):
    model = llama().to("cuda", torch.bfloat16)
    with exact_products():
        target = recorded_target(model)
        expected = written(target, "none", {}, 0, sampling)
        assert written(target, *METHODS[-1], sampling) == expected


@pytest.mark.gpu
def test_a_recorded_store_grows_and_is_handed_on():
    model = llama().to("cuda")
    target = recorded_target(model)
    with exact_products():
        for length in (20, 480, 20):
            runs = [begun(each, length, tokens=96) for each in (target, TorchTarget(model))]
            ours, theirs = (finished(run) for run in runs)
            assert ours == theirs


@pytest.mark.gpu
def test_what_cannot_be_recorded_on_a_gpu_is_told_and_the_text_goes_on(monkeypatch):
    model = llama().to("cuda")

    def waits(*arguments):
        logits, *others = scored(*arguments)
        return (logits + float(logits[0, 0]) * 0, *others)

    scored = ScoredPass.forward
    monkeypatch.setattr(ScoredPass, "forward", waits)
    monkeypatch.setattr(recordings, "scored_pass", lambda *given: ScoredPass(*given[:2], by_position=False))
    target = recorded_target(model)
    with pytest.warns(ForedraftWarning, match="cannot be recorded on its device"):
        ours = finished(begun(target, 20))
    assert ours == finished(begun(TorchTarget(model), 20))
