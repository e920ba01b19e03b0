"""EESD: the text of plain decoding, alone and in a batch; drafts within their budget; fit of heads."""

import json

import pytest
import torch
from safetensors.torch import save_file

import foredraft
from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.drafters.eesd import EesdOptions
from foredraft.errors import StoreError, UnsupportedModelError, UsageError
from foredraft.model.fingerprint import fingerprint
from foredraft.model.growth import model_drafter
from foredraft.model.head_files import CONFIG_FILE, WEIGHTS_FILE, card_for, read_head, save_head, trained_head
from foredraft.model.heads import ExitHead, exit_model, load_exit_head
from support.exits import LAYERS, plain, target_of, written
from support.families import LONG, NEW_TOKENS, SETTINGS, VOCABULARY, configuration, of_families, prompt_of, tiny_model
from support.pairs import pairs
from support.toys import TOY

FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "gpt_neox", "mistral", "falcon"]
"""Families: the paper's, a sliding window, learned positions, scaled embeddings, layers that return tuples."""
CHAIN = {"out_degree": 1, "least_probability": 0.0, "levels": 10}  # the paper's
SHAPES = {
    "chain": CHAIN,
    "tree": {"out_degree": 3, "least_share": 0.0, "least_probability": 0.0, "levels": 10},
    "deep exit": {"layers": 3, **CHAIN},
    "no head": {"head": "none", "layers": 1, **CHAIN},
}


def drafter_of(family, shape, heads):
    options = dict(SHAPES[shape])
    if shape != "no head":
        options["head"] = heads(family, options.get("layers", 1))
    return make_drafter("eesd", options, Resources(VOCABULARY, target=target_of(family)))


@of_families(("family", "shape", "setting"), pairs(FAMILIES, list(SHAPES), list(SETTINGS)))
def test_the_text_is_that_of_plain_decoding(family, shape, setting, heads):
    drafter = drafter_of(family, shape, heads)
    text, records = written(target_of(family), family, setting, drafter)
    assert text == plain(family, setting)
    assert sum(record.drafted for record in records) > NEW_TOKENS // 2


def test_a_draft_that_the_model_agrees_with_takes_few_steps():
    """With all layers but the last before the exit, and the last as the head, drafts equal the text."""
    target = target_of("llama")
    model = target.with_model(exit_model(target.model, LAYERS - 1, ExitHead(target.model)))
    drafter = model_drafter(("eesd",), EesdOptions(head="none", layers=1, **CHAIN).rules(), model)
    for setting in SETTINGS:
        text, records = written(target, "llama", setting, drafter)
        assert text == plain("llama", setting)
        assert len(records) <= NEW_TOKENS // 8 + 3


@pytest.mark.parametrize("budget", [Budget(1, 8), Budget(16, 1), Budget(5, 3), Budget(0, 5), Budget(5, 0)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_draft_stays_within_its_budget(shape, budget, heads):
    drafter = drafter_of("llama", shape, heads)
    ids = prompt_of(LONG)
    found = drafter.open(DraftContext(VOCABULARY)).propose(SequenceView(ids, len(ids)), budget)
    found.check()
    assert len(found) <= budget.nodes
    assert (len(found) > 0) == (budget.nodes > 0 and budget.depth > 0)


def test_a_head_comes_back_from_its_files(heads):
    model = target_of("llama").model
    card, head = load_exit_head(heads("llama", 1), model)
    assert (card.layers, card.base_model, card.vocabulary) == (1, "llama", VOCABULARY)
    for name, weight in ExitHead(model).state_dict().items():
        assert torch.equal(head.state_dict()[name], weight)


def test_a_fingerprint_survives_a_change_of_dtype_and_no_change_of_weights():
    model = tiny_model(configuration("llama"))
    before = fingerprint(model)
    assert fingerprint(model.to(torch.bfloat16).to(torch.float32)) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert fingerprint(model) != before


def test_heads_that_do_not_fit_are_refused(heads, tmp_path):
    ours = heads("llama", 1)
    with pytest.raises(UsageError, match=r"trained for llama, whose weights are not this model's.*train eesd"):
        load_exit_head(ours, target_of("qwen3").model)
    with pytest.raises(UsageError, match=r"layers is 2, and the head in .* trained after 1 layers"):
        make_drafter("eesd", {"head": ours, "layers": 2}, Resources(VOCABULARY, target=target_of("llama")))
    with pytest.raises(UsageError, match=f"layers is {LAYERS}; this model has {LAYERS}, so it must be 1 to 3"):
        make_drafter("eesd", {"head": "none", "layers": LAYERS}, Resources(VOCABULARY, target=target_of("llama")))
    larger = configuration("llama")
    larger.vocab_size += 1
    with pytest.raises(UsageError, match=r"trained for llama, whose weights are not this model's"):
        load_exit_head(ours, tiny_model(larger))
    with pytest.raises(UsageError, match=r"holds no head: head.json is missing"):
        load_exit_head(tmp_path, target_of("llama").model)
    with pytest.raises(UsageError, match="is a head for eesd, not for medusa"):
        read_head(ours, "medusa", target_of("llama").model)


def test_a_head_comes_from_the_hub_where_there_is_no_such_folder(heads, monkeypatch):
    ours = heads("llama", 1)
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or ours)
    model = target_of("llama").model
    assert load_exit_head(trained_head("eesd", "somebody/head", model), model)[0].layers == 1
    assert asked == ["somebody/head"]

    def unreachable(name, **_):
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(UsageError, match=r"no folder somebody/head, and no head .* no route to the hub"):
        trained_head("eesd", "somebody/head", model)


def test_damaged_heads_are_refused(heads, tmp_path):
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        folder = tmp_path / name
        folder.mkdir()
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            data = (tmp_path.parent / heads("llama", 1) / file).read_bytes()
            (folder / file).write_bytes(data[: len(data) // 2] if file == name else data)
        with pytest.raises(StoreError, match="is damaged"):
            load_exit_head(folder, target_of("llama").model)
    model, folder = target_of("llama").model, tmp_path / "nan"
    weights = ExitHead(model).state_dict()
    weights["norm.weight"] = torch.full_like(weights["norm.weight"], float("nan"))
    save_head(folder, card_for(model, "eesd", "llama", layers=1, dtype="float32"), weights)
    with pytest.raises(StoreError, match=r"damaged: norm.weight holds NaN"):
        load_exit_head(folder, model)
    save_file({"norm.weight.scale": torch.ones(3, 1)}, folder / WEIGHTS_FILE)
    with pytest.raises(StoreError, match=r"damaged \(ValueError: norm.weight.scale scales no tensor\)"):
        load_exit_head(folder, model)
    save_file({"norm.weight": torch.ones(3), "norm.weight.scale": torch.ones(2)}, folder / WEIGHTS_FILE)
    with pytest.raises(StoreError, match="is damaged"):
        load_exit_head(folder, model)


@pytest.mark.parametrize(("field", "value"), [("layers", "two"), ("layers", None), ("layers", 1.5), ("count", -1)])
def test_a_card_with_an_odd_number_is_damaged(field, value, tmp_path):
    model, file = target_of("llama").model, tmp_path / CONFIG_FILE
    save_head(tmp_path, card_for(model, "eesd", "llama", layers=1), ExitHead(model).state_dict())
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(StoreError, match=rf"is damaged \(ValueError: {field} is {value!r}\)"):
        load_exit_head(tmp_path, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 0}, "levels is 0"),
        ({"out_degree": 33}, "out_degree is 33"),
        ({"layers": 0}, "layers is 0"),
        ({"head": "none"}, "say after how many layers"),
        ({"heads": 1}, "Did you mean 'head'"),
        ({}, "needs heads trained for this model"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make_drafter("eesd", options, Resources(VOCABULARY, target=target_of("llama")))


def test_without_a_model_the_method_says_what_it_needs():
    with pytest.raises(UsageError, match="no model is loaded here"):
        make_drafter("eesd", {}, Resources(100))


def test_a_model_that_does_not_come_apart_is_refused():
    model = tiny_model(configuration("llama"))
    model.model.layers = torch.nn.ModuleList([*model.model.layers, torch.nn.Identity()])
    with pytest.raises(UnsupportedModelError, match="not a plain list"):
        exit_model(model, 1, None)
    wrapped = tiny_model(configuration("llama"))
    wrapped.model.forward = wrapped.model.forward
    with pytest.raises(UnsupportedModelError, match="load it onto one device"):
        exit_model(wrapped, 1, None)


@pytest.mark.slow
def test_a_generator_writes_the_same_text_through_an_early_exit():
    generator = foredraft.load(TOY, method="none", dtype="float32", compile=False)
    settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.7, "seed": 3}
    expected = generator.generate("The old lighthouse", **settings)
    generator.use("eesd", {"head": "none", "layers": 6, "out_degree": 2}, nodes=6)
    found = generator.generate("The old lighthouse", **settings)
    assert found.token_ids == expected.token_ids
    assert found.statistics.accepted > 0
    again, other = generator.generate_all(["The old lighthouse", "Once upon a time"], **settings)
    assert again.token_ids == expected.token_ids
    assert other.statistics.accepted > 0
