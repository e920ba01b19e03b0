"""How text becomes ids: the same in another process, with chats rendered as transformers renders them."""

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from foredraft.cli.stores import words_of
from foredraft.corpus.documents import join_messages
from foredraft.corpus.words import Words, template_render, words_of_file
from foredraft.errors import UsageError
from foredraft.model import loading
from foredraft.model.loading import load_tokenizer
from support.toys import TOY

CHAT = [
    {"role": "user", "content": "Is 1 < 2 & 2 > 1?\n"},
    {"role": "assistant", "content": "Yes: “naïve” 日本語."},
]


def tokenizer(*words):
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def words(**options):
    return Words(tokenizer("a", "b").to_str(), **options)


@pytest.fixture(scope="module")
def demo():
    return load_tokenizer(TOY)


# --- of a model


def test_a_models_words_are_those_of_its_folder(demo):
    of_model, of_file = words_of(TOY, None), words_of(None, Path(TOY))
    assert of_model.chat_template == of_file.chat_template == demo.chat_template
    assert of_model.eos_token_id == of_file.eos_token_id == demo.eos_token_id
    assert of_model.tokenizer_hash == of_file.tokenizer_hash
    text = "def f(x):\n    return x  # naïve\n"
    ids = demo(text, add_special_tokens=False)["input_ids"]
    assert of_model.tokenizer().encode(text, add_special_tokens=False).ids == ids
    assert max(ids) < of_model.vocabulary == of_file.vocabulary == len(demo)


def test_words_have_one_source_by_default_the_default_model(tmp_path, demo, monkeypatch):
    with pytest.raises(UsageError, match="--model or --tokenizer, not both"):
        words_of(TOY, tmp_path)
    asked = []
    monkeypatch.setattr(loading, "load_tokenizer", lambda name: asked.append(name) or demo)
    assert words_of(None, None).vocabulary == len(demo)
    assert asked == ["smollm2"]


TEMPLATES = {
    "special tokens": "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "generation marks": (
        "{% for m in messages %}\n  {%- if m.role == 'assistant' %}\n{% generation %}\n"
        "  {{ m.content }}\n{%- endgeneration %}\n{% else %} {{ m.content }} {% endif %}{% endfor %}"
    ),
    "breaks": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "absent things": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ other is defined }}",
}


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_chats_are_worded_as_transformers_does(demo, template):
    source = TEMPLATES.get(template, demo.chat_template)
    expected = demo.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    assert template_render(source, demo.special_tokens_map)(CHAT) == expected


def test_fields_without_a_value_are_left_out_as_transformers_does(demo):
    source = "{% for m in messages %}{{ m.name }}{{ m.tool_calls is defined }}{% endfor %}"
    chat = [{"role": "user", "content": "a", "name": "Ada", "tool_calls": None}]
    expected = demo.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert template_render(source, {})(chat) == expected == "AdaFalse"


def test_a_template_is_told_the_same_day_every_day():
    render = template_render("{{ strftime_now('%d %b %Y') }}", {})
    assert render(CHAT) == "26 Jul 2024"


def test_templates_that_fail_say_so():
    for source, says in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.upper() }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ):
        with pytest.raises(UsageError, match=says):
            template_render(source, {})(CHAT)
    with pytest.raises(UsageError, match="not a Jinja template"):
        template_render("{% if %}", {})


# --- as data


def test_words_are_the_same_in_another_process():
    made = words(eos_token_id=1, chat_template="{{ messages[0].content }}", special_tokens={"eos_token": "b"})
    there = pickle.loads(pickle.dumps(made))  # noqa: S301  # our own bytes
    assert there == made
    assert there.digest == made.digest
    assert there.render()(CHAT) == CHAT[0]["content"]


def test_the_digest_changes_with_everything_that_decides_what_a_text_becomes():
    lower = tokenizer("a", "b")
    lower.pre_tokenizer = pre_tokenizers.Whitespace()
    made = [
        words(), words(eos_token_id=1), words(chat_template="x"), words(special_tokens={"eos_token": "b"}),
        Words(lower.to_str()),
    ]  # fmt: skip
    assert len({each.digest for each in made}) == len(made)
    assert {each.tokenizer_hash for each in made} == {made[0].tokenizer_hash}, "the vocabulary is the same in all"


def test_without_a_template_a_chat_becomes_lines_with_its_roles():
    assert words().render() is join_messages


def test_padding_and_truncation_are_left_behind():
    limited = tokenizer("a", "b")
    limited.enable_truncation(2)
    limited.enable_padding(length=9)
    made = Words(limited.to_str())
    assert made.tokenizer().encode("a b a b a").ids == [0, 1, 0, 1, 0]


# --- of a file


def test_the_end_and_the_special_tokens_are_read_beside_the_tokenizer(tmp_path):
    tokenizer("a", "<s>", "</s>").save(str(tmp_path / "tokenizer.json"))
    assert words_of_file(tmp_path).eos_token_id is None
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    made = words_of_file(tmp_path / "tokenizer.json")
    assert made.eos_token_id == 2
    assert made.render()(CHAT) == f"<s>{CHAT[0]['content']}</s>"


def test_a_chat_template_may_be_in_the_configuration(tmp_path):
    tokenizer("a").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].role }}"}))
    assert words_of_file(tmp_path).render()(CHAT) == CHAT[0]["role"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b"[]", "is not a JSON object"),
        ("chat_template.jinja", b"\xff\xfe", "is not text in UTF-8"),
    ],
)
def test_what_is_beside_a_tokenizer_and_cannot_be_used_is_refused(tmp_path, name, content, says):
    tokenizer("a").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says):
        words_of_file(tmp_path)


def test_what_is_not_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"tokenizer\.json does not exist"):
        words_of_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"not a tokenizer\.json"):
        words_of_file(tmp_path)
