"""Training heads: traces, exact resumption, failed runs, and the command."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.cli import main
from foredraft.corpus.documents import ReadReport
from foredraft.errors import NumericsError, StoreError, UsageError
from foredraft.index.storage import write_lock
from foredraft.model.fingerprint import fingerprint
from foredraft.model.heads import exit_model, load_exit_head
from foredraft.model.target import TorchTarget
from foredraft.training import loop
from foredraft.training.loop import LoopOptions, train
from foredraft.training.sources import in_turns, read_sources
from foredraft.training.tasks import ExitTask, distribution_loss
from foredraft.training.traces import (
    MANIFEST,
    TraceOptions,
    label_texts,
    open_traces,
    spread,
    write_texts,
)
from support.causal_types import tiny_configuration
from support.families import VOCABULARY, configuration, tiny_model
from support.tokenizers import pretrained_words

OPTIONS = TraceOptions(written_tokens=600, open_tokens=600, answer_tokens=12, window=16, top_k=8, hold_out_one_in=3)
QUICK = LoopOptions(epochs=2, micro_batch=4, precision="float32")


def four_layers(family):
    config = configuration(family)
    config.num_hidden_layers = 4
    return tiny_model(config)


def silent(*_said):
    """Ignore progress."""


def data_file(tmp_path, texts=60):
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(2, VOCABULARY, 30)) for _ in range(texts)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


class Writer:
    """Write a model's greedy texts, whatever is asked, and record the requests."""

    def __init__(self, model):
        self.model, self.calls, self.asked = model, 0, []

    def __call__(self, texts, most):
        self.asked += texts
        return [self.behind(text.prompt, most) for text in texts]

    def behind(self, ids, most):
        self.calls += 1
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False, pad_token_id=0
            )
        return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def model():
    return four_layers("llama")


@pytest.fixture(scope="module")
def traces(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("traces")
    sources = read_sources(data_file(root), pretrained_words(), ReadReport())
    write_texts(root / "out", sources, Writer(model), OPTIONS, fingerprint(model), silent)
    return label_texts(root / "out", TorchTarget(model), OPTIONS, fingerprint(model), silent)


@pytest.mark.slow
def test_traces_hold_the_texts_and_what_the_target_says_of_them(traces, model):
    assert {0, 1, 2} == set(np.asarray(traces.kinds).tolist())
    assert 0 < traces.held.sum() < len(traces.held)
    number = int(np.flatnonzero(traces.kinds == 2)[0])
    ids = torch.from_numpy(np.asarray(traces.windows[number, :-1], np.int64))[None]
    with torch.inference_mode():
        expected = torch.softmax(model(ids).logits[0], -1).topk(8)
    assert np.array_equal(traces.top_ids[number], expected.indices.numpy())
    assert np.allclose(traces.top_probabilities[number], expected.values.numpy(), atol=1e-3)


def test_texts_are_what_the_model_writes_behind_a_prompt(model, tmp_path):
    out, sources = tmp_path / "out", read_sources(data_file(tmp_path), pretrained_words(), ReadReport())
    write_texts(out, sources, Writer(model), OPTIONS, "x", silent)
    texts = [json.loads(line) for line in (out / "texts.jsonl").read_text().splitlines()[1:]]
    own, source = texts[0], texts[1]
    assert (own["kind"], source["kind"], own["source"]) == ("sampled", "open", source["source"])
    prompt = source["ids"][:15]  # half of a short text
    assert own["ids"] == prompt + Writer(model).behind(prompt, OPTIONS.answer_tokens)
    kinds = [text["kind"] for text in texts if text["kind"] != "open"]
    assert abs(kinds.count("greedy") - kinds.count("sampled")) <= 1
    assert sum(len(text["ids"]) for text in texts if text["kind"] != "open") >= OPTIONS.written_tokens


def test_prompts_given_again_are_answered_again_with_other_noise(model, tmp_path):
    path = data_file(tmp_path, texts=3)
    out, twice = tmp_path / "out", [read_sources(path, pretrained_words(), ReadReport()) for _ in range(2)]
    writer = Writer(model)
    write_texts(out, in_turns(twice), writer, OPTIONS, "x", silent)
    for first, again in zip(writer.asked[::2], writer.asked[1::2], strict=True):
        assert first.prompt == again.prompt
        assert first.seed != again.seed
        assert again.sampled
    texts = [json.loads(line) for line in (out / "texts.jsonl").read_text().splitlines()[1:]]
    assert [text["source"] for text in texts if text["kind"] != "open"] == [0, 1, 2, 3, 4, 5]
    assert [text["source"] for text in texts if text["kind"] == "open"] == [0, 2, 4]


@pytest.fixture(scope="module")
def written_whole(model, tmp_path_factory):
    """The texts of a writing that nobody killed, and how often it called its model."""
    folder, writer = tmp_path_factory.mktemp("whole"), Writer(model)
    sources = read_sources(data_file(folder), pretrained_words(), ReadReport())
    write_texts(folder / "out", sources, writer, OPTIONS, "x", silent)
    return (folder / "out" / "texts.jsonl").read_bytes(), writer.calls


@pytest.mark.slow
@pytest.mark.parametrize("lines", [4, 5, 5.5])  # line 4 is written by the model, line 5 is its prompt's open text
def test_a_killed_writing_goes_on_with_its_last_prompt(model, written_whole, tmp_path, lines):
    def sources():
        return read_sources(data_file(tmp_path), pretrained_words(), ReadReport())

    broken, (expected, calls) = tmp_path / "broken", written_whole
    kept = expected.splitlines(keepends=True)[: int(lines) + 1]
    kept[-1] = kept[-1][: int(len(kept[-1]) * (lines % 1))]
    broken.mkdir()
    (broken / "texts.jsonl").write_bytes(b"".join(kept))
    rest = Writer(model)
    write_texts(broken, sources(), rest, OPTIONS, "x", silent)
    assert (broken / "texts.jsonl").read_bytes() == expected
    assert 0 < rest.calls < calls
    with pytest.raises(UsageError, match="written with another fingerprint"):
        write_texts(broken, sources(), rest, OPTIONS, "y", silent)


def test_sources_come_in_turns_and_each_prompt_once(tmp_path):
    path = tmp_path / "twice.jsonl"
    chat = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7 w8"}]
    path.write_text((json.dumps({"messages": chat}) + "\n") * 2 + json.dumps({"text": "w9 w10"}) + "\n")
    found = list(read_sources(path, pretrained_words(), ReadReport()))
    assert len(found) == 2
    assert found[0].text[: len(found[0].prompt)] == found[0].prompt
    assert found[0].text[-3:] == [7, 8, 1]
    assert found[1].text == [9, 10, 1]
    assert list(in_turns([iter("ac"), iter("b")])) == ["a", "b", "c"]


def parameters(module):
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def trained(task, run, traces, options=QUICK, **clock):
    return train(task, run, traces, options, {"kind": "test"}, silent, **clock)


def exit_task(model, traces, states=None):
    return ExitTask(model, 1, traces, states=states)


def test_a_head_learns_and_the_model_stays_as_it_was(model, traces, tmp_path):
    before = parameters(model).clone()
    task = exit_task(model, traces)
    outcome = trained(task, tmp_path, traces, LoopOptions(epochs=6, micro_batch=4, precision="float32", rate=3e-3))
    first = exit_task(model, traces)
    chosen, _ = traces.split
    with torch.no_grad():
        assert task.loss(chosen) < 0.95 * first.loss(chosen)
    assert outcome.history[-1]["step"] == outcome.step
    assert torch.equal(parameters(model), before)
    assert TorchTarget(exit_model(model, 1, task.module.eval())).vocabulary == VOCABULARY


def test_what_is_kept_of_the_exit_is_what_is_computed(model, traces, tmp_path):
    kept, fresh = exit_task(model, traces, states=tmp_path / "states.npy"), exit_task(model, traces)
    numbers = np.array([3, 0, 5])
    with torch.no_grad():
        once = kept.scores(numbers)[0]
        assert torch.allclose(once, fresh.scores(numbers)[0], atol=0.3)  # stored in bfloat16
        rounded = fresh._states.of(numbers).bfloat16().float()
        fresh._states.of = lambda _windows: rounded
        assert torch.equal(once, fresh.scores(numbers)[0])
        calls = []
        handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        again = kept.scores(numbers[::-1].copy())[0].flip(0)
        handle.remove()
    assert not calls
    assert torch.equal(again, once)


def test_the_exit_trained_is_the_exit_that_drafts(model, traces):
    """Compare the head's output for training windows with that for cached rows."""
    task = exit_task(model, traces)
    target = TorchTarget(exit_model(model, 1, task.module.eval()))
    ids = np.asarray(traces.windows[2, :-1], np.int64)
    with torch.no_grad():
        expected = task.scores(np.array([2]))[0][0]
    from foredraft.graph.layout import lay_out_text

    cache = target.new_cache()
    assert torch.allclose(target.forward(lay_out_text(ids, 0), cache).logits, expected, atol=1e-4)


@pytest.mark.slow
def test_only_the_first_layers_are_held_while_training(traces):
    model = four_layers("llama")
    task = exit_task(model, traces)
    import gc
    import weakref

    behind = weakref.ref(model.model.layers[1].mlp.up_proj.weight)
    first = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert first() is not None
    assert behind() is None
    with torch.no_grad():
        assert math.isfinite(task.loss(np.array([0])))


class KilledError(Exception):
    pass


def killed_at(task, step):
    """Make the task's loss raise at the given call."""
    original, calls = task.loss, []

    def loss(windows):
        calls.append(1)
        if len(calls) > step:
            raise KilledError
        return original(windows)

    task.loss = loss
    return task


@pytest.mark.slow
def test_a_killed_training_ends_with_the_weights_of_one_that_was_not(model, traces, tmp_path):
    states = tmp_path / "states.npy"
    whole = exit_task(model, traces, states=states)
    steps = trained(whole, tmp_path / "whole", traces).step
    killed = killed_at(exit_task(model, traces, states=states), steps // 2)
    with pytest.raises(KilledError):
        trained(killed, tmp_path / "killed", traces, checkpoint_minutes=0)
    resumed = exit_task(model, traces, states=states)
    assert trained(resumed, tmp_path / "killed", traces).step == steps
    assert torch.equal(parameters(resumed.module), parameters(whole.module))
    with pytest.raises(UsageError, match="started with other settings: options"):
        trained(exit_task(model, traces), tmp_path / "killed", traces, LoopOptions(epochs=3, precision="float32"))


def test_an_interrupted_training_keeps_what_it_did(model, traces, tmp_path):
    task = exit_task(model, traces)
    original, calls = task.loss, []

    def loss(windows):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(windows)

    task.loss = loss
    with pytest.raises(KeyboardInterrupt):
        trained(task, tmp_path, traces)
    assert torch.load(tmp_path / loop.CHECKPOINT, weights_only=True)["step"] == 3


def test_a_loss_that_is_no_number_stops_and_the_last_checkpoint_stays(model, traces, tmp_path):
    task = exit_task(model, traces)
    original, calls = task.loss, []

    def loss(windows):
        calls.append(1)
        return original(windows) * (math.nan if len(calls) == 4 else 1)

    task.loss = loss
    with pytest.raises(NumericsError, match=r"loss became nan at step 3.*checkpoint.*good.*Lower the rate"):
        trained(task, tmp_path, traces, checkpoint_minutes=0)
    state = torch.load(tmp_path / loop.CHECKPOINT, weights_only=True)
    assert state["step"] == 3
    assert all(torch.isfinite(weight).all() for weight in state["module"].values())


def test_traces_whose_texts_are_all_held_out_are_refused(model, traces, tmp_path):
    with pytest.raises(UsageError, match="no window to learn from"):
        trained(exit_task(model, traces), tmp_path, replace(traces, held=np.ones_like(traces.held)))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_full_disk_leaves_the_checkpoint_before(error, model, traces, tmp_path, monkeypatch):
    run = trained(exit_task(model, traces), tmp_path, traces, LoopOptions(epochs=1, precision="float32"))
    before = (tmp_path / loop.CHECKPOINT).read_bytes()

    def full(state, file):
        file.write(b"half")
        raise error

    monkeypatch.setattr(loop.torch, "save", full)
    with pytest.raises(StoreError, match=r"No checkpoint can be written.*the previous one stays. Check its free space"):
        run.save()
    assert (tmp_path / loop.CHECKPOINT).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [loop.CHECKPOINT]


def test_a_time_limit_ends_the_run_with_the_rate_decayed(model, traces, tmp_path):
    ticks = iter(range(10_000))
    options = LoopOptions(epochs=1000, precision="float32")
    outcome = trained(exit_task(model, traces), tmp_path, traces, options, max_minutes=1, now=lambda: next(ticks) * 6.0)
    assert 5 <= outcome.step <= 12
    assert options.rate_at(1.0) == pytest.approx(options.rate * options.floor)
    assert options.rate_at(options.warmup) == pytest.approx(options.rate)
    assert options.rate_at(options.warmup / 2) == pytest.approx(options.rate / 2)


def test_the_distribution_loss_is_least_where_the_head_agrees():
    target = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    top = (torch.tensor([[0, 1]]), target[:, :2])
    agreed = distribution_loss(target.log(), *top)
    expected = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert float(agreed) == pytest.approx(expected, abs=1e-5)
    for other in ([0.3, 0.5, 0.1, 0.1], [0.25] * 4, [0.45, 0.25, 0.2, 0.1]):
        assert distribution_loss(torch.tensor([other]).log(), *top) > agreed


def test_bad_traces_are_refused(model, tmp_path):
    source = data_file(tmp_path, texts=1)
    out = tmp_path / "out"
    options = TraceOptions(written_tokens=10, open_tokens=10, answer_tokens=4, window=256)
    write_texts(out, read_sources(source, pretrained_words(), ReadReport()), Writer(model), options, "x", silent)
    with pytest.raises(UsageError, match="do not fill one window of 256 tokens"):
        label_texts(out, TorchTarget(model), options, "x", silent)
    with pytest.raises(UsageError, match="holds no complete traces"):
        open_traces(out)
    (out / "texts.jsonl").touch()
    (out / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="are damaged"):
        open_traces(out)
    (out / "texts.jsonl").write_text("not JSON\n")
    with pytest.raises(StoreError, match=r"is damaged.*Remove it"):
        label_texts(out, TorchTarget(model), options, "x", silent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"greedy_share": 2}, "greedy_share is 2"),
        ({"window": 0}, "window is 0"),
        ({"temperature": 0}, "temperature is 0"),
        ({"written_tokens": 0, "open_tokens": 0}, "Give written_tokens or open_tokens"),
        ({"hold_out_one_in": 1}, "hold_out_one_in is 1"),
    ],
)
def test_trace_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        TraceOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"floor": 2}, "floor is 2"),
        ({"rate": math.inf}, "rate is inf"),
        ({"precision": "float8"}, "no precision 'float8'"),
    ],
)
def test_loop_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        LoopOptions(**options)


# --- the command


@pytest.fixture
def saved_model(model, tmp_path):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    pretrained_words().save_pretrained(folder)
    return folder


QUICKLY = ["--set", "epochs=1", "--set", "micro_batch=4", "--traces", "window=16", "--traces", "answer_tokens=6"]
QUICKLY += ["--traces", "written_tokens=200", "--traces", "open_tokens=400", "--traces", "hold_out_one_in=3"]


def run_train(verb, model, data, out, *options):
    return main(["train", verb, "--model", str(model), "--data", str(data), "--out", str(out), *options])


@pytest.mark.slow
def test_the_command_trains_a_head_that_drafts(saved_model, tmp_path, capsys):
    head = tmp_path / "head"
    assert run_train("eesd", saved_model, data_file(tmp_path), head, *QUICKLY, "--layers", "1") == 0
    said = capsys.readouterr().out
    assert "greedy" in said
    assert "held-out agreement" in said
    from foredraft.model.loading import load_model

    card, _ = load_exit_head(head, load_model(str(saved_model), device="cpu"))
    assert (card.layers, card.dtype) == (1, "bfloat16")
    curve = json.loads((tmp_path / "head.run" / "curve.json").read_text())
    assert {"minutes", "loss", "agreement"} <= set(curve[-1])
    # its traces are reused
    again = tmp_path / "again"
    assert run_train("eesd", saved_model, tmp_path / "head.run" / "traces", again, "--set", "epochs=1") == 0
    asked = ["generate", "--model", str(saved_model), "--method", "eesd"]
    asked += ["--speculative-config", json.dumps({"head": str(head)})]
    capsys.readouterr()
    assert main([*asked, "--max-new-tokens", "8", "--seed", "1", "w5 w6"]) == 0
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "w1 w2 w3 " * 100}) + "\n")
    assert run_train("eesd", saved_model, other, head, *QUICKLY, "--layers", "1") == 2
    assert "made of other texts" in " ".join(capsys.readouterr().err.split())
    twice = ["--data", str(tmp_path / "texts.jsonl")]
    assert run_train("eesd", saved_model, tmp_path / "texts.jsonl", head, *QUICKLY, *twice, "--layers", "1") == 2
    assert "made of other texts" in " ".join(capsys.readouterr().err.split())
    made = tmp_path / "head.run" / "traces"
    assert run_train("eesd", saved_model, made, again, "--traces", "window=32") == 2
    assert "--traces has no effect" in " ".join(capsys.readouterr().err.split())


def test_chats_that_the_template_rejects_are_skipped(tmp_path):
    tokenizer, report = pretrained_words(), ReadReport()
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('who?') }}{% endif %}{{ messages[0].content }}"
    )
    asked, answered = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in ([answered, asked], [asked, answered])))
    assert [source.key for source in read_sources(path, tokenizer, report)] == ["w1 w2"]
    assert report.unusable_rows == 1


@pytest.mark.slow
def test_the_command_trains_a_predictor_and_medusa_heads(saved_model, tmp_path, capsys):
    from foredraft.model.heads import load_medusa, load_predictor
    from foredraft.model.loading import load_model

    head, made = tmp_path / "head", tmp_path / "head.run" / "traces"
    assert run_train("eesd", saved_model, data_file(tmp_path), head, *QUICKLY, "--layers", "1") == 0
    given = ["train", "cali", "--model", str(saved_model), "--data", str(made), "--head", str(head)]
    assert main([*given, "--set", "epochs=1"]) == 0
    loaded = load_model(str(saved_model), device="cpu")
    assert load_predictor(head, loaded, 1) is not None
    with pytest.raises(UsageError, match="of a head after 1 layers, and this one is after 2"):
        load_predictor(head, loaded, 2)
    for nowhere in (str(tmp_path / "nowhere"), "~nobody-of-this-name/head"):
        assert main([*given[:-1], nowhere]) == 2
        assert "There is no folder" in " ".join(capsys.readouterr().err.split())
    medusa = tmp_path / "medusa"
    assert run_train("medusa", saved_model, made, medusa, "--set", "epochs=1", "--heads", "2") == 0
    card, heads, _ = load_medusa(medusa, loaded)
    assert (card.count, len(heads.blocks)) == (2, 2)
    assert (heads.accuracies.diff(dim=1) <= 1).all()
    assert heads.accuracies.sum() > 0
    assert run_train("medusa", saved_model, made, tmp_path / "none", "--heads", "0") == 2
    assert run_train("medusa", saved_model, made, tmp_path / "none", "--vocabulary", "5") == 2
    assert "it may be 0 (all), or 10 to" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_command_trains_eagle3_in_the_format_of_others(saved_model, tmp_path, capsys):
    """With four layers, of which the first, the third and the last are read."""
    head = tmp_path / "head"
    given = saved_model, data_file(tmp_path), head, *QUICKLY, "--vocabulary", "40"
    assert run_train("eagle3", *given) == 0
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(saved_model)
    asked = ["generate", "--model", str(saved_model), "--max-new-tokens", "8", "--seed", "1", "--method"]
    texts = []
    for options in (["none"], ["eagle3", "--speculative-config", json.dumps({"model": str(head)})]):
        capsys.readouterr()
        assert main([*asked, *options, "w5 w6"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert run_train("eagle3", *given, "--save-dtype", "int8") == 2
    assert "which the format of eagle3 does not have" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_predictor_learns_which_tokens_are_accepted(model, traces, tmp_path):
    from foredraft.model.heads import ExitHead
    from foredraft.training.tasks import AgreementTask

    task = AgreementTask(model, ExitHead(model), 1, traces)
    chosen, _ = traces.split
    with torch.no_grad():
        before = float(task.loss(chosen))
    trained(task, tmp_path, traces, LoopOptions(epochs=20, micro_batch=8, precision="float32", rate=0.02))
    with torch.no_grad():
        assert float(task.loss(chosen)) < before


def test_labels_of_agreement_are_those_of_a_slow_comparison(model, traces):
    from foredraft.model.heads import POSITIONS, ExitHead
    from foredraft.training.tasks import AgreementTask

    task = AgreementTask(model, ExitHead(model), 1, traces)
    number = 4
    target, draft, level, estimate, label = task.levels(number)
    with torch.no_grad():
        scores = ExitTask(model, 1, traces).scores(np.array([number]))[0][0]
    agree = (scores.argmax(-1).numpy() == traces.top_ids[number, :, 0]).tolist()
    expected = []
    for start in range(traces.window):
        for i in range(1, POSITIONS + 1):
            if start + i >= traces.window:
                break
            expected.append((i, float(agree[start + i])))
            if not agree[start + i]:
                break
    assert list(zip(level.tolist(), label.tolist(), strict=True)) == expected
    assert target.shape == draft.shape == (len(expected), 32)
    assert ((estimate > 0) & (estimate <= 1)).all()


@pytest.mark.parametrize("count", [0, 3, 64, 65, 127, 128, 1000])
def test_windows_to_measure_on_are_spread_over_all(count):
    windows = np.arange(count) + 7
    found = spread(windows, 64)
    assert set(found) <= set(windows)
    assert min(count, 32) <= len(found) <= 64
    assert abs((found < 7 + count / 2).sum() * 2 - len(found)) <= 1


def test_medusa_heads_learn(model, traces, tmp_path):
    from foredraft.training.tasks import MedusaTask

    task = MedusaTask(model, 2, traces, states=tmp_path / "states.npy")
    chosen, _ = traces.split
    passes = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        before = float(task.loss(chosen))
    trained(task, tmp_path, traces, LoopOptions(epochs=10, micro_batch=8, precision="float32", rate=0.01))
    with torch.no_grad():
        assert float(task.loss(chosen)) < before - 0.05
        passes.clear()
        assert task.measured(chosen[:4]).shape == (2, 10)
    handle.remove()
    assert not passes, "the states of the first epoch are read again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "4"], "layers is 4; this model has 4, so it must be 1 to 3"),
        (["--layers", "0"], "layers is 0"),
        (["--max-minutes", "0"], "--max-minutes is 0"),
        (["--max-minutes", "nan"], "--max-minutes is nan"),
        (["--save-dtype", "int4"], "There is no --save-dtype 'int4'. Did you mean 'int8'?"),
        (["--set", "rates=1"], "Did you mean 'rate'"),
        (["--traces", "windows=1"], "Did you mean 'window'"),
        (["--set", "accumulation=x"], "accumulation of --set is 'x'; it must be a whole number"),
        (["--set", "seed={[1]:2}"], "seed of --set is '{[1]:2}'; it must be a whole number"),
        (["--set", "rate"], "'rate' is not of the form NAME=VALUE"),
        (["--set", "rate=1", "--set", "rate=2"], "rate is given twice"),
        (["--set", "clip=-1"], "clip is -1.0; it must be at least 0"),
        (["--set", "seed=-1"], "seed is -1; it must be at least 0"),
        (["--vocabulary", "100000"], "--vocabulary is 100000"),
    ],
)
def test_the_command_refuses_what_cannot_be(options, message, saved_model, tmp_path, capsys):
    data = data_file(tmp_path)
    assert run_train("eesd", saved_model, data, tmp_path / "head", *QUICKLY, *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "head").exists()
    assert not (tmp_path / "head.run" / "traces" / "texts.jsonl").exists(), "refused before texts are written"
    if "--set" in options:
        assert not (tmp_path / "head.run").exists()


@pytest.mark.parametrize(("verb", "layers"), [("eesd", "1"), ("draft", "3")])
def test_layers_that_the_configuration_cannot_describe_are_refused_before_texts_are_written(
    verb, layers, tmp_path, capsys
):
    config = tiny_configuration("jamba")  # its last layer has attention, as every second one
    config.num_hidden_layers = 4
    tiny_model(config).save_pretrained(tmp_path / "jamba")
    pretrained_words().save_pretrained(tmp_path / "jamba")
    data = data_file(tmp_path)
    assert run_train(verb, tmp_path / "jamba", data, tmp_path / "head", *QUICKLY, "--layers", layers) == 1
    assert "computes the types of layers from their number" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "head.run" / "traces" / "texts.jsonl").exists()


def test_a_head_is_not_written_over_a_model(saved_model, tmp_path, capsys):
    other = shutil.copytree(saved_model, tmp_path / "other")
    before = (other / "config.json").read_bytes()
    assert run_train("eagle3", saved_model, data_file(tmp_path), other, *QUICKLY) == 2
    assert "is the folder of a model, whose files would be replaced" in " ".join(capsys.readouterr().err.split())
    assert (other / "config.json").read_bytes() == before


def test_the_curve_is_json_though_nothing_is_held_out(saved_model, tmp_path):
    given = [*QUICKLY, "--traces", "window=8", "--layers", "1"]
    given[given.index("hold_out_one_in=3")] = "hold_out_one_in=1000000"
    given[given.index("window=16")] = "top_k=4"
    assert run_train("eesd", saved_model, data_file(tmp_path), tmp_path / "head", *given) == 0
    curve = json.loads((tmp_path / "head.run/curve.json").read_text(), parse_constant=pytest.fail)
    assert [each["agreement"] for each in curve] == [None] * len(curve)


@pytest.mark.parametrize(("verb", "options"), [("medusa", ["--heads", "6"]), ("eagle3", [])])
def test_windows_must_be_longer_than_what_is_predicted_ahead(verb, options, saved_model, tmp_path, capsys):
    given = ["--traces", "window=3", "--traces", "written_tokens=60", "--traces", "open_tokens=0"]
    given += ["--traces", "answer_tokens=4"]
    assert run_train(verb, saved_model, data_file(tmp_path), tmp_path / "head", *given, *options) == 2
    assert "The traces have windows of 3 tokens" in " ".join(capsys.readouterr().err.split())


def test_complete_traces_are_not_made_again(saved_model, tmp_path, capsys):
    out, given = tmp_path / "traces", ["--set", "window=16", "--set", "written_tokens=100", "--set", "answer_tokens=4"]
    assert run_train("traces", saved_model, data_file(tmp_path), out, *given) == 0
    before, said = (out / MANIFEST).stat().st_mtime_ns, capsys.readouterr().out
    assert run_train("traces", saved_model, data_file(tmp_path), out, *given) == 0
    assert (out / MANIFEST).stat().st_mtime_ns == before
    assert capsys.readouterr().out == said


def test_empty_or_short_data_is_refused(saved_model, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert run_train("traces", saved_model, empty, tmp_path / "none") == 2
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "w5 w6"}\n{"other": 1}\n')
    assert run_train("eesd", saved_model, short, tmp_path / "head", *QUICKLY) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "do not fill one window" in said
    assert "1 lines or rows were left out" in said
    assert run_train("eesd", saved_model, data_file(tmp_path), tmp_path / "head", *QUICKLY) == 0  # as it was told


def test_traces_of_another_model_are_refused(saved_model, tmp_path, capsys):
    other = tmp_path / "other"
    model = tiny_model(configuration("qwen3"))
    model.save_pretrained(other)
    pretrained_words().save_pretrained(other)
    made = tmp_path / "traces"
    given = [
        "--set",
        "window=16",
        "--set",
        "written_tokens=100",
        "--set",
        "open_tokens=300",
        "--set",
        "answer_tokens=4",
    ]
    assert run_train("traces", other, data_file(tmp_path), made, *given) == 0
    assert run_train("eesd", saved_model, made, tmp_path / "head") == 2
    assert "were written by another model" in " ".join(capsys.readouterr().err.split())


def test_traces_of_other_texts_are_not_added_to(saved_model, tmp_path, capsys):
    out, given = tmp_path / "traces", ["--set", "window=16", "--set", "written_tokens=100", "--set", "open_tokens=300"]
    assert run_train("traces", saved_model, data_file(tmp_path), out, *given, "--set", "answer_tokens=6") == 0
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "w1 w2 w3 " * 100}) + "\n")
    assert run_train("traces", saved_model, other, out, *given, "--set", "answer_tokens=6") == 2
    assert "made of other texts" in " ".join(capsys.readouterr().err.split())
    (out / MANIFEST).unlink()
    assert run_train("eesd", saved_model, out, tmp_path / "head") == 2
    assert "holds unfinished traces" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("setting", ["window=100000", "answer_tokens=100000"])
def test_traces_longer_than_the_models_window_are_refused(setting, saved_model, tmp_path, capsys):
    assert run_train("traces", saved_model, data_file(tmp_path), tmp_path / "traces", "--set", setting) == 2
    assert "The model's window is" in " ".join(capsys.readouterr().err.split())


def test_two_runs_in_one_folder_are_refused(saved_model, tmp_path, capsys):
    out = tmp_path / "traces"
    out.mkdir()
    with write_lock(out / "lock", out):
        assert run_train("traces", saved_model, data_file(tmp_path), out) == 1
        assert (out / "lock").exists(), "the other run goes on in it"
    assert "is being written by another process" in " ".join(capsys.readouterr().err.split())


def test_traces_that_are_labelled_again_are_not_complete_meanwhile(model, tmp_path):
    sources, identity = read_sources(data_file(tmp_path), pretrained_words(), ReadReport()), "x"
    out = tmp_path / "out"
    write_texts(out, sources, Writer(model), OPTIONS, identity, silent)
    label_texts(out, TorchTarget(model), OPTIONS, identity, silent)

    def interrupted(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label_texts(out, TorchTarget(model), OPTIONS, identity, interrupted)
    with pytest.raises(UsageError, match="no complete traces"):
        open_traces(out)
    assert label_texts(out, TorchTarget(model), OPTIONS, identity, silent).top_probabilities[:].sum() > 0


def test_prompts_that_do_not_fit_into_the_window_with_their_answer_are_left_out(saved_model, tmp_path):
    """Half of a question is another question."""
    window = json.loads((saved_model / "config.json").read_text())["max_position_embeddings"]
    asked = ((5, window), (6, 4))
    long, short = ({"messages": [{"role": "user", "content": f"w{word} " * count}]} for word, count in asked)
    path, out = tmp_path / "chats.jsonl", tmp_path / "traces"
    path.write_text("".join(json.dumps(row) + "\n" for row in (long, short)))
    settings = ["window=4", "written_tokens=300", "open_tokens=0", "answer_tokens=8"]
    assert run_train("traces", saved_model, path, out, *(part for each in settings for part in ("--set", each))) == 0
    _, *texts = map(json.loads, (out / "texts.jsonl").read_text().splitlines())
    assert {text["source"] for text in texts} == {0}
    assert all(len(text["ids"]) < window for text in texts)


def test_dropout_is_off_while_training(traces, tmp_path):
    model = four_layers("gpt2")
    model.config.attn_pdrop = model.config.embd_pdrop = model.config.resid_pdrop = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    task, windows = exit_task(model, traces), np.arange(4)
    with torch.no_grad():
        assert float(task.loss(windows)) == float(task.loss(windows))
