"""`lmt generate`: text from a trained or an imported model."""

import itertools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import clean
from cli.common import CheckpointOption, ModelArgument, path_option, print_generation_note
from cli.trace import DataTrace
from lm_trainer.core.errors import UserError


def generate(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to continue; repeatable.", show_default="the start of a document"),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, path_option(metavar="FILE", help="File with one prompt, - for stdin; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the K most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Sample from the most likely tokens whose probabilities sum to P (nucleus sampling)."
        ),
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End a continuation before this text; repeatable.", show_default=False),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", help="Format each prompt with the tokenizer's chat template, and answer it."
        ),
    ] = False,
    num_samples: Annotated[int, typer.Option(metavar="N", help="Continuations per prompt.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed; the same seed gives the same text.")] = 0,
    devices: Annotated[
        int, typer.Option(metavar="N", help="Shard the model over the first N devices.", show_default="all")
    ] = 0,
    step: CheckpointOption = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: add the log-probability of every new token, in nats.")
    ] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Report the longest generated spans that occur verbatim in the data of the run."),
    ] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per continuation.")] = False,
) -> None:
    """Continue prompts with a model.

    Prints each prompt with its continuation. A single continuation is streamed. A continuation ends at the model's
    end-of-document token, before a --stop text, after --max-new-tokens, or when the context is full. With several
    devices, each holds a shard of the model, and their number affects the last digits of the probabilities. With
    --apply-chat-template each prompt is a message of the user, and only the answers are printed.

    For example:

        lmt generate my-run --prompt "def main" --temperature 0

        lmt generate my-run --prompt-file story.txt --num-samples 3 --top-p 0.95

        lmt generate path/to/hf-model --prompt "Once upon a time" --json

        lmt generate my-run --prompt "import " --trace

        lmt generate path/to/chat-model --prompt "What is a prime?" --apply-chat-template
    """
    from lm_trainer.core.runtime import configure_jax, prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()
    import dataclasses

    from lm_trainer.core.terminal import json_line
    from lm_trainer.generate.text import Sampling, continue_prompts, encode_prompts, read_prompts, stream_text
    from lm_trainer.run.weights.open_model import local_devices, open_model

    # Reads programs that an earlier call compiled. Compilation is most of the time to the first token.
    configure_jax({}, None)
    # Both are checked before the model is loaded, which takes longer.
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        log_probs=logprobs,
    )
    if logprobs and not json_lines:
        raise UserError("--logprobs: log probabilities are a part of --json; write it as well")
    texts = read_prompts(prompt or [], prompt_file or [])
    if chat and not (prompt or prompt_file):
        raise UserError("--apply-chat-template: there is nothing to answer; write --prompt or --prompt-file")
    data = DataTrace(model) if trace else None
    chosen = local_devices(devices)
    source = open_model(model, step=step, devices=chosen)
    print_generation_note(source)
    prompts = encode_prompts(source, texts, chat=chat)
    if len(texts) == num_samples == 1 and not json_lines and data is None:
        pieces = stream_text(source, prompts, sampling, stop=stop or (), devices=chosen)
        first = next(pieces, "")
        for piece in itertools.chain([first if chat else texts[0] + first], pieces):
            clean.echo(piece, nl=False)
            sys.stdout.flush()
        clean.echo()
        return
    samples = continue_prompts(source, prompts, sampling, num_samples=num_samples, stop=stop or (), devices=chosen)
    for index, sample in enumerate(samples):
        if json_lines:
            spans = {} if data is None else {"trace": data.find_spans(sample.tokens)}
            clean.echo(json_line(_sample_as_json(dataclasses.asdict(sample)) | spans))
            continue
        clean.echo(("\n---\n" if index else "") + ("" if chat else sample.prompt) + sample.text)
        if data is not None:
            data.show(sample.tokens)


def _sample_as_json(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "logprobs" or value is not None}
