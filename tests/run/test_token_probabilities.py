"""Probabilities of tokens at each evaluation, their file and their page."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.run.weights.open_model import open_model
from lm_trainer.trackers.token_page import (
    FILE,
    MAX_STEPS,
    PAGE,
    TokenFile,
    TokenHistory,
    TokenScores,
    render_token_page,
)
from tests.browser import needs_browser, render
from tests.conftest import Lmt, refused, run_here

CONFIG = """
model: {type: llama, hidden_dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, intermediate_dim: 64, seq_len: 32}
data: {tokenizer: bytes, train_urls: [train.txt], validation_urls: [held.jsonl]}
optimizer: {learning_rate: 3e-3, warmup: 0}
trainer: {num_train_steps: 4, steps_per_eval: 2, train_batch_size: 8, elastic_shards: 8, sample_tokens: 0,
          tracker: [], max_devices: 1}
"""
TEXTS = ["short", "a document with </script><b>markup</b> in it", "another document, longer than a row of the model is"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all tests here, with the run `a` on one device, which no test changes."""
    root = tmp_path_factory.mktemp("tokens")
    (root / "run.yaml").write_text(CONFIG)
    (root / "train.txt").write_text("some text to train on, and some more of it.\n" * 30)
    (root / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        train_run(run_here, "a")
    return root


@pytest.fixture
def lmt(root: Path, monkeypatch: pytest.MonkeyPatch) -> Lmt:
    monkeypatch.chdir(root)
    return run_here


def train_run(lmt: Lmt, name: str, *overrides: str) -> TokenHistory:
    result = lmt("train", "run.yaml", f"trainer.id={name}", *overrides)
    assert result.returncode == 0, result.stderr
    return TokenHistory.read(Path("logs") / name)


def page_data(page: str) -> dict[str, Any]:
    """Reads the element of the page that holds the data, as a browser does."""

    class Parser(html.parser.HTMLParser):
        inside = False
        content = ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.inside = tag == "script" and ("id", "data") in attrs

        def handle_endtag(self, tag: str) -> None:
            self.inside = False

        def handle_data(self, data: str) -> None:
            if self.inside:
                self.content += data

    parser = Parser()
    parser.feed(page)
    return json.loads(parser.content)


def test_probabilities_are_those_of_the_model(lmt: Lmt) -> None:
    history = TokenHistory.read(Path("logs/a"))
    # Of documents that are long enough, as many tokens as the model reads at once, and one.
    assert history.documents == [[*TEXTS[1].encode()][:33], [*TEXTS[2].encode()][:33]]
    assert sorted(history.steps) == [2, 4]
    model = jax.jit(open_model("a", devices=jax.local_devices()[:1]).build())
    for ids, scored in zip(history.documents, history.steps[4], strict=True):
        row = jnp.array([ids[:-1]])
        logits = np.asarray(model(row, jnp.arange(row.size)[None], jnp.zeros_like(row)), np.float64)[0]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = log_p[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(np.array(scored.nll_S) / 100, -chosen, atol=0.006)
        np.testing.assert_array_equal(scored.rank_S, (log_p > chosen[:, None]).sum(-1))
        best = np.argsort(-log_p, axis=-1, kind="stable")[:, :3]
        np.testing.assert_array_equal([[index for index, _ in top] for top in scored.top_SK], best)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        (),
        pytest.param(("trainer.determinism=layerwise",), marks=pytest.mark.slow),
        pytest.param(("trainer.context_axis_size=2",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_devices_change_nothing(lmt: Lmt, setting: tuple[str, ...]) -> None:
    few, many = "a", "many"
    if setting:
        few, many = (f"{name}-{setting[0].partition('=')[2]}" for name in ("few", "many"))
        train_run(lmt, few, "trainer.max_devices=2", *setting)
    assert train_run(lmt, many, "trainer.max_devices=4", *setting) == TokenHistory.read(Path("logs") / few)
    assert (Path("logs") / few / FILE).read_bytes() == (Path("logs") / many / FILE).read_bytes()


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_file_and_a_page_has_two_runs(lmt: Lmt, tmp_path: Path) -> None:
    uninterrupted = TokenHistory.read(Path("logs/a"))
    train_run(lmt, "b", "trainer.num_train_steps=2", "optimizer.lr_schedule=constant", "trainer.checkpointer.keep=[]")
    page = (Path("logs/a") / PAGE).read_text()
    data = page_data(page)
    assert [entry["step"] for entry in data["runs"][0]["steps"]] == [2, 4]
    assert "".join(data["tokens"][str(index)] for index in data["documents"][0]["ids"]) == TEXTS[1][:33]
    assert "</script><b>" not in page
    result = lmt("tokens", "a", "b", "--out", "both.html")
    assert result.returncode == 0, result.stderr
    comparison = page_data(Path("both.html").read_text())
    assert [run["name"] for run in comparison["runs"]] == ["a", "b"]
    assert len(comparison["runs"][1]["steps"]) == 1
    # What a killed attempt left at the end is read as far as it is whole, and done again.
    lines = (Path("logs/a") / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text("".join(lines) + lines[-1][:100])
    assert TokenHistory.read(tmp_path) == uninterrupted


@pytest.mark.slow
def test_no_documents_no_file(lmt: Lmt) -> None:
    short = ("trainer.num_train_steps=2", "trainer.token_probabilities=0")
    assert lmt("train", "run.yaml", "trainer.id=none", *short).returncode == 0
    assert not (Path("logs/none") / FILE).exists()
    refused(lmt("tokens", "none"), "trainer.token_probabilities")


def random_scores(seed: int, length: int) -> TokenScores:
    rng = np.random.default_rng(seed)
    top = rng.integers(0, 9, (length, 3))
    return TokenScores.from_outputs(
        rng.exponential(3, length), rng.integers(0, 9, length), top, rng.exponential(2, (length, 3))
    )


def test_a_page_has_few_steps_of_many_and_refuses_other_documents(tmp_path: Path) -> None:
    file = TokenFile(tmp_path, [[1, 2, 3, 4]], str)
    for step in range(1, 500):
        file.add(step, [random_scores(step, 3)])
    steps = [entry["step"] for entry in page_data(render_token_page({"x": file.history}))["runs"][0]["steps"]]
    assert (steps[0], steps[-1], len(steps)) == (1, 499, MAX_STEPS)
    # A step that is done again takes the place of those after it.
    file.add(250, [random_scores(0, 3)])
    assert max(TokenHistory.read(tmp_path).steps) == 250
    other = TokenHistory([[1, 2]], {1: "a", 2: "b"}, {1: [random_scores(1, 1)]})
    with pytest.raises(UserError, match="other documents"):
        render_token_page({"x": file.history, "y": other})


@needs_browser
@pytest.mark.slow
def test_a_browser_draws_every_token(tmp_path: Path) -> None:
    tokens = {1: "<i>", 2: "\n", 3: "c", 4: "d", **{n: str(n) for n in range(9) if n not in range(1, 5)}}
    history = TokenHistory([[1, 2, 3, 4]], tokens, {step: [random_scores(step, 3)] for step in (1, 2)})
    document = render(render_token_page({"one": history, "two": history}), tmp_path)
    body = document.partition("<main>")[2].partition("</main>")[0]
    assert body.count("<section>") == 2
    assert body.count("background: rgb(") == 2 * 3
    assert "&lt;i&gt;" in body


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    texts = {1: "a", 2: "\u2028", 3: "\x85\n", 4: "\u0436"}
    scored = [TokenScores([1, 2], [0, 1], [[(1, 5)], [(4, 6)]])]
    file = TokenFile(tmp_path, [[1, 2, 3]], texts.__getitem__)
    file.add(1, scored)
    file.add(2, scored)
    path = tmp_path / FILE
    content = path.read_bytes()
    assert TokenHistory.read(tmp_path) == TokenHistory([[1, 2, 3]], texts, {1: scored, 2: scored})
    cuts = {0, 1, 10, len(content) - 1, *range(1, len(content), 7)}
    for length in sorted(cuts):
        path.write_bytes(content[:length])
        # As a run that is resumed does.
        reopened = TokenFile(tmp_path, [[1, 2, 3]], texts.__getitem__)
        reopened.add(2, scored)
        reopened.add(3, scored)
        history = TokenHistory.read(tmp_path)
        assert history == reopened.history, length
        assert {2, 3} <= history.steps.keys(), length
        assert history.tokens == texts, length
    # Files that hold their characters as they are, cut off inside one.
    plain = json.dumps({"documents": [[1, 4]], "tokens": {"1": "a", "4": "\u0436"}}, ensure_ascii=False).encode()
    path.write_bytes(plain[: plain.index("\u0436".encode()) + 1])
    assert TokenHistory.read(tmp_path).documents == []
