"""Questions as tasks ask them: the same texts and ids, to the byte, as of the harness's own model for transformers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer import HfTokenizer, load_tokenizer
from lm_trainer.harness.chat import TaskTemplate
from tests.conftest import MakeHfModel
from tests.data.test_formats import with_specials
from tests.export.test_carried import LLAMA

pytest.importorskip("lm_eval")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    # Llama 3's: it begins with a token, trims what is said, and names the day.
    "trimming": (
        "{{ bos_token }}{% if strftime_now is defined %}<|im_start|>Today: {{ strftime_now('%d %b %Y') }}\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
    ),
    # Gemma's.
    "without system": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turn') }}{% endif %}"
        "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
        "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # With marks of the assistant's words, a null that is written out, and conditions on what is said.
    "marked": (
        "{{ none }}{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content.split('<|im_end|>')[-1] }}{% endif %}{{ '\\n' }}"
        "{% endfor %}{{ 'A:' if add_generation_prompt else '' }}"
    ),
}
DOCUMENTS = [
    {"q": f"What is {n} and {n}?\n", "choices": [str(n), f"{2 * n}", " <|im_end|>"], "label": 1, "begin": f"It is {n}"}
    for n in range(1, 7)
]
KINDS: dict[str, dict[str, Any]] = {
    "multiple_choice": {"doc_to_choice": "choices", "doc_to_target": "label"},
    "generate_until": {"doc_to_target": "{{choices[label]}}", "generation_kwargs": {"until": ["\n"]}},
    "loglikelihood": {"doc_to_target": "{{choices[label]}}"},
    "loglikelihood_rolling": {"doc_to_target": "{{q}}"},
}
PREFIXES = (None, "Answer:", "The answer is ", "```python\ndef", "{{begin}}")
DESCRIPTIONS = (None, "Questions about {{begin}}.\n\n")


SPECIALS = tuple(f"<s{number}>" for number in range(42))


@pytest.mark.slow
def test_answers_end_where_those_of_the_harness_do(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface

    from lm_trainer.export.huggingface import read_hf
    from lm_trainer.harness.model import HarnessModel

    # With a head of its own: a tied one repeats the last token.
    base = make_hf_model("Llama", **{**LLAMA, "vocab_size": 299, "bos_token_id": None, "eos_token_id": 256})
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    with_specials(*SPECIALS).save(tmp_path)
    peer: Any = huggingface.HFLM
    model = read_hf(tmp_path).build()

    def ask(until: list[str], ends: list[int], **generation: Any) -> tuple[list[str], list[str]]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, **generation}))
        settings: Any = {"until": until, "max_gen_toks": 40, "do_sample": False}
        texts = [f"def f{number}(" for number in range(12)]
        instances = [Instance("generate_until", {}, (text, settings), 0) for text in texts]
        read = read_hf(tmp_path)
        our_answers = HarnessModel(model, read.tokenizer, settings=read.settings).generate_until(instances)
        reference = peer(pretrained=str(tmp_path), batch_size=1, dtype="float32", device="cpu")
        return our_answers, reference.generate_until(instances)

    free, expected = ask([], [256])
    assert free == expected
    # Special tokens and bytes that end texts, by the task and by the model.
    answers, expected = ask([*SPECIALS[:20], "\x03"], [256])
    assert answers == expected
    assert sum(map(len, answers)) < sum(map(len, free)) - 20
    answers, expected = ask(["\x03"], [256, *range(40, 60), *range(280, 299)])
    assert answers == expected
    assert sum(map(len, answers)) < sum(map(len, free)) - 20
    answers, expected = ask([], [256], repetition_penalty=1.4)
    assert answers == expected
    assert answers != free


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Every kind of task, with and without a description and the beginning of an answer."""
    import datasets.config
    from lm_eval.tasks import TaskManager

    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for kind, settings in KINDS.items():
        for number, (prefix, description) in enumerate((p, d) for p in PREFIXES for d in DESCRIPTIONS):
            task: dict[str, Any] = {
                "task": f"{kind}_{number}",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
                "fewshot_split": "test",
                "output_type": kind,
                "doc_to_text": "{{q}}",
                **settings,
            }
            if prefix is not None:
                task["gen_prefix"] = prefix
            if description is not None:
                task["description"] = description
            (directory / f"{task['task']}.yaml").write_text(json.dumps(task))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(directory / "cache"))
        manager = TaskManager(include_path=str(directory), include_defaults=False)
        yield [manager.load([name])["tasks"][name] for name in sorted(manager.all_tasks)]


def harness_peer(directory: Path) -> Any:
    """The harness's model for transformers, with a tokenizer and no model."""
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    peer: Any = HFLM.__new__(HFLM)
    peer.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    peer.chat_template_args, peer.custom_prefix_token_id, peer.add_bos_token = {}, None, None
    return peer


def tokenizer(directory: Path, template: str) -> HfTokenizer:
    saved = with_specials("<|im_start|>", "<|im_end|>", "<bos>", chat_template=template)
    saved.save(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<bos>"}))
    return load_tokenizer(directory)


def requests(task: Any, write: Callable[..., str], examples: int, **options: Any) -> list[Any]:
    task.set_config(key="num_fewshot", value=examples)
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(limit=2, apply_chat_template=True, chat_template=write, **options)
    return [instance.args for instance in task.instances]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["chatml", *(pytest.param(name, marks=pytest.mark.slow) for name in TEMPLATES if name != "chatml")]
)
def test_every_kind_of_task_asks_the_same(name: str, tasks: list[Any], tmp_path: Path) -> None:
    template, peer = TaskTemplate(tokenizer(tmp_path, TEMPLATES[name])), harness_peer(tmp_path)
    count = 0
    for task in tasks:
        for examples, multiturn, system in ((2, True, "Be brief."), (1, False, None)):
            options: dict[str, Any] = {"fewshot_as_multiturn": multiturn, "system_instruction": system}
            expected = requests(task, peer.apply_chat_template, examples, **options)
            assert requests(task, template.format_messages, examples, **options) == expected
            count += len(expected)
    assert count > 200


@pytest.mark.parametrize("around", [("<bos>", ""), ("<bos>", "<|im_end|>"), ("", "<|im_end|>"), ("", "")])
def test_texts_have_the_ids_that_the_harness_gives_them(around: tuple[str, str], tmp_path: Path) -> None:
    from lm_trainer.harness.model import HarnessModel

    tokenizer(tmp_path, CHATML)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    prefix, suffix = ([{"SpecialToken": {"id": name, "type_id": 0}}] if name else [] for name in around)
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*prefix, {"Sequence": {"id": "A", "type_id": 0}}, *suffix],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in around if name},
    }
    file.write_text(json.dumps(content))
    model: Any = SimpleNamespace(spec=SimpleNamespace(num_positions=64))
    harness_model, peer = HarnessModel(model, load_tokenizer(tmp_path)), harness_peer(tmp_path)
    assert harness_model.prefix_token_id == peer.prefix_token_id
    assert harness_model.eot_token_id == peer.eot_token_id
    texts = ["", "a", "<bos>a", "a<bos>", "<|im_start|>user\n b<|im_end|>", "<|endoftext|>c", " d ", "\n"]
    for text in texts:
        for add in (None, True, False):
            assert harness_model.tok_encode(text, add) == peer.tok_encode(text, add), (text, add)
    for context, answer in itertools.product(texts[1:], texts[1:]):
        assert harness_model._encode_pair(context, answer) == peer._encode_pair(context, answer), (context, answer)


@pytest.mark.parametrize("older", [True, False])
def test_tokens_that_another_file_names_are_those_of_transformers(older: bool, tmp_path: Path) -> None:
    """special_tokens_map.json names the tokens of older tokenizers, whose settings do not list all tokens."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ messages[0].content }}"
    tokenizer(tmp_path, template)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    if not older:
        end = {"content": "<|endoftext|>", "special": True}
        settings |= {"added_tokens_decoder": {"256": end}, "eos_token": "<|endoftext|>", "bos_token": "<bos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    named = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "unk_token": "<bos>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    ours, peer, messages = load_tokenizer(tmp_path), harness_peer(tmp_path), [{"role": "user", "content": "a"}]
    assert TaskTemplate(ours).format_messages(messages, add_generation_prompt=True) == peer.apply_chat_template(
        messages
    )
    assert ours.eos_id == peer.tokenizer.eos_token_id
    ours.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").eos_id == harness_peer(tmp_path / "again").tokenizer.eos_token_id


def test_an_answer_that_is_begun_stays_open(tmp_path: Path) -> None:
    template = TaskTemplate(tokenizer(tmp_path, CHATML))
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is "}]
    expected = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nIt is "
    assert template.format_messages(messages, add_generation_prompt=False) == expected


def test_what_a_template_does_not_take_is_told(tmp_path: Path) -> None:
    silent = TaskTemplate(tokenizer(tmp_path, "{{ messages[0].content }}"))
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="leaves the beginning of an answer away, which a task gives: 'b'"):
        silent.format_messages(begun, add_generation_prompt=False)
    refusing = TaskTemplate(tokenizer(tmp_path, "{{ raise_exception('never') }}"))
    with pytest.raises(UserError, match="does not take a question: never"):
        refusing.format_messages(begun, add_generation_prompt=True)
    failing = TaskTemplate(tokenizer(tmp_path, "{{ 1 / 0 }}"))
    with pytest.raises(UserError, match="fails at a question: division by zero"):
        failing.format_messages(begun, add_generation_prompt=True)
    with pytest.raises(UserError, match="the chat template of the model's tokenizer is wrong"):
        TaskTemplate(tokenizer(tmp_path, "{% if %}"))


def test_draws_are_from_the_tokens_that_transformers_draws_from(tmp_path: Path) -> None:
    from lm_trainer.export.settings import HfSettings
    from lm_trainer.harness.model import HarnessModel

    transformers = pytest.importorskip("transformers")
    hf_tokenizer = tokenizer(tmp_path, CHATML)
    model: Any = SimpleNamespace(spec=SimpleNamespace(num_positions=64))
    defaults = transformers.GenerationConfig._get_default_generation_params()
    plain = HarnessModel(model, hf_tokenizer)
    for name in ("top_k", "top_p", "repetition_penalty"):
        assert plain._generation_setting(name, {}) == defaults[name]
        configured = HarnessModel(
            model, hf_tokenizer, settings=HfSettings({}, {name: 0.5, "num_beams": 4, "min_p": 0.0})
        )
        assert configured._generation_setting(name, {}) == 0.5
        assert configured._generation_setting(name, {name: 0.25}) == 0.25
        assert "asks for num_beams=4, by which" in str(configured._generation_note)
