"""Reading a corpus: file kinds, broken input, texts of any length; and the table commands."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from foredraft.cli import stores
from foredraft.corpus import documents as documents_module
from foredraft.corpus.documents import Document, ReadReport, find_inputs, read_documents
from foredraft.corpus.words import tokenize, vocabulary_size
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.trigram import open_table, table_info
from foredraft.standard_library import sources
from support.tokenizers import save_as_a_models
from support.toys import TOY, text_documents

END = 300
CHAT = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|end|>"], initial_alphabet=made.pre_tokenizer.alphabet()
    )
    made.train_from_iterator(["the cat sat on the mat\n" * 50], trainer)
    return made


def read(*inputs, **options):
    report = ReadReport()
    return list(read_documents(find_inputs(inputs), report=report, **options)), report


def texts(*inputs, **options):
    return [document.text for document in read(*inputs, **options)[0]]


# --- inputs


def test_folders_are_read_at_any_depth_in_order_and_nothing_twice(tmp_path):
    for name in ("b.txt", "a/c.MD", "a/d.py.gz", "a/x.bin", ".git/e.txt", "a/.hidden.txt", "z.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.warns(ForedraftWarning, match="2 files of other kinds"):
        found = find_inputs([tmp_path / "b.txt", tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["b.txt", "a/c.MD", "a/d.py.gz"]


def test_inputs_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "x.bin").write_text("x")
    with pytest.raises(UsageError, match="does not exist"):
        find_inputs([tmp_path / "missing.txt"])
    with pytest.raises(UsageError, match=r"of a kind that cannot be read.*\.jsonl"):
        find_inputs([tmp_path / "x.bin"])
    with pytest.raises(UsageError, match="has no file ending in"):
        find_inputs([tmp_path])
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_documents([tmp_path / "gone.txt"], report=ReadReport()))


def test_files_of_other_kinds_in_a_folder_are_counted_and_named(tmp_path):
    for name in ("a.txt", "b.pdf", "c.pdf", "d.html", ".hidden.doc"):
        (tmp_path / name).write_text("words")
    with pytest.warns(
        ForedraftWarning, match=r"3 files of other kinds, which are left out: 2 of \.pdf, 1 of \.html\.$"
    ):
        assert find_inputs([tmp_path]) == [tmp_path / "a.txt"]


def test_links_to_folders_are_not_followed_and_a_warning_says_so(tmp_path):
    for name in ("corpus", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("words")
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")  # a file, which is read
    (tmp_path / "corpus" / "c.txt").symlink_to(tmp_path / "gone")
    with pytest.warns(ForedraftWarning, match=r"left out: 2 of links to folders or to nothing\.$"):
        assert [path.name for path in find_inputs([tmp_path / "corpus"])] == ["a.txt", "b.txt"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="Links to folders are not followed"):
        find_inputs([tmp_path / "only"])


# --- file kinds


def test_a_file_that_is_no_text_is_counted_and_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "b.txt").write_text("words")
    documents, report = read(tmp_path / "a.txt", tmp_path / "b.txt")
    assert [document.text for document in documents] == ["words"]
    assert (report.binary_files, sum(report.left_out.values())) == (1, 1)
    with pytest.raises(
        UsageError, match=r"a\.txt, there are zero bytes or control characters, so it is not UTF-8 text"
    ):
        list(read_documents([tmp_path / "a.txt"], report=ReadReport(), strict=True))


def test_random_bytes_are_no_text_also_without_a_zero_byte_and_old_encodings_are(tmp_path):
    rng = np.random.default_rng(3)
    (tmp_path / "random.txt").write_bytes(rng.integers(1, 256, 300, dtype=np.uint8).tobytes())
    (tmp_path / "latin.txt").write_bytes("\x1b[1mäöü\x1b[0m ça va, größer\f\r\n".encode("latin-1"))
    documents, report = read(tmp_path / "random.txt", tmp_path / "latin.txt")
    assert (len(documents), report.binary_files) == (1, 1)
    assert "va, gr" in documents[0].text


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".txt.gz"])
def test_a_text_file_is_one_document(tmp_path, suffix):
    content = "\ufeffa line\nÄ broken byte: ".encode() + b"\xff\r\nend"
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    documents, report = read(path)
    assert documents == [Document("a line\nÄ broken byte: \ufffd\r\nend", path.stat().st_size)]
    assert not report.left_out


@pytest.mark.parametrize("line", ["a line of words\n", "words without any line end ", "x"])
def test_long_text_files_come_in_pieces_that_join_to_the_whole(tmp_path, monkeypatch, line):
    monkeypatch.setattr(documents_module, "_BLOCK_BYTES", 1000)
    whole = line * 3000 + "Ä" * 501
    (tmp_path / "a.txt").write_text(whole, "utf-8")
    documents, _ = read(tmp_path / "a.txt")
    assert "".join(document.text for document in documents) == whole
    assert [document.complete for document in documents] == [False] * (len(documents) - 1) + [True]
    assert max(len(document.text) for document in documents) <= 2100
    assert all(document.text.endswith("\n") for document in documents[:-2]) or "\n" not in line


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_give_texts_and_chats_and_count_what_is_left_out(tmp_path, packed):
    rows = [
        '{"text": "one"}', "", '{"text": ', '{"other": 1}', '{"text": 7}', '{"text": "  \\n"}', '"a string"',
        "[" * 100_000,
        json.dumps({"messages": CHAT}), '{"messages": []}', '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": null}]}', '{"text": "lone \\ud800 surrogate"}', '{"text": "last"}',
    ]  # fmt: skip
    content = "\n".join(rows).encode() + b'\n{"text": "\xff"}'
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    documents, report = read(path)
    assert [document.text for document in documents] == [
        "one", "user: Tea?\nassistant: Yes.\n", "lone \ufffd surrogate", "last", "\ufffd",
    ]  # fmt: skip
    assert (report.broken_lines, report.unusable_rows, report.empty_documents) == (2, 6, 1)
    assert sum(report.left_out.values()) == 9
    assert documents[-1].consumed == path.stat().st_size


@pytest.mark.parametrize(
    ("row", "says"),
    [("{", "line 2 is not JSON"), ("{}", "line 2 has no usable field"), ('{"text": ""}', "line 2 has no text")],
)
def test_strict_reading_stops_at_the_first_bad_line(tmp_path, row, says):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{row}\n')
    with pytest.raises(UsageError, match=rf"a\.jsonl, {says}.*--strict"):
        texts(tmp_path / "a.jsonl", strict=True)
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(UsageError, match="there is no text"):
        texts(tmp_path / "b.txt", strict=True)


def test_chats_that_cannot_be_worded_are_counted_or_refused(tmp_path):
    def refuse(messages):
        raise UsageError("roles must alternate")

    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    assert read(tmp_path / "a.jsonl", render=refuse)[1].unusable_rows == 1
    with pytest.raises(UsageError, match=r"cannot be rendered \(roles must alternate\)"):
        texts(tmp_path / "a.jsonl", render=refuse, strict=True)


def test_parquet_is_read_row_group_by_row_group(tmp_path):
    rows = pa.table({"text": [f"row {i}" for i in range(5)] + [None, ""], "more": list(range(7))})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"messages": [CHAT, []]}), tmp_path / "b.parquet")
    documents, report = read(tmp_path)
    assert [document.text for document in documents] == [
        *(f"row {i}" for i in range(5)), "user: Tea?\nassistant: Yes.\n"
    ]  # fmt: skip
    assert (report.unusable_rows, report.empty_documents) == (2, 1)
    consumed = [document.consumed for document in documents]
    assert consumed == sorted(consumed)
    assert (
        0
        < consumed[0]
        < (tmp_path / "a.parquet").stat().st_size
        < consumed[-1]
        <= sum(path.stat().st_size for path in find_inputs([tmp_path]))
    )


def test_damaged_files_are_refused(tmp_path):
    packed = gzip.compress(json.dumps({"text": os.urandom(5000).hex()}).encode())
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "other.parquet")
    whole = (tmp_path / "other.parquet").read_bytes()
    for name, content in (
        ("cut.jsonl.gz", packed[:-900]),
        ("flipped.txt.gz", packed[:500] + bytes(40) + packed[540:]),
        ("not.txt.gz", b"plain text"),
        ("cut.parquet", whole[:-9]),
        ("empty.parquet", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=rf"{name} is damaged"):
            texts(tmp_path / name)
    with pytest.raises(UsageError, match="has no column 'text' or 'messages'"):
        texts(tmp_path / "other.parquet")


def test_consumed_bytes_run_on_over_files(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    assert [document.consumed for document in read(tmp_path)[0]] == [10, 20, 30]


# --- token ids


def ids_of(documents, tokenizer, **options):
    """Return the ids of each whole document."""
    symbols = np.concatenate([np.empty(0, np.uint16), *tokenize(documents, tokenizer, END, **options)])
    parts = np.split(symbols, np.flatnonzero(symbols == END) + 1)
    assert len(parts[-1]) == 0
    return [part[:-1].tolist() for part in parts[:-1]]


def test_documents_are_tokenised_in_order_whatever_the_batches(tokenizer):
    corpus = ["the cat", "sat on the mat\n" * 20, "x", "the mat"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in corpus]
    for batch in (1, 30, 10_000):
        assert ids_of(text_documents(corpus), tokenizer, batch_characters=batch) == expected


def test_what_became_ids_is_counted(tokenizer):
    report = ReadReport()
    (ids,) = tokenize(text_documents(["the cat", "x"]), tokenizer, END, 0, report=report)
    assert (report.kept, report.tokens) == (2, len(ids) - 2)
    assert ids[[-2, -1]].tolist() == [0, END]


def test_long_documents_are_cut_at_line_ends(tokenizer):
    text = "the cat sat\n" * 1000
    cut = {"piece_characters": 100, "batch_characters": 1}
    pieces = list(tokenize(text_documents([text]), tokenizer, END, **cut))
    assert len(pieces) == 125
    assert "".join(tokenizer.decode(piece[piece != END].tolist()) for piece in pieces) == text
    assert [piece[-1] == END for piece in pieces] == [False] * 124 + [True]
    assert ids_of(text_documents([text]), tokenizer, piece_characters=100) == [
        [*np.concatenate(pieces)[:-1].tolist()],
    ]


@pytest.mark.slow
def test_a_huge_line_is_tokenised_in_bounded_pieces(tmp_path, tokenizer):
    text = "the cat sat on the mat " * 100_000 + "x" * 1_500_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    documents, _ = read(tmp_path / "a.jsonl")
    pieces = list(tokenize(documents, tokenizer, END, batch_characters=1))
    decoded = [tokenizer.decode(piece[piece != END].tolist()) for piece in pieces]
    assert "".join(decoded) == text
    assert max(map(len, decoded)) <= 1 << 20


def test_truncation_and_padding_settings_are_ignored_and_kept(tokenizer):
    limited = Tokenizer.from_str(tokenizer.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    corpus = ["the cat sat on the mat", "x"]
    assert ids_of(text_documents(corpus), limited) == ids_of(text_documents(corpus), tokenizer)
    assert limited.truncation["max_length"] == 2


def test_vocabulary_reaches_past_the_highest_id():
    unknown = "a"
    assert vocabulary_size(Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token=unknown))) == 10
    assert vocabulary_size(Tokenizer(models.BPE())) == 0


def test_standard_library_sources_are_text_without_tests():
    found = sources()
    assert {"json", "typing.py"} <= {path.name if path.suffix else path for path in found} | {
        path.parent.name for path in found
    }
    assert not [path for path in found if {"test", "tests", "site-packages", "idlelib"} & set(path.parts)]
    assert all(path.suffix == ".py" for path in found)
    assert 5e6 < sum(path.stat().st_size for path in found) < 50e6


# --- the commands


def run(*arguments):
    return CliRunner().invoke(stores.table, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def corpus(tmp_path, tokenizer):
    """Return a folder with a tokenizer, its settings, and two documents, one of them a chat."""
    save_as_a_models(tokenizer, tmp_path, eos_token="<|end|>")  # noqa: S106  # a word of the vocabulary, no password
    rows = [{"text": "the cat sat on the mat"}, {"messages": CHAT}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{\n")
    return tmp_path


@pytest.mark.slow
def test_build_info_and_check(corpus):
    out = corpus / "out.trigrams"
    built = run("build", corpus / "a.jsonl", "--out", out, "--model", corpus, "--keep", 3)
    assert "2 documents" in built.output
    assert "Skipped: 1 broken lines" in built.output
    shown = json.loads(run("info", out, "--json").output)
    assert shown["metadata"] == {
        "inputs": ["a.jsonl"], "documents": 2, "tokens": shown["metadata"]["tokens"],
        "distinct_trigrams": shown["metadata"]["distinct_trigrams"], "keep": 3, "eos_token_id": 0,
    }  # fmt: skip
    plain = run("info", out).output
    assert "tokenizer hash" in plain
    assert shown["tokenizer_hash"] in plain
    assert "is sound" in run("check", out).output
    data = bytearray(out.read_bytes())
    data[-1] ^= 1
    out.write_bytes(data)
    with pytest.raises(StoreError, match="does not match its checksum"):
        run("check", out)


def pairs_in(table, tokenizer):
    """Return every bigram of a table, as text."""
    first, second = table.first, table.second
    rows = [(a, int(b)) for a in range(len(first) - 1) for b in second[first[a] : first[a + 1]]]
    return {tokenizer.decode(pair, skip_special_tokens=False) for pair in rows}


def test_build_words_chats_by_the_template_beside_the_tokenizer(corpus, tokenizer):
    (corpus / "chat_template.jinja").write_text(
        "{% for m in messages %}@{{ m.role }}#{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    run("build", corpus / "a.jsonl", "--out", corpus / "t", "--model", corpus)
    pairs = pairs_in(open_table(corpus / "t"), tokenizer)
    assert "?<|end|>" in pairs, "the template's special token is one token"
    assert ".<|end|>" not in pairs, "the document ends there: no second end is appended, and nothing follows"
    (corpus / "chat_template.jinja").write_text("{{ raise_exception('no chats here') }}")
    with pytest.raises(UsageError, match="no chats here"):
        run("build", corpus / "a.jsonl", "--out", corpus / "u", "--model", corpus, "--strict")
    (corpus / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UsageError, match="not a Jinja template"):
        run("build", corpus / "a.jsonl", "--out", corpus / "u", "--model", corpus)


TEMPLATE = "{% for m in messages %}@{{ m.content }}{{ eos_token }}@{% endfor %}"


@pytest.mark.parametrize("template", [None, TEMPLATE, {"default": TEMPLATE, "tools": "x"}])
def test_build_takes_a_models_tokenizer_end_and_template(corpus, tokenizer, template, monkeypatch):
    model_tokenizer = SimpleNamespace(
        backend_tokenizer=tokenizer, eos_token_id=0, chat_template=template,
        special_tokens_map={"eos_token": "<|end|>", "extra_special_tokens": ["<|more|>"]},
    )  # fmt: skip
    loading = SimpleNamespace(load_tokenizer={TOY: model_tokenizer}.get)
    monkeypatch.setitem(sys.modules, "foredraft.model.loading", loading)
    run("build", corpus / "a.jsonl", "--out", corpus / "t", "--model", TOY)
    pairs = pairs_in(open_table(corpus / "t"), tokenizer)
    assert ({"@@", "?<|end|>"} <= pairs) is (template is not None)
    assert ("?\n" in pairs) is (template is None)
    assert table_info(corpus / "t")["metadata"]["eos_token_id"] == 0


def test_build_refuses_a_model_without_a_tokenizer_of_the_library(corpus, monkeypatch):
    loading = SimpleNamespace(load_tokenizer=lambda name: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "foredraft.model.loading", loading)
    with pytest.raises(UsageError, match="not one of the tokenizers library"):
        run("build", corpus / "a.jsonl", "--out", corpus / "t", "--model", TOY)


def test_build_refuses_what_it_cannot_use(corpus, tmp_path):
    arguments = ("build", corpus / "a.jsonl", "--out", corpus / "out")
    with pytest.raises(UsageError, match="There is no folder"):
        run(*arguments, "--model", tmp_path / "empty")
    with pytest.raises(UsageError, match="line 3 is not JSON"):
        run(*arguments, "--model", corpus, "--strict")
    (corpus / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="tokenizer"):
        run(*arguments, "--model", corpus)
    assert not (corpus / "out").exists()


def test_help_does_not_wait_for_pyarrow_or_torch():
    slow = "{'torch', 'transformers', 'pyarrow', 'numba'}"
    code = f"import sys, foredraft.cli.stores; print(sorted({slow} & set(sys.modules)))"
    source = Path(stores.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
