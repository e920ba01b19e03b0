"""How text becomes ids: the same in another process, with chats rendered as transformers renders them."""

import pickle

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from foredraft.cli.stores import words_of
from foredraft.corpus.documents import join_messages
from foredraft.corpus.words import Words, template_render
from foredraft.errors import UsageError
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


def test_a_models_words_are_those_of_its_tokenizer(demo):
    made = words_of(TOY)
    assert made.chat_template == demo.chat_template
    assert made.eos_token_id == demo.eos_token_id
    text = "def f(x):\n    return x  # naïve\n"
    ids = demo(text, add_special_tokens=False)["input_ids"]
    assert made.tokenizer().encode(text, add_special_tokens=False).ids == ids
    assert max(ids) < made.vocabulary == len(demo)


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
