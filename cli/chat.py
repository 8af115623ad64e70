"""`lmt chat`: a conversation with a model in the terminal."""

import sys
from typing import Annotated

import typer

from cli import clean
from cli.common import CheckpointOption, ModelArgument, print_generation_note


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy decoding.")] = 0.7,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the K most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Sample from the most likely tokens whose probabilities sum to P (nucleus sampling)."
        ),
    ] = 0.95,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed; the same seed gives the same answers.")] = 0,
    devices: Annotated[
        int, typer.Option(metavar="N", help="Shard the model over the first N devices.", show_default="all")
    ] = 0,
    step: CheckpointOption = None,
) -> None:
    """Chat with a model, using the chat template of its tokenizer.

    Type one message per line. Answers are streamed, and Ctrl-C interrupts them. `/reset` starts a new conversation, and
    `/quit` or Ctrl-D exits. Each answer sees as much of the conversation as fits into the model's context.

    For example:

        lmt chat path/to/hf-model --system "Answer in one sentence."
    """
    from lm_trainer.core.runtime import configure_jax, prepare_process

    # Called before anything imports jax, because it configures jax's allocator and threads.
    prepare_process()
    import dataclasses

    from lm_trainer.core.errors import UserError
    from lm_trainer.generate.chat import Chat
    from lm_trainer.generate.text import Sampling
    from lm_trainer.run.weights.open_model import local_devices, open_model

    configure_jax({}, None)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    chosen = local_devices(devices)
    source = open_model(model, step=step, devices=chosen)
    print_generation_note(source)
    talk = Chat(
        source.build(chosen),
        source.tokenizer,
        context=source.config.seq_len,
        sampling=dataclasses.replace(sampling, eos_id=source.end_ids),
        system=system,
        stop=source.stop_texts,
    )
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            clean.echo()
            return
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                talk.reset()
                clean.echo("(a new conversation)")
                continue
            case _ if line.startswith("/"):
                clean.echo(f"(there is no {line.split()[0]}; there are /reset and /quit)")
                continue
        try:
            for piece in talk.answer(line):
                clean.echo(piece, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            clean.echo(" ...", nl=False)
        except UserError as error:
            clean.echo(f"({error})", nl=False)
        clean.echo()
