"""Tokenizers: exact, deterministic, and the same in transformers."""

from __future__ import annotations

import hashlib
import json
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer

from lm_trainer.core import hub
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.hub import hub_unreachable_reason
from lm_trainer.data import load_tokenizer
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.tokenizer import (
    BytesTokenizer,
    HfTokenizer,
    Pretrained,
    Tokenizer,
    TrainedBpe,
    hf,
    tokenizer_config,
    train_bpe,
)
from lm_trainer.data.tokenizer.bytes import CONTENT, ByteTokenizer
from lm_trainer.data.tokenizer.compare import find_difference
from lm_trainer.data.tokenizer.fast import FastTokenizer
from lm_trainer.data.tokenizer.hf import load_pretrained
from lm_trainer.data.tokenizer.token_bytes import token_texts
from tests.conftest import lmt_environment

HARD_TEXTS = [
    "def f(x):\n    return x  # naïve\n\n\n",
    "  leading and trailing  ",
    "日本語 👩‍👩‍👧 \u200f \x00 \r\n\t",
    "<|endoftext|> is text here",
    "a" * 5000,
    "",
]
SMALL = TrainedBpe(vocab_size=512, sample_bytes=300_000)


@pytest.fixture(scope="module")
def trained() -> HfTokenizer:
    return train_bpe(SMALL, Embedded().shards("validation"))


@pytest.fixture(params=["trained", "bytes"])
def tokenizer(request: pytest.FixtureRequest, trained: HfTokenizer) -> Tokenizer:
    return trained if request.param == "trained" else ByteTokenizer()


def test_text_survives_exactly(tokenizer: Tokenizer) -> None:
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [list(ids) for ids in tokenizer.encode_batch(HARD_TEXTS)] == [tokenizer.encode(text) for text in HARD_TEXTS]


def test_names_of_special_tokens_in_text_are_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos_id not in ids
    assert len(ids) > 3
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "a<|endoftext|>b", "special tokens are left out"


def test_transformers_reads_what_is_saved_and_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD_TEXTS:
        if "<|endoftext|>" not in text:
            assert reference(text)["input_ids"] == tokenizer.encode(text)
            assert reference.decode(tokenizer.encode(text)) == text
    assert reference.eos_token_id == tokenizer.eos_id
    assert len(reference) == tokenizer.vocab_size


def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "one")
    loaded = load_tokenizer(tmp_path / "one")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    loaded.save(tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_what_was_there(trained: HfTokenizer, tmp_path: Path, exists: bool) -> None:
    if exists:
        ByteTokenizer().save(tmp_path)
    original = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    try:
        with pytest.raises(MachineError, match=f"cannot write the tokenizer to {tmp_path}: File too large"):
            trained.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == original


def test_pickled_is_the_same(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint() == tokenizer.fingerprint()
    assert copy.encode("x<|endoftext|>") == tokenizer.encode("x<|endoftext|>")


def test_bytes_are_their_own_ids_and_tokenizer_json_agrees() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
    assert tokenizer.encode("aé") == list("aé".encode())
    reference = RustTokenizer.from_str(CONTENT)
    every_byte = "".join(map(chr, range(0x250))) + "\U0001f600"
    assert reference.encode(every_byte).ids == tokenizer.encode(every_byte)


def test_training_gives_the_wanted_vocabulary_with_eos_at_0(trained: HfTokenizer) -> None:
    assert trained.vocab_size == 512
    assert trained.eos_id == 0
    assert trained.bos_id is None
    text = "    def __init__(self, name):\n        self.name = name\n"
    assert len(trained.encode(text)) < 0.7 * len(text)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_training_does_not_depend_on_threads_or_the_process(trained: HfTokenizer, threads: int) -> None:
    program = (
        "import hashlib\n"
        "from lm_trainer.data.sources.embedded import Embedded\n"
        "from lm_trainer.data.tokenizer import TrainedBpe, train_bpe\n"
        f"tokenizer = train_bpe(TrainedBpe.model_validate({SMALL.model_dump()}), Embedded().shards('validation'))\n"
        "print(hashlib.sha256(tokenizer.files()['tokenizer.json']).hexdigest())"
    )
    expected = hashlib.sha256(trained.files()["tokenizer.json"]).hexdigest()
    # This process has trained it by one thread, and with a hash seed of its own.
    settings = {"RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    env = lmt_environment(env=settings)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_little_text_gives_fewer_tokens(tmp_path: Path) -> None:
    from lm_trainer.data.sources import list_shards

    (tmp_path / "a.txt").write_text("hello hello hello")
    tokenizer = train_bpe(TrainedBpe(vocab_size=4096), list_shards("train", [str(tmp_path / "a.txt")], "text"))
    assert 257 <= tokenizer.vocab_size < 300
    assert tokenizer.decode(tokenizer.encode("hello wörld")) == "hello wörld"


def test_short_forms() -> None:
    assert tokenizer_config(None) == TrainedBpe()
    assert tokenizer_config("bytes") == BytesTokenizer()
    assert tokenizer_config("org/name") == Pretrained(name="org/name")
    assert tokenizer_config(SMALL) == SMALL


class TestPretrained:
    @pytest.fixture
    def directory(self, trained: HfTokenizer, tmp_path: Path) -> Path:
        trained.save(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    def change(self, directory: Path, file: str, **values: object) -> None:
        settings = json.loads((directory / file).read_text()) | values
        (directory / file).write_text(json.dumps(settings))

    def test_a_directory_or_its_file(self, directory: Path, trained: HfTokenizer) -> None:
        for name in (directory, directory / "tokenizer.json"):
            assert load_pretrained(Pretrained(name=str(name))).fingerprint() == trained.fingerprint()

    def test_a_saved_reference_tokenizer_gives_its_ids(self, directory: Path, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        reference = transformers.AutoTokenizer.from_pretrained(directory)
        reference.save_pretrained(tmp_path / "again")
        reloaded = load_pretrained(Pretrained(name=str(tmp_path / "again")))
        assert [reloaded.encode(text) for text in HARD_TEXTS[:3]] == [
            reference(text)["input_ids"] for text in HARD_TEXTS[:3]
        ]
        assert reloaded.eos_id == reference.eos_token_id

    def test_bos_is_what_the_tokenizer_puts_in_front(self, directory: Path) -> None:
        first = {"SpecialToken": {"id": "!", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        bos_id = RustTokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("!")
        template = {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text],
            "special_tokens": {"!": {"id": "!", "ids": [bos_id], "tokens": ["!"]}},
        }
        self.change(directory, "tokenizer.json", post_processor=template)
        tokenizer = load_pretrained(Pretrained(name=str(directory)))
        assert tokenizer.bos_id == bos_id
        assert bos_id not in tokenizer.encode("a")

    @pytest.mark.parametrize("backend", [HfTokenizer, FastTokenizer])
    def test_chance_is_off(
        self, directory: Path, trained: HfTokenizer, backend: type[HfTokenizer], caplog: pytest.LogCaptureFixture
    ) -> None:
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["dropout"] = 0.5
        (directory / "tokenizer.json").write_text(json.dumps(content))
        drawn = RustTokenizer.from_file(str(directory / "tokenizer.json"))
        assert len({tuple(drawn.encode(HARD_TEXTS[0]).ids) for _ in range(20)}) > 1
        pytest.importorskip(backend.package or "")
        tokenizer = load_pretrained(Pretrained(name=str(directory))).with_backend(backend)
        assert "tokenizer.json says model.dropout: 0.5" in caplog.text
        for text in HARD_TEXTS[:3]:
            expected = trained.encode(text)
            for _ in range(5):
                assert tokenizer.encode(text) == tokenizer.encode_template(text)[0] == expected
                assert list(tokenizer.encode_batch([text])[0]) == expected
        assert find_difference(tokenizer, directory) is find_difference(trained, directory) is None

    def test_chance_is_off_in_what_is_saved(self, directory: Path, tmp_path: Path, trained: HfTokenizer) -> None:
        transformers = pytest.importorskip("transformers")
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["dropout"] = 0.1
        (directory / "tokenizer.json").write_text(json.dumps(content))
        self.change(directory, "tokenizer_config.json", sp_model_kwargs={"enable_sampling": True, "alpha": 0.1})
        load_tokenizer(directory).save(tmp_path / "again")
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
        for _ in range(5):
            assert reference(HARD_TEXTS[0])["input_ids"] == trained.encode(HARD_TEXTS[0])
        assert json.loads((tmp_path / "again/tokenizer_config.json").read_text())["sp_model_kwargs"] == {}

    def test_chance_whose_key_is_spelt_with_escapes_is_refused(self, directory: Path) -> None:
        text = (directory / "tokenizer.json").read_text()
        assert '"dropout": null' in text
        (directory / "tokenizer.json").write_text(text.replace('"dropout": null', r'"dr\u006fpout": 0.5'))
        with pytest.raises(UserError, match=r"model\.dropout is set, by which one text becomes other tokens each time"):
            load_tokenizer(directory)

    @pytest.mark.parametrize("dropout", [None, 0, 0.0, 1.0])
    def test_a_file_without_chance_stays_as_it_is(self, directory: Path, dropout: float | None) -> None:
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["dropout"] = dropout
        text = json.dumps(content)
        (directory / "tokenizer.json").write_text(text)
        assert load_tokenizer(directory).files()["tokenizer.json"] == text.encode()

    def test_texts_are_neither_cut_short_nor_filled_up(self, directory: Path, trained: HfTokenizer) -> None:
        rust = RustTokenizer.from_file(str(directory / "tokenizer.json"))
        rust.enable_truncation(2)
        rust.enable_padding(length=9, pad_id=0, pad_token="<|endoftext|>")
        rust.save(str(directory / "tokenizer.json"))
        tokenizer = load_tokenizer(directory)
        for text in HARD_TEXTS[:3]:
            assert tokenizer.encode(text) == tokenizer.encode_template(text)[0] == trained.encode(text)
        assert token_texts(tokenizer) == token_texts(trained)

    def test_eos_may_be_chosen(self, directory: Path) -> None:
        (directory / "tokenizer_config.json").unlink()
        assert load_pretrained(Pretrained(name=str(directory))).eos_id == 0, "<|endoftext|> is a usual name"
        with pytest.raises(UserError, match="'</s>' is not in its vocabulary"):
            load_pretrained(Pretrained(name=str(directory), eos_token="</s>"))

    def test_eos_must_not_come_from_text(self, directory: Path) -> None:
        with pytest.raises(UserError, match="the text '!' inside a document"):
            load_pretrained(Pretrained(name=str(directory), eos_token="!"))

    def test_an_unnamed_eos_is_asked_for(self, directory: Path) -> None:
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["vocab"]["<other>"] = content["model"]["vocab"].pop("<|endoftext|>")
        content["added_tokens"][0]["content"] = "<other>"
        (directory / "tokenizer.json").write_text(json.dumps(content))
        (directory / "tokenizer_config.json").write_text("{}")
        with pytest.raises(UserError, match="names no eos_token; choose"):
            load_pretrained(Pretrained(name=str(directory)))

    def test_what_is_missing_or_damaged_is_named(self, directory: Path, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no file or directory .*tokenizr; did you mean .*tokenizer\?"):
            load_pretrained(Pretrained(name=str(tmp_path / "tokenizr")))
        (directory / "tokenizer_config.json").write_text("{,}")
        with pytest.raises(UserError, match=r"tokenizer_config\.json:1: not JSON"):
            load_pretrained(Pretrained(name=str(directory)))
        (directory / "tokenizer_config.json").write_text("{}")
        (directory / "tokenizer.json").write_text('{"version": "1.0"}')
        with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
            load_pretrained(Pretrained(name=str(directory)))
        (directory / "tokenizer.json").unlink()
        with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
            load_pretrained(Pretrained(name=str(directory)))

    def test_an_unreachable_hub_is_named(self) -> None:
        with pytest.raises(UserError, match="'org/name' is neither a file or directory here nor in the hub's cache"):
            load_pretrained(Pretrained(name="org/name"))

    def test_a_hub_without_network_is_given_up_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        started = time.monotonic()
        with pytest.raises(UserError, match=r"hub\.invalid cannot be reached") as refused:
            load_pretrained(Pretrained(name="org/name"))
        # The client itself tries for half a minute.
        assert time.monotonic() - started < 10
        assert "\n" not in str(refused.value)

    def test_only_a_hub_that_was_reached_is_not_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
            assert "cannot be reached" in str(hub_unreachable_reason())
            server.listen()
            # Several parts of one start get one answer.
            assert hub_unreachable_reason() is not None
            monkeypatch.setattr(hub.time, "monotonic", lambda clock=time.monotonic: clock() + 60)
            assert hub_unreachable_reason() is None
        assert hub_unreachable_reason() is None

    def test_a_hub_name(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        requests = []

        def download(repository: str, name: str, revision: str | None) -> str:
            requests.append((repository, name, revision))
            if not (directory / name).exists():
                raise LocalEntryNotFoundError(name)
            return str(directory / name)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(hf, "hub_unreachable_reason", lambda: None)
        tokenizer = load_pretrained(Pretrained(name="org/name", revision="v1"))
        assert tokenizer.eos_id == 0
        assert ("org/name", "tokenizer.json", "v1") in requests
        (directory / "tokenizer_config.json").unlink()
        with pytest.raises(UserError, match=r"LocalEntryNotFoundError: tokenizer_config\.json"):
            load_pretrained(Pretrained(name="org/name", revision="v1"))
