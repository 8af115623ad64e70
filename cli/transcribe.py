"""`lmt transcribe`: transcribes recordings."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli import clean
from cli.common import CheckpointOption, ModelArgument, path_argument, path_option
from lm_trainer.core.errors import UserError


def transcribe(
    model: ModelArgument,
    files: Annotated[list[Path], path_argument(metavar="FILE...", help="Recordings: wav, flac, mp3, ogg.")],
    language: Annotated[
        str | None, typer.Option(metavar="NAME", help="Language, such as en.", show_default="detected")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"] | None,
        typer.Option(help="Transcribe in the spoken language, or translate to English.", show_default="the model's"),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Split the text into segments with timestamps.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum tokens per window.", show_default="the model's limit"),
    ] = None,
    beams: Annotated[int, typer.Option(metavar="N", min=1, help="Beam size; 1 is greedy decoding.")] = 1,
    output: Annotated[Literal["text", "json", "srt", "vtt"], typer.Option("--format", help="Output format.")] = "text",
    out: Annotated[Path | None, path_option(metavar="DIR", help="Write NAME.txt, .json, .srt or .vtt to DIR.")] = None,
    devices: Annotated[
        int, typer.Option(metavar="N", help="Shard the model over the first N devices.", show_default="all")
    ] = 0,
    step: CheckpointOption = None,
) -> None:
    """Transcribe recordings.

    Decodes greedily or with beam search, like `generate` of transformers without sampling. Recordings longer than the
    model's window are split into windows at timestamps. Timestamps are then always written.

    For example:

        lmt transcribe my-run talk.flac

        lmt transcribe path/to/whisper *.mp3 --language en --format srt --out subtitles
    """
    from lm_trainer.core.runtime import configure_jax, prepare_process

    prepare_process()
    from lm_trainer.core.terminal import json_line
    from lm_trainer.generate.transcribe import Transcriber, TranscribeSettings, as_json, as_srt, as_vtt
    from lm_trainer.run.weights.open_model import local_devices, open_model

    configure_jax({}, None)
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: there is no such file")
    names = [file.stem for file in files]
    if out is not None and len(set(names)) < len(names):
        raise UserError("--out: two recordings have one name, and one would be written over the other; rename one")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
    settings = TranscribeSettings(
        language=language,
        task=task,
        timestamps=timestamps or output in ("srt", "vtt"),
        max_new_tokens=max_new_tokens,
        beams=beams,
    )
    chosen = local_devices(devices)
    transcriber = Transcriber(open_model(model, step=step, devices=chosen), settings, chosen)
    for file in files:
        transcript = transcriber.transcribe(file)
        text = {
            "text": lambda transcript=transcript: transcript.text + "\n",
            "json": lambda transcript=transcript: json_line(as_json(transcript)) + "\n",
            "srt": lambda transcript=transcript: as_srt(transcript),
            "vtt": lambda transcript=transcript: as_vtt(transcript),
        }[output]()
        if out is None:
            clean.echo(text, nl=False)
            continue
        (out / f"{file.stem}.{'txt' if output == 'text' else output}").write_text(text, encoding="utf-8")
