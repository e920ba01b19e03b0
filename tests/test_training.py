"""The pretraining recipe: hold-out by whole documents, exact resuming, and a folder that transformers loads."""

import gzip
import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft.corpus.documents import ReadReport
from foredraft.errors import StoreError, UsageError
from foredraft.training.evaluate import (
    EvaluationSet,
    domain_loss,
    encoded,
    field_of,
    held_out_documents,
    read_sets,
)
from foredraft.training.muon import Muon, orthogonalized
from foredraft.training.packing import WindowOrder, open_prepared
from foredraft.training.pretrain import main, train
from foredraft.training.recipe import Machine, Recipe, Shape, assigned, named
from foredraft.training.text_data import (
    PrepareOptions,
    chat_document,
    documents_in,
    encode,
    is_held_out,
    load_tokenizer,
    prepare,
    text_document,
)

TINY = Shape(layers=2, width=32, heads=2, kv_heads=1, intermediate=48, positions=64)
QUICK = Recipe(
    steps=12, micro_batch=4, accumulation=2, window=32, warmup=2, embedding_rate=1e-2, precision="float32", seed=3
)
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "likes",
    "finds",
    "small",
    "old",
    "red",
    "house",
    "tree",
    "and",
    "then",
    "under",
    "over",
    "river",
    "stone",
]


def sentence(random):
    return " ".join(random.choice(WORDS, 12)) + ".\n"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Chats (four answers to each of 60 prompts) and a folder of Python files, one of them below a `tests` folder."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    with gzip.open(folder / "chat.jsonl.gz", "wt") as file:
        for number in range(240):
            prompt = f"Say something about number {number % 60}."
            answer = sentence(random) + sentence(random)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
        file.write(json.dumps({"messages": [{"role": "narrator", "content": "Nobody speaks."}]}) + "\n")
    code = folder / "code"
    (code / "tests").mkdir(parents=True)
    for number in range(40):
        (code / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n# {sentence(random)}")
    (code / "tests" / "test_m.py").write_text("UNWANTED = 1\n")
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    sources = {
        "chat": partial(documents_in, corpus / "chat.jsonl.gz", ReadReport()),
        "code": partial(documents_in, corpus / "code", ReadReport()),
    }
    prepare(sources, folder, PrepareOptions(vocabulary=300, hold_out_one_in=5))
    return folder


def run(prepared, folder, **machine):
    said = []
    made = train(
        prepared, folder, shape=TINY, recipe=QUICK, machine=Machine(report_every=1, **machine), report=said.append
    )
    return made, said


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made, _ = run(prepared, folder)
    assert made == folder / "model"
    return folder


def losses(folder):
    return [entry["loss"] for entry in json.loads((folder / "training.json").read_text())["history"]]


def texts(stream, tokenizer):
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids, _, _ in held_out_documents(stream)]


# --- text


def test_a_prompt_and_a_document_are_on_one_side(prepared, corpus):
    opened, tokenizer = open_prepared(prepared), load_tokenizer(prepared)
    sides = {"train": texts(opened.train["chat"], tokenizer), "held": texts(opened.held["chat"], tokenizer)}
    prompts = {side: {text.split("<|assistant|>")[0] for text in found} for side, found in sides.items()}
    assert len(sides["train"]) + len(sides["held"]) == 240
    assert prompts["held"]
    assert not prompts["held"] & prompts["train"]
    assert len(sides["held"]) == 4 * len(prompts["held"])
    assert len(texts(opened.train["code"], tokenizer)) + len(texts(opened.held["code"], tokenizer)) == 40
    for path in (corpus / "code").glob("*.py"):
        side = opened.held if is_held_out(path.read_text(), 5) else opened.train
        assert path.read_text() + "<|endoftext|>" in texts(side["code"], tokenizer)


def test_hold_out_takes_its_share_and_ignores_white_space_and_case():
    assert is_held_out("Who  are you?\n", 7) == is_held_out("who are YOU?", 7)
    assert 150 < sum(is_held_out(f"key {number}", 50) for number in range(10_000)) < 250


def test_what_is_not_text_is_left_out_and_counted(corpus):
    report = ReadReport()
    assert len(list(documents_in(corpus / "chat.jsonl.gz", report))) == 240
    assert report.skipped == 1
    assert not any("UNWANTED" in document.key for document in documents_in(corpus / "code", ReadReport()))


def test_encoding_is_the_chat_template_and_an_end(finished):
    tokenizer, wrapped = load_tokenizer(finished / "model"), AutoTokenizer.from_pretrained(finished / "model")
    messages = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": " Cat\nand dog."}]
    ids, answers = encode(chat_document(messages), tokenizer)
    assert ids == [*wrapped.apply_chat_template(messages, return_dict=False), 0]
    assert tokenizer.decode([token for token, answer in zip(ids, answers, strict=True) if answer]) == " Cat\nand dog."


def test_special_tokens_spelt_out_in_a_text_stay_text(prepared):
    ids, _ = encode(text_document("It ends with <|endoftext|> there."), load_tokenizer(prepared))
    assert ids.count(0) == 1
    assert 1 not in ids


def test_an_unfinished_or_damaged_folder_is_refused(prepared, tmp_path):
    with pytest.raises(UsageError, match="no prepared folder"):
        open_prepared(tmp_path / "none")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in prepared.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "train-chat.u16").write_bytes(b"\0\0")
    with pytest.raises(StoreError, match=r"train-chat\.u16"):
        open_prepared(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(StoreError, match="did not finish"):
        open_prepared(copy)


@pytest.mark.parametrize("role", ["system", ""])
def test_unknown_roles_are_refused(role):
    with pytest.raises(UsageError, match="role"):
        chat_document([{"role": role, "content": "x"}])


# --- windows


def test_an_epoch_takes_every_window_once_in_another_order(prepared):
    order = WindowOrder(open_prepared(prepared), 32, {}, seed=1)
    first, second = order.batch(0, len(order)), order.batch(len(order), len(order))
    assert first.shape == (len(order), 33)
    assert not np.array_equal(first, second)
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    assert np.array_equal(order.batch(5, 3), first[5:8])


def test_shares_halve_and_repeat_domains(prepared):
    opened = open_prepared(prepared)
    code = (len(opened.train["code"]) - 1) // 32
    assert len(WindowOrder(opened, 32, {"chat": 0, "code": 0.5}, seed=1)) == round(code / 2)
    twice = WindowOrder(opened, 32, {"chat": 0, "code": 2}, seed=1)
    _, counts = np.unique(twice.batch(0, len(twice)), axis=0, return_counts=True)
    assert set(counts) == {2}
    with pytest.raises(UsageError, match="Did you mean 'code'"):
        WindowOrder(opened, 32, {"code_": 1}, seed=1)
    with pytest.raises(UsageError, match="fills a window"):
        WindowOrder(opened, 10**6, {}, seed=1)


# --- training


def test_the_loss_drops(finished):
    history = losses(finished)
    assert len(history) == QUICK.steps
    assert history[0] == pytest.approx(math.log(300), rel=0.1)
    assert np.mean(history[-3:]) < history[0] - 0.5


def test_a_resumed_run_ends_with_the_same_weights(prepared, finished, tmp_path):
    made, _ = run(prepared, tmp_path, stop_after=5)
    assert made is None
    assert not (tmp_path / "model").exists()
    _, said = run(prepared, tmp_path, checkpoint_every=4)
    assert said[0] == "resumed at step 5"
    whole, parts = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (finished, tmp_path))
    assert whole["model"].keys() == parts["model"].keys()
    for name, weights in whole["model"].items():
        assert torch.equal(weights, parts["model"][name]), name
    assert losses(finished) == losses(tmp_path)
    assert (finished / "model/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


def test_a_run_is_not_resumed_with_other_settings(prepared, finished):
    with pytest.raises(UsageError, match="begun with other settings: recipe"):
        train(prepared, finished, shape=TINY, recipe=Recipe(steps=13), report=str)


def test_a_damaged_checkpoint_is_refused(prepared, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(StoreError, match=r"checkpoint\.pt cannot be read"):
        run(prepared, tmp_path)


def test_the_saved_folder_is_a_transformers_model(finished):
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert model.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == model.config.eos_token_id == 0
    asked = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert prompt[0] == 1
    assert prompt[-1] == 2
    assert model(torch.tensor([prompt])).logits.shape == (1, len(prompt), 300)


def test_training_goes_on_from_given_weights(prepared, finished, tmp_path):
    recipe = replace(QUICK, steps=2, warmup=0)
    train(prepared, tmp_path, recipe=recipe, machine=Machine(report_every=1), start=finished / "model", report=str)
    assert losses(tmp_path)[0] < losses(finished)[0] - 0.5


def test_weights_of_another_tokenizer_are_refused(prepared, finished, corpus, tmp_path):
    other = {"code": partial(documents_in, corpus / "code", ReadReport())}
    prepare(other, tmp_path / "data", PrepareOptions(vocabulary=280))
    with pytest.raises(UsageError, match="another tokenizer"):
        train(tmp_path / "data", tmp_path / "run", recipe=QUICK, start=finished / "model", report=str)


def test_accumulation_averages_over_the_parts(prepared, tmp_path):
    """Two passes of four windows are one of eight, but for rounding."""
    whole = replace(QUICK, steps=3, micro_batch=8, accumulation=1)
    parts = replace(QUICK, steps=3)
    for name, recipe in (("whole", whole), ("parts", parts)):
        train(prepared, tmp_path / name, shape=TINY, recipe=recipe, machine=Machine(report_every=1), report=str)
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "parts"), abs=1e-3)


def test_rates_rise_then_fall():
    linear, cosine = Recipe(steps=110, warmup=10), Recipe(steps=110, warmup=10, decay="cosine", floor=0.1)
    assert linear.rate(0) == pytest.approx(1 / 11)
    assert linear.rate(10) == cosine.rate(10) == 1
    assert linear.rate(60) == pytest.approx(0.5)
    assert cosine.rate(60) == pytest.approx(0.55)
    assert linear.rate(109) == pytest.approx(0.01)
    assert cosine.rate(110) == pytest.approx(0.1)


def test_options_come_from_strings():
    assert assigned(Recipe, ["steps=7", "decay=cosine"], "the recipe") == Recipe(steps=7, decay="cosine")
    for wrong, told in (("step=7", "Did you mean 'steps'"), ("steps=x", "no int"), ("decay=line", "Did you mean")):
        with pytest.raises(UsageError, match=told):
            assigned(Recipe, [wrong], "the recipe")
    with pytest.raises(UsageError, match="twice"):
        named(["a=1", "a=2"])
    with pytest.raises(UsageError, match="do not fit"):
        Shape(width=100, heads=3)


@pytest.mark.parametrize("size", [(24, 24), (16, 40), (40, 16)])
def test_orthogonalized_singular_values_are_near_one(size):
    matrix = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(matrix, torch.float32))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_takes_matrices_only():
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


# --- evaluation


class Uniform(torch.nn.Module):
    """Finds every id equally likely."""

    def __init__(self, vocabulary):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.vocabulary = vocabulary

    def forward(self, input_ids, use_cache):
        assert not use_cache
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, self.vocabulary)})


def test_loss_counts_every_token_once(prepared):
    documents = list(encoded([text_document(WORDS[0] * n) for n in (1, 30, 200)], load_tokenizer(prepared)))
    loss = domain_loss(Uniform(300), iter(documents), window=16, batch=3)
    assert loss.documents == 3
    assert loss.tokens == loss.answer_tokens == sum(len(ids) for ids, _, _ in documents)
    assert loss.loss == pytest.approx(math.log(300))
    assert loss.utf8_bytes == 3 * 231
    assert domain_loss(Uniform(300), iter(documents), max_tokens=1).documents == 1


def test_loss_is_the_models_own(finished):
    model = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    tokenizer = load_tokenizer(finished / "model")
    chats = [
        chat_document([{"role": "user", "content": "Say a."}, {"role": "assistant", "content": answer}])
        for answer in ("the cat", "the dog likes the old red house")
    ]
    loss = domain_loss(model, encoded(chats, tokenizer), window=64)
    nats = []
    for ids, answers, _ in encoded(chats, tokenizer):
        with torch.no_grad():
            log = model(torch.tensor([[0, *ids[:-1]]])).logits[0].log_softmax(-1)
        nats += [-log[row, token].item() for row, (token, own) in enumerate(zip(ids, answers, strict=True)) if own]
    assert loss.answer_tokens == len(nats)
    assert loss.answer_loss == pytest.approx(np.mean(nats), rel=1e-5)


def test_evaluation_sets_are_read_from_files(tmp_path):
    (tmp_path / "sets.toml").write_text(
        '[math]\nfile = "m.jsonl"\nuser = "q"\nassistant = "a.0"\nremove = "<<[^<>]*>>"\nwhere = { kind = "x" }\n'
    )
    rows = [{"q": "1+1?", "a": ["1+1=<<1+1=2>>2"], "kind": "x"}, {"q": "no", "a": ["no"], "kind": "y"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(read_sets(tmp_path / "sets.toml")["math"].documents(tmp_path))
    assert [document.parts for document in found] == [(("user", "1+1?"), ("assistant", "1+1=2"))]
    with pytest.raises(UsageError, match="no field 'b'"):
        field_of({"a": 1}, "b")
    with pytest.raises(UsageError, match="either 'text'"):
        EvaluationSet(file="m.jsonl", user="q")
    with pytest.raises(UsageError, match="cannot be read"):
        list(EvaluationSet(file="none.jsonl", text=("a",)).documents(tmp_path))


# --- the command


def test_the_command_prepares_trains_resumes_and_evaluates(corpus, tmp_path, monkeypatch, capsys):
    def command(*words):
        monkeypatch.setattr("sys.argv", ["pretrain", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, capsys.readouterr()

    data, folder = tmp_path / "data", tmp_path / "run"
    sources = [f"chat={corpus / 'chat.jsonl.gz'}", f"code={corpus / 'code'}"]
    assert command("prepare", data, *sources, "--set", "vocabulary=280", "--set", "hold_out_one_in=5")[0] == 0
    words = ["train", data, folder, "--shape", "layers=1,width=16,heads=2,kv_heads=1,intermediate=16"]
    for setting in ("steps=4", "micro_batch=2", "window=16", "warmup=1"):
        words += ["--set", setting]
    assert "the same command goes on" in command(*words, "--stop-after", 2)[1].out
    assert "resumed at step 2" in command(*words)[1].out
    status, said = command("evaluate", folder / "model", "--data", data)
    assert status == 0
    assert [line.split()[0] for line in said.out.splitlines()] == ["domain", "chat", "code"]
    status, said = command(*words, "--set", "step=4")
    assert status == 2
    assert "Did you mean 'steps'" in said.err
