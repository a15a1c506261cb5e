"""`calibrate` and `verify` with JSON lines: which tokens are counted, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("sklearn")

from oracles import matrix_of  # noqa: E402
from tiny_language_model import make_base, make_lora, write_rows  # noqa: E402
from tiny_tokenizer import WORDS  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lsrdecomp import compress  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.errors import LsrError  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.statistics import read_statistics  # noqa: E402
from lsrdecomp.lora.search import CompressionPlan  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    make_base(folder)
    compress(open_checkpoint(make_lora(folder)), CompressionPlan(separation_rank=2)).save(
        folder / "lsr"
    )
    write_rows(folder / "rows.jsonl", 24)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def calibrated(place, out, *more):
    done = run(
        "calibrate",
        place / "base",
        "--adapter",
        place / "lora",
        "--out",
        out,
        "--samples",
        24,
        *more,
    )
    assert done.exception is None, done.exception
    return json.loads((out / "statistics.json").read_text())["answers"]


def test_calibrate_counts_completion_tokens_or_all(place, tmp_path):
    data = ("--data", place / "rows.jsonl", "--batch", 5)
    # Completions of 1, 2, 3, 4 words in turn and their end; prompts of three words after the mark
    # of the beginning.
    assert calibrated(place, tmp_path / "some", *data) == 6 * (2 + 3 + 4 + 5)
    assert (
        calibrated(place, tmp_path / "all", *data, "--answers", "all")
        == 6 * (2 + 3 + 4 + 5) + 24 * 3
    )
    assert len(read_statistics(tmp_path / "some")) == 8


def test_statistics_say_what_they_are_of_and_what_the_adapter_does(place, tmp_path):
    data = ("--data", place / "rows.jsonl")
    found = []
    for name, more in (("one", ()), ("same", ()), ("other", ("--answers", "all"))):
        calibrated(place, tmp_path / name, *data, *more)
        found.append(json.loads((tmp_path / name / "statistics.json").read_text())["settings"])
    one, same, other = found
    assert one == same
    assert one["base"] == str(place / "base")
    assert one["texts"] != other["texts"]
    arguments = (
        "measure",
        place / "lora",
        place / "lora",
        "--base",
        place / "base",
        "--json",
        tmp_path / "v.json",
    )
    run(*arguments, *data)
    effect = json.loads((tmp_path / "v.json").read_text())["fidelity"]["effect"]
    assert one["effect"] == pytest.approx(effect, rel=1e-4)
    assert effect > 0.0


def test_few_eigenpairs_in_half_precision_are_kept(place, tmp_path):
    data = ("--data", place / "rows.jsonl")
    calibrated(place, tmp_path / "few", *data, "--rank", 5)
    calibrated(place, tmp_path / "all", *data)
    few, whole = read_statistics(tmp_path / "few"), read_statistics(tmp_path / "all")
    for name in few:
        short, long = few.measured(name).input, whole.measured(name).input
        assert short.values.shape == (5,)
        assert short.trace == pytest.approx(long.trace, rel=1e-3)
        np.testing.assert_allclose(short.values, long.values[:5], rtol=1e-3)
    assert (tmp_path / "few" / "statistics.safetensors").stat().st_size < (
        tmp_path / "all" / "statistics.safetensors"
    ).stat().st_size


def test_the_base_may_be_held_in_bfloat16(place, tmp_path):
    data = ("--data", place / "rows.jsonl")
    calibrated(place, tmp_path / "half", *data, "--dtype", "bfloat16")
    calibrated(place, tmp_path / "whole", *data)
    one, other = read_statistics(tmp_path / "half"), read_statistics(tmp_path / "whole")
    for name in one:
        half, whole = matrix_of(one.measured(name).input), matrix_of(other.measured(name).input)
        assert 0.0 < ((half - whole) ** 2).sum() < 0.1 * (whole**2).sum()


def test_measure_compares_outputs_on_completions(place, tmp_path):
    arguments = (
        "measure",
        place / "lora",
        place / "lsr",
        "--base",
        place / "base",
        "--json",
        tmp_path / "v.json",
    )
    done = run(*arguments, "--data", place / "rows.jsonl")
    assert done.exception is None, done.output
    answers = json.loads((tmp_path / "v.json").read_text())["fidelity"]
    assert answers["answers"] == 6 * (2 + 3 + 4 + 5)
    assert answers["unit"] == "token"
    assert answers["kl"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--data", "rows.jsonl", "--text", "rows.jsonl"), "give one of --data"),
        (
            ("--text", "rows.jsonl", "--answers", "all"),
            "--answers is about prompts and completions",
        ),
        (
            ("--data", "rows.jsonl", "--answers", "some"),
            "answers must be one of completion, all, got 'some'",
        ),
        (
            ("--data", "rows.jsonl", "--dtype", "float8"),
            "dtype must be one of float32, bfloat16, got 'float8'",
        ),
        (
            ("--data", "rows.jsonl", "--max-length", "6"),
            r"line 4: 9 tokens, .* give --max-length 9",
        ),
        (("--data", "absent.jsonl"), "absent.jsonl: "),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    place, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.chdir(place)
    done = run(
        "calibrate",
        place / "base",
        "--adapter",
        place / "lora",
        "--out",
        tmp_path / "o",
        *arguments,
    )
    assert isinstance(done.exception, LsrError)
    with pytest.raises(LsrError, match=says):
        raise done.exception
    assert not (tmp_path / "o").exists()


def test_what_compress_measures_of_a_language_model_is_said_per_token_and_not_estimated_too(
    place, tmp_path
):
    rows = [
        {"prompt": f"user {one} {other}", "completion": one}
        for one in WORDS[:7]
        for other in WORDS[:7]
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(
        *(
            "compress",
            place / "lora",
            "--base",
            place / "base",
            "--data",
            file,
            "--ratio",
            4,
            "--dry-run",
        ),
        *("--held-out", 8, "--max-length", 32),
    )
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "nats per token" in said
    assert "nats per example" not in said
    assert "Estimated" not in said
