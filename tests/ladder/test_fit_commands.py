"""`lmt ladder fit | predict | compare | register | report`, over the directory of a ladder and over tables."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from cli import main
from lm_trainer.core.errors import UserError
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.fit import report
from lm_trainer.ladder.fit.compare import compare, format_comparison
from lm_trainer.ladder.fit.fitting import fit
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.predict import predict
from lm_trainer.ladder.fit.register import (
    read_registration,
    score_registrations,
    targets_to_predict,
    write_registration,
)
from lm_trainer.ladder.fit.settings import FitSettings
from lm_trainer.ladder.fit.sources import ladder_points
from lm_trainer.run.config.run_config import numeric_identity
from tests.ladder.test_fit import HOFFMANN, RUNGS, planted

LAW = Law(1.5, 40.0, 60.0, 0.4, 0.35)
SIZES = {"a": 8, "b": 16, "c": 24, "d": 32, "target": 48}


def ladder_of(root: Path, **changes: object) -> ModelLadder:
    model = {"type": "llama", "intermediate_dim": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    config = {
        "name": "made",
        "dir": str(root / "runs"),
        "sizes": ["a", "b", "c", "d"],
        "sequence_length": 16,
        "tokenizer": "bytes",
        "model_configurator": {
            "type": "transformer",
            "models": {name: {**model, "hidden_dim": width} for name, width in SIZES.items()},
        },
        "run_configurator": {"chinchilla_multiple": 2},
        **changes,
    }
    (root / "ladder.yaml").write_text(yaml.safe_dump(config))
    return ModelLadder.model_validate(config)


def run_by_hand(ladder: ModelLadder, size: str, *, noise: float = 0.001) -> None:
    """The directory that the run of a size leaves, with losses of `LAW`; higher ones before each decay."""
    folder = Path(ladder.get_save_folder(size))
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"identity": numeric_identity(ladder.run_config(size))}))
    rng = np.random.default_rng(len(size) + SIZES[size])
    lines = []
    for checkpoint in ladder.get_checkpoints(size):
        loss = LAW.loss(ladder.get_num_params(size), checkpoint.tokens) * np.exp(noise * rng.standard_normal())
        lines.append({"step": checkpoint.step, "eval/loss": loss + 0.2 * checkpoint.name.endswith("pre-decay")})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> ModelLadder:
    finished = ladder_of(tmp_path_factory.mktemp("made"))
    for size in finished.sizes:
        run_by_hand(finished, size)
    return finished


def lmt(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, ["ladder", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_ladder_is_fitted_from_its_directory(ladder: ModelLadder) -> None:
    points = ladder_points(ladder)
    assert len(points) == 12  # 0.5, 1 and 2 times Chinchilla, after the decay
    assert sorted({label.split()[-1] for label in points.labels}) == ["0.5xC", "1xC", "2xC"]
    assert points.loss == pytest.approx(LAW.loss(points.num_params, points.tokens), rel=0.01)
    with pytest.raises(UserError, match="--without z: the ladder has a, b, c, d"):
        ladder_points(ladder, without=["z"])
    assert len(ladder_points(ladder, without=["a"])) == 9


def test_rungs_that_are_missing_are_named(ladder: ModelLadder, tmp_path: Path) -> None:
    part = ladder_of(tmp_path)
    shutil.copytree(ladder.dir, part.dir)
    shutil.rmtree(Path(part.dir) / "c")
    metrics = Path(part.dir) / "d" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert "rungs without eval/loss: c 0.5xC, c 1xC, c 2xC, d 2xC" in ladder_points(part).notes


def test_fit_predict_register_run_score(ladder: ModelLadder, tmp_path: Path) -> None:
    """As a user goes: the largest size is predicted before it is run, and scored afterwards."""
    ladder_copy = ladder_of(tmp_path)
    shutil.copytree(ladder.dir, ladder_copy.dir)
    config, out = tmp_path / "ladder.yaml", tmp_path / "fit.json"
    shown = lmt("fit", config, "--draws", 100, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert "12 points of 4 sizes" in shown.output
    assert "left out 12 points measured before a decay" in shown.output

    registered = lmt("register", config, "--size", "target", "--fit", out, "--extrapolate")
    assert registered.exit_code == 0, registered.output
    file = Path(ladder_copy.dir) / "predictions" / "target.json"
    content = read_registration(file)
    assert [item["name"] for item in content["predictions"]] == ["target 0.5xC", "target 1xC", "target 2xC"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", content["written"])
    assert [score.measured for score in score_registrations(ladder_copy)] == [None] * 3
    second = lmt("register", config, "--size", "target", "--fit", out)
    assert "which is kept; choose another --out" in second.output

    run_by_hand(ladder_copy, "target")
    for score in score_registrations(ladder_copy):
        assert score.measured is not None
        assert abs(score.error or 1) < 0.02
        assert "measured" in score.line()
        assert score.line().endswith(("inside the 90% interval", "outside the 90% interval"))
    status = lmt("status", config)
    assert status.output.count("target 1xC: eval/loss predicted") == 1
    assert len(json.loads(lmt("status", config, "--json").output)["predictions"]) == 3
    # Too late for another prediction, and the first cannot be bettered.
    with pytest.raises(UserError, match="has been started, and a prediction has to be written before"):
        targets_to_predict(ladder_copy, "target")
    file.write_text(file.read_text().replace('"low"', '"low" '))
    assert score_registrations(ladder_copy)  # white space is no content
    file.write_text(file.read_text().replace(str(content["predictions"][0]["run"]["low"]), "0.1"))
    with pytest.raises(UserError, match=r"target.json was changed after it was registered"):
        score_registrations(ladder_copy)


def test_a_registered_prediction_is_not_overwritten(tmp_path: Path) -> None:
    fitted = fit(planted(0.001), FitSettings(draws=50))
    predictions = [("x", predict(fitted, 1e9, 1e11))]
    digest = write_registration(tmp_path / "p.json", fitted, predictions)
    assert len(digest) == 64
    with pytest.raises(UserError, match="choose another --out"):
        write_registration(tmp_path / "p.json", fitted, predictions)


def test_a_multiplier_is_the_compute_that_is_saved() -> None:
    """A recipe that sees every token and parameter as 1.25 of the other needs 1.25^2 less compute at fixed D / N."""
    better = Law(1.69, 406.4 / 1.25**0.34, 410.7 / 1.25**0.28, 0.34, 0.28)
    a, b, worse = (fit(planted(0.0005, seed=s, law=law), FitSettings(draws=200)) for s, law in
                   ((1, HOFFMANN), (2, better), (3, Law(2.2, 406.4, 410.7, 0.34, 0.28))))  # fmt: skip
    multipliers = compare(a, b, flops=[1e21, 1e22], tokens_per_param=20)
    for m in multipliers:
        assert m.multiplier.value == pytest.approx(1.25**2, rel=0.05)
        assert 1 < m.multiplier.low < 1.25**2 < m.multiplier.high
        assert m.difference.high < 0
    assert "B needs less compute for the loss of A (90%)" in format_comparison(multipliers, 0.9)
    back = compare(b, a, flops=[1e21], tokens_per_param=20)
    assert back[0].multiplier.value * multipliers[0].multiplier.value == pytest.approx(1, rel=0.01)
    assert compare(a, b)[0].loss != compare(a, b, tokens_per_param=200)[0].loss
    # Where the loss of A is below what B can ever reach, no compute is enough.
    assert compare(a, worse, flops=[1e26], extrapolate=True)[0].multiplier.value == 0
    with pytest.raises(UserError, match="--extrapolate"):
        compare(a, b, flops=[1e26])


def test_no_difference_is_claimed_where_there_is_none() -> None:
    fits = [fit(planted(0.003, seed=seed), FitSettings(draws=200)) for seed in range(20, 32)]
    pairs = list(zip(fits[::2], fits[1::2], strict=True))
    claims = [format_comparison(compare(a, b)[1:2], 0.9) for a, b in pairs]
    assert sum("no difference is shown" in claim for claim in claims) >= len(pairs) - 1
    a, b = pairs[0]
    # Bootstraps with one seed must not lend each other their draws.
    assert compare(a, a)[0].multiplier.low < 1 < compare(a, a)[0].multiplier.high
    other = Points(**{**vars(b.points), "metric": "eval/bpb"})
    with pytest.raises(UserError, match="a comparison needs one metric"):
        compare(a, fit(other, FitSettings(draws=50)))


def test_the_report_is_one_page_that_asks_nobody(ladder: ModelLadder, tmp_path: Path) -> None:
    ladder_copy = ladder_of(tmp_path, sizes=["a", "b", "c", "d"])
    shutil.copytree(ladder.dir, ladder_copy.dir)
    page = tmp_path / "out" / "report.html"
    done = lmt("report", tmp_path / "ladder.yaml", "--params", 50000, "--tokens", 1e6, "--out", page)
    assert done.exit_code == 0, done.exception
    text = page.read_text()
    for heading in ("Loss against compute", "Residuals", "one compute", "Back-test", "Learning rates", "Prediction"):
        assert heading in text
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 4 + len(ladder_copy.sizes)
    for picture in pictures:
        ET.fromstring(picture)
    fetched = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script', text)
    assert fetched == []
    identifiers = re.findall(r'\bid="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(identifiers)


def test_names_from_outside_are_text_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw_plots", lambda *_: [("<b>loss</b>", "<svg></svg>", "a & <i>b</i>")])
    points = planted(0.003, seed=0)
    fitted = fit(Points(**{**vars(points), "metric": "eval/<script>/loss"}), FitSettings(draws=50))
    report.write_report(tmp_path / "page.html", fitted, title="<script>alert(1)</script>")
    page = (tmp_path / "page.html").read_text()
    assert not re.search("<(script|b|i)>", page)
    assert "Model ladder &lt;script&gt;alert(1)" in page
    assert "eval/&lt;script&gt;/loss: L(N, D)" in page
    assert "<svg></svg>" in page


def test_tables_of_every_format_give_the_same_fit(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    table = csv.read_csv(RUNGS)
    parquet.write_table(table, tmp_path / "points.parquet")
    (tmp_path / "points.json").write_text(json.dumps(table.to_pylist()))
    options = ("--metric", "c4_loss", "--draws", 50, "--json")
    shown = [json.loads(lmt("fit", p, *options).output) for p in (RUNGS, *sorted(tmp_path.iterdir()))]
    assert shown[0]["law"] == shown[1]["law"] == shown[2]["law"]
    assert pyarrow is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nowhere.csv"], "no such file"),
        (["fit", "points.txt"], "points are read from .csv, .json and .parquet"),
        (["fit", RUNGS], "choose one with --metric"),
        (["fit", RUNGS, "seed=3"], "settings are for a ladder's YAML file"),
        (["predict", RUNGS, "seed=3", "--flops", "1e14"], "settings are for a ladder's YAML file"),
        (["predict", RUNGS, "--params", "7e9"], "--params and --tokens, or --flops alone"),
        (["register", RUNGS, "--size", "7B"], "is no ladder's YAML file"),
        (["register", RUNGS, "--params", "7e9", "--tokens", "1e12"], "with --out FILE"),
        (["report", RUNGS, "--params", "7e9"], "belong together"),
    ],
)
def test_mistakes_are_explained(arguments: list[object], message: str) -> None:
    done = lmt(*arguments)
    assert done.exit_code == 2
    assert message in done.output
