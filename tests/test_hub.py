"""GGUF files by the names that people copy from a hub's page, from a hub on this machine that speaks its protocol."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import gguf_files
from foredraft.errors import UsageError
from foredraft.model.gguf.files import weights_of
from foredraft.model.head_files import trained_head
from foredraft.model.hub import named_gguf
from foredraft.model.loading import load_config, load_tokenizer, located

COMMIT = "a" * 40
QWEN = "some/Qwen3-4B-GGUF"
FILES = [
    "Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf", "Qwen3-4B-IQ2_M.gguf", "Qwen3-4B-UD-IQ2_M.gguf",
    "Qwen3-4B-UD-Q4_K_XL.gguf", "BF16/Qwen3-4B-BF16-00001-of-00002.gguf", "BF16/Qwen3-4B-BF16-00002-of-00002.gguf",
    "mmproj-F16.gguf", "mtp-Qwen3-4B-Q8_0.gguf", "Qwen3-4B.imatrix.gguf", "config.json",
]  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Repositories, name -> file -> content, of a hub that is reached; and the names of the files that it gave."""
    repositories, given = {}, []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.path.partition("?")[0]
            listing = asked.startswith("/api/models/")
            owner, name, *rest = asked.removeprefix("/api/models").strip("/").split("/")
            files = repositories.get(f"{owner}/{name}")
            file = "/".join(rest[2:])  # behind `resolve` and a revision
            found, kind = files is not None and (listing or file in files), "EntryNotFound" if files else "RepoNotFound"
            content = b""
            if found and listing:
                content = json.dumps([{"type": "file", "path": each, "size": 1, "oid": "0"} for each in files]).encode()
            elif found:
                content = files[file]
            self.send_response(200 if found else 404)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            for field, value in (headers if found else {"X-Error-Code": kind}).items():
                self.send_header(field, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
                given.extend([file] if file else [])

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            """Write nothing to the log of the tests."""

    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}.ENDPOINT", address)
        monkeypatch.setattr(
            f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield repositories, given
        server.shutdown()


@pytest.mark.parametrize(("named", "file"), [
    (QWEN, "Qwen3-4B-Q4_K_M.gguf"), (f"hf.co/{QWEN}:q8_0", "Qwen3-4B-Q8_0.gguf"),
    (f"{QWEN}:IQ2_M", "Qwen3-4B-IQ2_M.gguf"), (f"{QWEN}:UD-IQ2_M", "Qwen3-4B-UD-IQ2_M.gguf"),
    (f"{QWEN}:Q4_K_XL", "Qwen3-4B-UD-Q4_K_XL.gguf"),
    (f"{QWEN}:BF16", "BF16/Qwen3-4B-BF16-00001-of-00002.gguf"), (f"{QWEN}:Qwen3-4B-IQ2_M", "Qwen3-4B-IQ2_M.gguf"),
    (f"{QWEN}:mtp-Qwen3-4B-Q8_0", "mtp-Qwen3-4B-Q8_0.gguf"), ("some/only-gguf", "it-mxfp4.gguf"),
])  # fmt: skip
def test_a_file_of_the_hub_is_named_by_its_kind(hub, named, file):
    repositories, given = hub
    repositories |= {QWEN: {name: name.encode() for name in FILES}}
    repositories["some/only-gguf"] = {"it-mxfp4.gguf": b"it-mxfp4.gguf", "mmproj-it.gguf": b""}
    for _ in range(2):
        assert named_gguf(named).read_text() == file
    assert trained_head("eagle3", named, None) == named_gguf(named)
    assert given == [file, *([file.replace("00001-of", "00002-of")] if "of" in file else [])]


@pytest.mark.parametrize(("named", "said"), [
    (f"{QWEN}:Q5_K_M", "has no GGUF files of the kind Q5_K_M; it has .*Qwen3-4B-Q8_0, .*Give one .*GGUF:NAME"),
    ("some/two:Q4_0", "has 2 GGUF files of the kind Q4_0; it has a-Q4_0, b-Q4_0"),
    ("some/two-gguf", "has no GGUF files of the kind Q4_K_M; it has a-Q4_0, b-Q4_0"),
    ("some/config-gguf", "no GGUF files of the kind Q4_K_M. Give"), ("no/such:Q4_0", "no GGUF file no/such:Q4_0"),
])  # fmt: skip
def test_a_name_of_no_file_or_several_is_refused_with_those_there_are(hub, named, said):
    repositories, given = hub
    two = {"a-Q4_0.gguf": b"", "b-Q4_0.gguf": b""}
    repositories |= {QWEN: dict.fromkeys(FILES, b""), "some/two": two, "some/two-gguf": two}
    repositories["some/config-gguf"] = {"config.json": b"{}"}
    with pytest.raises(UsageError, match=said):
        named_gguf(named)
    assert not given


def test_other_names_are_no_gguf_files_of_the_hub(hub):
    assert [named_gguf(name) for name in ("some/model", "model", "some/gguf/model", "smollm2")] == [None] * 4


def test_a_model_of_the_hub_is_downloaded_once_and_needs_no_hub_afterwards(hub, tmp_path, monkeypatch):
    repositories, given = hub
    case = next(case for case in gguf_files.CASES if case.name == "llama")
    content = gguf_files.write(case, tmp_path / "a.gguf").read_bytes()
    repositories["some/tiny"] = {"tiny-F16.gguf": content}
    name = "some/tiny:F16"
    assert load_config(name).model_type == "llama"
    folder = located(name)
    assert weights_of(folder)[0].read_bytes() == content
    assert len(load_tokenizer(name)) > 0
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert located(name) == folder
    assert given == ["tiny-F16.gguf"]
    with pytest.raises(UsageError, match=r"some/tiny:F16 was not downloaded before, and the hub .* cannot be reached"):
        located("some/tiny:F16", revision="v2")
    with pytest.raises(UsageError, match="has no GGUF files of the kind Q8_0; it has tiny-F16"):
        located("some/tiny:Q8_0")
