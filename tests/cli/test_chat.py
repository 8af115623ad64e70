"""`lmt chat` as a person types it, beside what transformers generates of the same conversation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lm_trainer.core.terminal import escape_for_terminal
from tests.conftest import Lmt, refused

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def talker(hf_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    out = tmp_path_factory.mktemp("talker")
    for file in hf_model.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return out


def chat(model: Path, lines: list[str], *options: str) -> str:
    from cli.main import app

    result = CliRunner().invoke(app, ["chat", str(model), *options], input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_answers_are_those_of_transformers(talker: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(talker)
    model = transformers.AutoModelForCausalLM.from_pretrained(talker)
    messages = [{"role": "system", "content": "Be brief."}]
    expected = []
    for text in ("Hi", "And?"):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        new = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=7, eos_token_id=256, pad_token_id=256
        )[0, len(ids) :].tolist()
        answer = bytes(i for i in new if i < 256).decode("utf-8", "replace")
        messages.append({"role": "assistant", "content": answer})
        expected.append(escape_for_terminal(answer))
    options = ("--system", "Be brief.", "--temperature", "0", "--max-new-tokens", "7")
    shown = chat(talker, ["Hi", "", "And?"], *options)
    assert shown.startswith(f"{expected[0]}\n{expected[1]}\n")
    # Without the first turn, the second question is another one.
    after_reset = chat(talker, ["Hi", "/reset", "Hi", "/nothing", "/quit", "unread"], *options)
    assert (
        after_reset
        == f"{expected[0]}\n(a new conversation)\n{expected[0]}\n(there is no /nothing; there are /reset and /quit)\n"
    )


def test_a_conversation_that_is_too_long_goes_on_after_a_reset(talker: Path) -> None:
    shown = chat(talker, ["x" * 120, "/reset", "Hi"], "--temperature", "0", "--max-new-tokens", "2")
    assert "but the model reads 128; begin anew with /reset)" in shown
    assert len(shown.splitlines()) >= 3


@pytest.mark.slow
def test_generate_answers_questions_as_a_chat_does(lmt: Lmt, talker: Path) -> None:
    settings = ("--temperature", "0", "--max-new-tokens", "7")
    shown = chat(talker, ["Hi", "/reset", "And?"], *settings)
    answers = shown.removesuffix("\n\n").split("\n(a new conversation)\n")
    options = ("generate", talker, "--apply-chat-template", "--prompt", "Hi", *settings)
    assert lmt(*options).stdout == f"{answers[0]}\n"
    assert lmt(*options, "--prompt", "And?").stdout == f"{answers[0]}\n\n---\n{answers[1]}\n"
    sample = json.loads(lmt(*options, "--json").stdout)
    assert (sample["prompt"], escape_for_terminal(sample["text"])) == ("Hi", answers[0])
    refused(lmt("generate", talker, "--apply-chat-template"), "nothing to answer; write --prompt or --prompt-file")


@pytest.mark.parametrize("command", [("chat",), ("generate", "--apply-chat-template", "--prompt", "Hi")])
def test_a_model_without_a_template_is_refused(command: tuple[str, ...], lmt: Lmt, hf_model: Path) -> None:
    refused(lmt(*command, str(hf_model)), "no chat template")
