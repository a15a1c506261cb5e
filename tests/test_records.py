"""Figures on pages are those of the records, sentence by sentence, and row by row of a table.

Most tables need no such test: the site makes them from the records.
"""

import json
import math
import re
from pathlib import Path
from statistics import fmean, geometric_mean

import problems
import pytest

from benchmarks.headline import OPTIONS, RECORD, ROW, headline
from benchmarks.language.answer_results import LSR, SVD, mean_size_ratio, rows_of_task
from benchmarks.language.rival_results import ANSWERS_TASK, GEMMA, NAMES, RivalResults
from lsrdecomp.cli import commands as demo_commands
from lsrdecomp.lora.base.texts import CONTINUED, WRITTEN
from lsrdecomp.lora.measure.fidelity import WRITTEN_BIAS, wilson_interval
from lsrdecomp.precision import unit_roundoff

ROOT = Path(__file__).resolve().parents[1]
README, INDEX, LANGUAGE, SMALL = (
    "README.md",
    "docs/index.md",
    "docs/evidence/language-models.md",
    "docs/evidence/small-adapters.md",
)
ARENA = "docs/evidence/peft-arena.md"
COMPRESS, PAPER, TRAINED, SCALE = (
    "docs/evidence/compressing.md",
    "docs/evidence/paper-checked.md",
    "docs/evidence/fine-tuning-measured.md",
    "docs/evidence/scale.md",
)
IMAGES = "docs/guides/image-loras.md"
MILLION = "docs/evidence/a-million-adapters.md"
SPEECH = "docs/evidence/speech.md"
ACCURACY, SOLVERS, OPERATORS, KERNELS = (
    "docs/evidence/accuracy.md",
    "docs/evidence/solvers-measured.md",
    "docs/evidence/operators-measured.md",
    "docs/evidence/kernels.md",
)
NO_RECORD: dict[str, tuple[str, ...]] = {
    SMALL: ("1 − KL(LoRA ‖ adapter) / KL(LoRA ‖ no adapter)",),
}
"""Sentences whose figures no record holds."""

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"[^.]{0,40}(?:(?<![Vv]ersion )(?<![\w.])0?\.\d+|\d %|±|\d nats)[^.]{0,20}")

WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def record(name):
    return json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )


def plain(text):
    return " ".join(text.replace("**", "").split())


def short(value, digits=2):
    """0.92 for 0.9213, as the pages write shares."""
    return f"{value:.{digits}f}"


def percent(value, digits=0):
    return f"{100 * value:.{digits}f}"


def joined(values, digits=2):
    *first, last = (short(value, digits) for value in values)
    return f"{', '.join(first)} and {last}"


def opened(row):
    """Bytes that open a form, in kB."""
    return row["bytes"] / 1000


def one_command(name):
    return by_seed(name)[0]


def by_seed(name):
    rows = record("one_command")["rows"]
    return sorted((row for row in rows if row["name"] == name), key=lambda row: row["seed"])


def second_draw():
    row = by_seed(ROW)[1]
    return f"{row['bytes'] / 1000:.0f} kB, {row['found']['n_matching']} of 64"


def in_readme():
    told = headline()
    smallest = by_seed("smollm2 keep .95 distill 60")
    right = fmean(row["found"]["exact_match_rate"] for row in smallest)
    share = percent(fmean(row["kept"] for row in smallest))
    size = f"{fmean(row['bytes'] for row in smallest) / 1000:.1f} kB"
    tickets = one_command("smollm2 tickets answers .9 distill 60")
    found = tickets["found"]
    yield (
        f"On another task, tickets, {tickets['bytes'] / 1000:.1f} kB keep {found['n_matching']} of "
        f"{found['answered']}"
    )
    yield (
        f"{share} % of the effect is not {share} % of the answers: [of {size} every word is "
        f"right in {percent(right)} % of texts]"
    )
    yield (
        f"**A LoRA of {told.sentence}** (SmolLM2-135M, fresh prompts, {told.minutes:.0f} minutes "
        f"on one core; another draw: {second_draw()})"
    )
    e2e = small_adapters("E2E")
    names = ("Fisher core", "LSR", "Uni-LoRA")
    cores, ours, theirs = (short(e2e.share(name, 1000).value) for name in names)
    assert cores == ours
    yield (
        "In 1 kB other adapters keep as much of E2E, "
        f"[Fisher cores and LSR {ours}, Uni-LoRA {theirs}]"
    )
    sums = answers("sums")
    assert sums["LSR in 3 kB, as compressed"]["exact"] == 0.0
    right = [percent(sums[name]["exact"]) for name in ("LSR in 3 kB, distilled", "the LoRA")]
    yield (
        "a 3 kB version without distillation solved no arithmetic problem, "
        f"[{right[0]} % distilled, the LoRA {right[1]} %]"
    )


def in_a_million():
    """What five gigabytes hold: measured bytes, and arithmetic."""
    found = record("many_small")
    (in_int4,) = (
        row["bytes"]
        for row in rows_of_task(record("answer_curve"))
        if row["method"] == "the LoRA in int4"
    )
    lora, packed, on_disk = (
        found[key] for key in ("bytes_of_lora", "bytes_packed", "bytes_on_disk")
    )
    held = {size: 5e9 // size for size in (lora, in_int4, packed, on_disk)}
    yield f"| the LoRA | {lora / 1e6:.1f} MB | {lora / 1e6:.1f} TB | {held[lora]:,.0f} |"
    in_kb = f"{in_int4 / 1e3:.0f}"
    yield f"| the LoRA in int4 | {in_kb} kB | {in_kb} GB | {held[in_int4]:,.0f} |"
    yield (
        f"| the small one, packed in a zip | {packed:,.0f} bytes | {packed / 1e3:.1f} GB | "
        f"{held[packed] / 1e6:.2f} million |"
    )
    yield (
        f"| the small one, two files in a directory | {on_disk:,.0f} bytes | "
        f"{on_disk / 1e3:.1f} GB | {held[on_disk] / 1e6:.2f} million |"
    )
    yield f"The two files have {found['bytes']:,} bytes"
    assert found["count"] == 10_000
    ratio = found["milliseconds_to_open"] / found["milliseconds_to_open_lora"]
    yield f"takes {ratio:.1f} times the processor time of opening the LoRA"


def in_index():
    """The card of a LoRA: its words, and what its picture draws (`docs/_extensions/cards.py`)."""
    told = headline()
    yield f"A LoRA of {told.sentence}."
    yield "An adapter shrinks from {} to {}".format(*told.sizes)


DOORS = {
    "README.md": README,
    "the site's first card": INDEX,
    "the cheat sheet": "docs/reference/cheat-sheet.md",
}


@pytest.mark.parametrize("door", [*DOORS, "the demo"])
def test_every_front_door_shows_one_figure_of_one_lora_by_one_command(door):
    """`benchmarks/headline.py` names the record; a door with another figure fails here."""
    text = demo_commands.HEADLINE
    if door in DOORS:
        text = (ROOT / DOORS[door]).read_text(encoding="utf-8")
    text = plain(text.replace("\\\n", " "))
    told = headline()
    assert told.sentence in text
    assert OPTIONS in text, "the command that made it"
    figure = r"(\d+\S* [kM]B) became (\d+\S* [kM]B) and keeps (.*?) answers, word for word"
    assert set(re.findall(figure, text)) == {(*told.sizes, told.count)}


def test_the_headline_is_what_its_command_made():
    """The options that are told are those that the record's rows were run with."""
    rows = [row for row in record(RECORD)["rows"] if row["name"] == ROW]
    numbers = {tuple(re.findall(r"[\d.]+", " ".join(row["options"]))) for row in rows}
    assert numbers == {tuple(re.findall(r"[\d.]+", OPTIONS))}


def small_adapters(task):
    return RivalResults(record("rivals"), task)


def answers(task):
    """Return what versions of a task's LoRA answer, by name."""
    return {row["name"]: row for row in record("answers")["rows"] if row["task"] == task}


def kept(task, method, budget, *, is_trained=True):
    """Return the mean share that a method keeps in so many bytes."""
    of_task = small_adapters(task)
    rows = of_task.untrained(method, budget)
    if is_trained:
        rows = of_task.trained(method, budget)
    return short(fmean(row["kept"] for row in rows), 3)


def of_bytes():
    """By bytes."""
    before, after = (
        [kept("E2E", method, 3000, is_trained=trained) for method in ("LSR", "SVD")]
        for trained in (False, True)
    )
    yield (
        f"LSR keeps {before[0]} of its effect as compressed and {after[0]} after training; "
        f"truncated SVD keeps {before[1]} and {after[1]}"
    )
    cores, ours, theirs = cores_beside_ours()
    yield (
        f"Fisher cores' {cores} stand above LSR's {ours} and Uni-LoRA's {theirs}, by less than "
        "their standard errors"
    )


def cores_beside_ours():
    """Return what Fisher cores, LSR and Uni-LoRA keep of E2E in 1 kB; the first two are level."""
    e2e = small_adapters("E2E")
    shares = [e2e.share(name, 1000) for name in ("Fisher core", "LSR", "Uni-LoRA")]
    cores, ours, _ = shares
    assert 0.0 < cores.value - ours.value < min(cores.error, ours.error)
    return [short(share.value, 3) for share in shares]


def of_wording():
    """What it writes."""
    rows = answers("E2E")
    compressed = [rows[f"{name} in 3 kB, as compressed"] for name in ("LSR", "truncated SVD")]
    trained = [rows[f"{name} in 3 kB, distilled"] for name in ("LSR", "truncated SVD")]
    base = rows["no adapter"]
    yield (
        f"BLEU {compressed[0]['bleu']:.0f}, where the LoRA has {rows['the LoRA']['bleu']:.0f}, the "
        f"base {base['bleu']:.0f} and truncated SVD of 3 kB {compressed[1]['bleu']:.0f}. After "
        f"training truncated SVD has {trained[1]['bleu']:.0f}, too"
    )
    yield (
        f"at {short(trained[0]['other_kl'])} nats a token after training, truncated SVD at "
        f"{short(trained[1]['other_kl'])}, and leaving the adapter out at {short(base['other_kl'])}"
    )


def of_sums():
    """Arithmetic: compression alone is not enough."""
    rows = answers("sums")
    lora = rows["the LoRA"]
    yield f"The LoRA gets {percent(lora['exact'])} % of {lora['examples']} new problems right"
    compressed = [rows[f"LSR in {size} kB, as compressed"] for size in (1, 3)]
    assert all(row["exact"] == 0.0 and row["kept"] > 0.5 for row in compressed)
    trained = [rows[f"LSR in {size} kB, distilled"] for size in (1, 3)]
    right = [percent(row["exact"]) for row in trained]
    kept_shares = joined([row["kept"] for row in trained], 3)
    yield f"{right[0]} and {right[1]} % are**, with {kept_shares} of the effect"


def of_gemma():
    """Another base."""
    smaller, trained = (
        one_command(f"gemma-3-270m {name}") for name in ("keep .9", "keep .95 distill 60")
    )

    def said(row):
        share, found = (
            f"{percent(each['kept'], 1)} ± {percent(each['standard_error'], 1)}"
            for each in (row, row["found"])
        )
        return (
            f"{opened(row):.1f} kB, which keep {share} % of its effect, {found} % on further texts"
        )

    n_texts = smaller["texts"]
    yield f"`compress --keep 0.9` with {n_texts} examples wrote {said(smaller)}"
    yield f"`--keep 0.95 --distill 60` wrote {said(trained)}"
    rows = rows_of_task(record("answer_curve"), "E2E, Gemma-3-270M")
    found = {(row["method"], row["budget"]): row["n_matching"] for row in rows}
    ours, theirs = (
        [found[method, budget] for budget in (60_000, 120_000)] for method in (LSR, SVD)
    )
    yield (
        f"LSR gives {ours[0]} of 64 whole answers in 60 kB and {ours[1]} in 120 kB, untrained, "
        f"truncated SVD {theirs[0]} and {theirs[1]}; for as many it takes "
        f"{mean_size_ratio(rows, LSR):.2f} of truncated SVD's bytes"
    )


def in_language_models():
    yield from of_bytes()
    yield from of_wording()
    yield from of_whole_answers()
    yield from of_sums()
    yield from of_gemma()
    yield from of_calibration()
    yield from of_written_texts()


def of_whole_answers():
    def same(name):
        found = [row["found"]["exact_match_rate"] for row in by_seed(name)]
        return percent(sum(found) / len(found))

    smaller, larger = map(same, ("smollm2 keep .95 distill 60", "smollm2 keep .99 distill 100"))
    size = one_command("smollm2 keep .99 distill 100")["bytes"] / 1000
    yield (
        "2.3 kB (`--keep 0.95 --distill 60`) predict each word of an answer as the LoRA does in "
        f"{smaller} % of fresh texts, "
        f"and {size:.0f} kB (`--keep 0.99 --distill 100`) in {larger} %"
    )
    curve = rows_of_task(record("answer_curve"))
    found = {(row["method"], row["budget"]): row["n_matching"] for row in curve}
    told = headline()
    as_good = min(
        (row for row in curve if row["method"] == SVD and row["n_matching"] >= told.n_matching),
        key=lambda row: row["bytes"],
    )
    (in_int4,) = (row["bytes"] for row in curve if row["method"] == "the LoRA in int4")
    yield (
        f"`{OPTIONS}` makes {told.sizes[1]}, which give {told.count} fresh prompts the LoRA's own "
        f"answer, word for word: {as_good['bytes'] / told.bytes:.1f} times fewer bytes than "
        f"truncated SVD takes for {as_good['n_matching']} of them, untrained, and "
        f"{in_int4 / told.bytes:.1f} times fewer than the LoRA in int4, which gives "
        f"{found['the LoRA in int4', 0]}. It took {told.minutes:.0f} minutes on one core. "
        f"Another draw of its 400 examples made {second_draw()}"
    )
    (ours, theirs), (of_60, theirs_of_60), both = (
        [found[method, budget] for method in ("LSR", "truncated SVD")]
        for budget in (120_000, 60_000, 240_000)
    )
    yield (
        f"LSR gives {ours} of 64 answers in 120 kB, where truncated SVD gives {theirs}, and "
        f"{of_60} to its {theirs_of_60} in 60 kB; at 240 kB it is {both[0]} to {both[1]}"
    )
    ratio = mean_size_ratio(curve, LSR)
    yield f"On the mean over both curves it takes {ratio:.2f} of truncated SVD's bytes"
    yield from of_training_alike()
    products, norm, integers = (
        found[f"LSR without {part}", 60_000]
        for part in ("Kronecker products", "the norm", "integers")
    )
    yield (
        f"of LSR's {of_60} answers in 60 kB {products} stay without Kronecker products (truncated "
        f"SVD in the norm), {norm} without the norm and {integers} without integers"
    )
    yield (
        f"in 8 kB LSR gives {found['LSR', 8000]}, and "
        f"{found['LSR without Kronecker products', 8000]} without Kronecker products"
    )
    sums, tickets = (rows_of_task(record("answer_curve"), task) for task in ("sums", "tickets"))
    of_sums, of_tickets = (
        {(row["method"], row["budget"]): row["n_matching"] for row in rows}
        for rows in (sums, tickets)
    )
    small, theirs = (
        [of_tickets[method, budget] for budget in (8000, 15_000)] for method in (LSR, SVD)
    )
    ratios = joined([mean_size_ratio(rows, LSR) for rows in (sums, tickets)])
    yield (
        f"for sums LSR gives {of_sums[LSR, 8000]} of 64 answers in 8 kB, where truncated SVD gives "
        f"{of_sums[SVD, 30_000]} in 30 kB; for tickets {small[0]} in 8 kB and {small[1]} in 15 kB, "
        f"where truncated SVD gives {theirs[0]} and {theirs[1]}. For as many answers it takes "
        f"{ratios} of truncated SVD's bytes"
    )
    of_each = {
        task: one_command(f"smollm2 {task} answers .9 distill 60")
        for task in ("tickets", "sums", "extraction")
    }
    same = {task: row["found"]["n_matching"] for task, row in of_each.items()}
    sizes = {task: f"{row['bytes'] / 1000:.1f} kB" for task, row in of_each.items()}
    beside = {task: svd_beside(task, count) for task, count in same.items()}
    yield (
        f"Trained by the command above, {sizes['tickets']} give {same['tickets']} of the 64 "
        f"answers for tickets, where truncated SVD gives {beside['tickets']}; {sizes['sums']} give "
        f"{same['sums']} for sums, where it gives {beside['sums']}; and {sizes['extraction']} give "
        f"{same['extraction']} for extraction, where it gives {beside['extraction']}"
    )
    yield from of_other_texts()
    yield from of_expected_answers()
    assert {row["answered"] for row in record("answer_curve")["rows"]} == {64}


def svd_beside(task, n_matching):
    """The largest truncated SVD with fewer answers, and the smallest with as many."""
    rows = [row for row in rows_of_task(record("answer_curve"), task) if row["method"] == SVD]
    fewer = [row for row in rows if row["n_matching"] < n_matching]
    as_many = [row for row in rows if row["n_matching"] >= n_matching]
    two = (
        max(fewer, key=lambda row: row["bytes"]),
        min(as_many, key=lambda row: row["bytes"]),
    )
    return " and ".join(f"{row['n_matching']} in {row['bytes'] / 1000:.0f} kB" for row in two)


def of_training_alike():
    """What is left after one training for all, of which each takes its best rate."""
    task = RivalResults(record("rivals"), ANSWERS_TASK)
    assert {row["answered"] for row in task.rows} == {64}
    after = {
        (method, budget): row["n_matching"]
        for method in task.methods
        for budget in task.budgets
        for row in task.trained(method, budget)
    }
    count = {method: after[method, 60_000] for method in task.methods}
    kept = {method: short(task.share(method, 60_000).value, 4) for method in task.methods}
    yield (
        f"60 kB of LSR give {count['LSR']} answers and keep {kept['LSR']} of the effect, of "
        f"LoRAQuant's split {count['LoRAQuant']} and {kept['LoRAQuant']}, of truncated SVD in the "
        f"norm {count['SVD']} and {kept['SVD']}, of Uni-LoRA {count['Uni-LoRA']} and "
        f"{kept['Uni-LoRA']}"
    )


def of_other_texts():
    """Other texts for the norm, the same fresh prompts."""
    sizes = (30_000, 60_000, 120_000)
    draws = [
        {
            row["budget"]: row["n_matching"]
            for row in rows_of_task(record("answer_curve"), seed=seed)
            if row["method"] == LSR
        }
        for seed in (0, 1, 2)
    ]
    said = [" / ".join(str(draw[size]) for draw in draws) for size in sizes]
    yield (
        f"In the norm of three draws of texts LSR gives {said[0]} in 30 kB, {said[1]} in 60 kB and "
        f"{said[2]} in 120 kB"
    )


def of_expected_answers():
    """What the LoRA's own margins let expect, beside what was counted."""
    said = []
    for task in ("E2E", "sums"):
        rows = [row for row in rows_of_task(record("answer_curve"), task) if row["method"] == LSR]
        rows = sorted(rows, key=lambda row: row["budget"])
        assert [row["budget"] for row in rows] == [8000, 30_000, 60_000, 120_000, 240_000]
        for name in ("n_matching", "expected"):
            *most, last = (f"{row[name]:.0f}" for row in rows)
            said.append(f"{', '.join(most)} and {last}")
    yield (
        f"of 64 answers LSR of 8, 30, 60, 120 and 240 kB gives {said[0]} for E2E, and {said[1]} "
        f"are expected; for sums {said[2]}, and {said[3]} are"
    )
    rows = [row for row in record("answer_curve")["rows"] if row.get("expected") is not None]
    within = [row for row in rows if abs(row["n_matching"] - row["expected"]) <= 5.0]
    yield f"Of {len(rows)} versions of five LoRAs {len(within)} lie within five answers"
    farthest = max(rows, key=lambda row: abs(row["n_matching"] - row["expected"]))
    assert (farthest["task"], farthest["method"], farthest["budget"]) == ("tickets", SVD, 15_000)
    yield (
        "farthest off is truncated SVD of tickets in 15 kB, with "
        f"{farthest['n_matching']} for {farthest['expected']:.0f}"
    )


def of_written_texts():
    found = {
        {"none": WRITTEN, "few": CONTINUED}[arm]: (
            round(bias["mean"], 3),
            round(bias["spread"], 3),
            len(bias["by_task"]),
        )
        for arm, bias in record("written_texts")["bias"].items()
    }
    assert found == WRITTEN_BIAS
    every = record("written_texts")["rows"]
    rows = [row for row in every if row["seed"] == row["compressed_by"]]
    yield from of_estimates_drawn_anew([row for row in every if row not in rows])
    tasks = ("sst2", "e2e", "arithmetic", "tickets")
    shares = {(row["task"], row["arm"]): row["real"]["kept"] for row in rows}
    real, few, none = (
        [shares[task, arm] for task in tasks if (task, arm) in shares]
        for arm in ("real", "few", "none")
    )
    first, second, third, fourth = (short(share, 3) for share in few)
    yield (
        f"From five prompts it keeps {first} of SST-2's LoRA, {second} of E2E's, {third} of that "
        f"for sums and {fourth} of that for tickets; from 100 prompts {joined(real, 3)}"
    )
    yield f"With nothing given it keeps {joined(none, 3)}: too little by far"
    (tickets,) = (row for row in rows if (row["task"], row["arm"]) == ("tickets", "few"))
    too_low = tickets["real"]["kept"] - tickets["estimate"]["kept"]
    yield f"The estimates on such texts are too low, of the tickets by {percent(too_low)} points"
    for row in rows:
        if row["arm"] == "few":
            assert row["estimate"]["kept"] < row["real"]["kept"]
    (fixed,) = (row for row in rows if row["arm"] == "none, fixed forms")
    (cut,) = (row for row in rows if row["arm"] == "none, answers cut to length")
    yield (
        f"In six forms that were not chosen so it kept {short(fixed['real']['kept'], 3)} of "
        "SST-2's, and with answers cut to the length of those that end, "
        f"{short(cut['real']['kept'], 3)}"
    )
    (sst2,) = (row for row in rows if (row["task"], row["arm"]) == ("sst2", "none"))
    yield (
        f"{short(sst2['estimate']['effect'])} nats a token on texts that it wrote, "
        f"{short(sst2['real']['effect'])} on real ones"
    )


def of_estimates_drawn_anew(rows):
    """The estimates of versions that were there, on texts written from five other prompts."""
    bias, spread, _ = WRITTEN_BIAS[CONTINUED]

    def misses(row, stated=0.0, spread=0.0):
        errors = [row[name]["standard_error"] for name in ("real", "estimate")]
        difference = row["estimate"]["kept"] - stated - row["real"]["kept"]
        return abs(difference) > 2.0 * math.hypot(*errors, spread)

    assert len(rows) == 10
    held = 10 - sum(misses(row, bias, spread) for row in rows)
    alone = 10 - sum(misses(row) for row in rows)
    yield (
        f"Of ten estimates on texts written from other prompts {held} lie within two standard "
        f"errors of what real texts say, its stated bias and spread counted; {alone} do without"
    )


def of_calibration():
    calibrate = record("calibration")["jobs"]["calibrate"]
    yield (
        f"{short(calibrate['peak_bytes'] / 1e9)} GB above the base, {calibrate['cpu_ratio']:.1f} "
        "times the processor time of a plain forward and backward pass, "
        f"{calibrate['statistics_bytes'] / 1e6:.1f} MB of statistics"
    )


def of_speech():
    speech = record("speech")
    (lora,) = speech["loras"]
    rows = {(row["method"], row["budget"], row["steps"]): row for row in speech["rows"]}
    yield (
        f"writes down {short(lora['exact'])} of 64 held-out sounds without a fault, the base none "
        f"({short(lora['effect'])} nats a token apart)"
    )
    most = max(row["exact"] for row in speech["rows"] if row["steps"] == 0)
    ours, theirs = (short(rows[method, 12_000, 0]["kept"]) for method in ("LSR", "SVD"))
    yield (
        f"as compressed, {short(most)} of the sounds at most are written down right, and in 12 kB "
        f"truncated SVD keeps {theirs} where LSR keeps {ours}"
    )
    ours, theirs = (rows[method, 3000, 60] for method in ("LSR", "SVD"))
    yield (
        f"LSR is ahead in {ours['bytes'] / 1000:.1f} kB: it keeps {short(ours['kept'], 3)} and "
        f"writes down {short(ours['exact'])} of the sounds rightly, quantized truncated SVD "
        f"{short(theirs['kept'], 3)} and {short(theirs['exact'])}"
    )
    ours, theirs = (rows[method, 12_000, 60] for method in ("LSR", "SVD"))
    assert abs(ours["kept"] - theirs["kept"]) < ours["error"] + theirs["error"]
    yield f"In 12 kB they are level, with {short(ours['kept'], 3)} and {short(theirs['kept'], 3)}"
    yield from of_speech_by_one_command()


def of_speech_by_one_command():
    tones = record("tones")
    size = f"{tones['rows'][0]['bytes_before'] / 1000:.0f} kB"
    yield f"--data sounds/ --keep {tones['rows'][0]['keep']} --out small/`"
    layers = f"{tones['layers']} layers"
    yield f"a LoRA (r = 8, {layers}, {size}) for a tape that runs a quarter too fast"
    without, with_lora = (short(tones[name]) for name in ("right", "right_with_lora"))
    yield f"Of 256 new sounds the base writes down {without} without a fault, the LoRA {with_lora}"
    smaller, larger = tones["rows"]
    assert (smaller["keep"], larger["keep"]) == (0.9, 0.99)
    said, found = (
        f"{short(smaller[share], 3)} ± {short(smaller[error], 3)}"
        for share, error in (("promised", "promised_error"), ("kept", "standard_error"))
    )
    for row in tones["rows"]:
        errors = row["promised_error"] + row["standard_error"]
        assert abs(row["promised"] - row["kept"]) < 2.0 * errors
    yield (
        f"`--keep 0.9` says {said}, and {found} is found; {short(smaller['right'])} of "
        f"the sounds are right then, {short(larger['right'])} at `--keep 0.99`"
    )


def in_small_adapters():
    tasks = [small_adapters(task) for task in ("E2E", "extraction", "sums")]
    level = [(task.about["task"], *each) for task in tasks for each in level_with_lsr(task)]
    assert level == [
        ("E2E", "Uni-LoRA", 1000),
        ("E2E", "Fisher core", 1000),
        ("sums", "Uni-LoRA", 1000),
        ("sums", "Fisher core", 1000),
        ("sums", "SVD", 30_000),
    ]
    yield (
        "LSR leads from 3 kB up, except on sums at 30 kB (tied with SVD), and leads or ties in 1 kB"
    )
    ours = [short(task.share("LSR", 3000).value, 3) for task in tasks]
    yield f"it keeps {ours[0]} of E2E, {ours[1]} of extraction and {ours[2]} of sums"
    best = [best_of_others(task, 3000) for task in tasks]
    yield f"The best of the others keeps {best[0]}, {best[1]} and {best[2]}"
    extraction = tasks[1]
    split = extraction.lead("LoRAQuant", 1000)
    assert split.value > 2.0 * split.error
    yield (
        f"ahead on extraction, {short(extraction.share('LSR', 1000).value, 3)} against "
        f"{short(extraction.share('LoRAQuant', 1000).value, 3)} of LoRAQuant's split"
    )
    cores, ours, _ = cores_beside_ours()
    yield (
        f"on E2E Fisher cores' {cores} stand above LSR's {ours}, by less than their standard errors"
    )
    yield from of_rivals_on_gemma()


def of_rivals_on_gemma():
    """E2E with Gemma-3-270M as the base."""
    task = RivalResults(record("rivals"), "E2E", GEMMA)
    assert level_with_lsr(task) == []
    assert task.budgets == [1000, 3000, 10_000, 30_000]
    ours = [short(task.share("LSR", budget).value, 3) for budget in task.budgets]
    best = [best_of_others(task, budget) for budget in task.budgets]
    yield f"in 30 kB by {short(task.lead('LoRAQuant', 30_000).value, 3)} alone"
    second = best[1].removesuffix(" (LoRAQuant's split)")
    yield (
        f"it keeps {ours[0]}, {ours[1]} and {ours[2]} of E2E, the best of the others {best[0]}, "
        f"{second} and {best[2]}"
    )


def level_with_lsr(task):
    """Methods and sizes at which LSR leads by two standard errors at most; none may be ahead."""
    level = []
    for budget in task.budgets:
        for method in task.methods:
            if method == "LSR" or not task.trained(method, budget):
                continue
            lead = task.lead(method, budget)
            assert lead.value >= -2.0 * lead.error, (task.name, method, budget)
            if lead.value <= 2.0 * lead.error:
                level.append((method, budget))
    return level


def best_of_others(task, budget):
    """The largest share of another method, with its name."""
    shares = {
        method: task.share(method, budget).value
        for method in task.methods
        if method != "LSR" and task.trained(method, budget)
    }
    best = max(shares, key=shares.get)
    return f"{short(shares[best], 3)} ({NAMES[best]})"


def of_published_rows():
    """PEFT's rows of Llama-3.2-3B on GSM8K."""
    published = json.loads(
        (ROOT / "benchmarks" / "gpu" / "peft_arena.json").read_text(encoding="utf-8")
    )["rows"]
    rows = {
        (row["method"].partition(" ")[0], row["kind"]): row
        for row in published
        if row["method"] != "rank 8"
    }
    (converted,) = (row for row in published if row["method"] == "rank 8")
    (again,) = (row for row in published if "rank64-rslora" in row["source"])
    large, small, source = (
        rows[key]
        for key in (
            ("LoKr", "trained"),
            ("UniLora", "trained"),
            ("LoRA", "source of the conversions"),
        )
    )
    yield (
        f"{small['accuracy']:.2f} % with {small['parameters']:,} parameters (UniLora), "
        f"{large['accuracy']:.2f} % with {large['parameters']:,} (LoKr), and "
        f"{converted['accuracy']:.2f} % where a LoRA of {source['accuracy']:.2f} % is converted "
        f"to {converted['parameters']:,} by truncated SVD"
    )
    yield (
        f"the same LoRA has {source['accuracy']:.2f} and {again['accuracy']:.2f} % in two of their "
        "files"
    )


def listed(texts):
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def column(rows, name):
    return [row[name] for row in rows]


def numbers_of(rows, name):
    return listed(f"{row[name]:,}" for row in rows)


def shares_of(rows):
    shares = [f"{percent(row['kept'], 1)} ± {percent(row['standard_error'], 1)}" for row in rows]
    return f"{listed(shares)} %"


def minutes_of(rows):
    return listed(f"{row['cpu_seconds'] / 60:.1f}" for row in rows)


def in_compressing():
    yield from of_norms()
    yield from of_more_time()
    yield from of_files_as_they_came()
    yield from of_experts()
    yield from of_byte_times()


def of_byte_times():
    """The layers of the 8B model meet every goal, and the thin ones do not."""
    large, thin = (
        {row["goal"]: row["times_core"] for row in rows}
        for rows in record("byte_budgets")["times"].values()
    )
    in_integers = [goal for goal in large if "int" in goal or "bytes" in goal]
    assert all(times <= (3.0 if goal in in_integers else 1.5) for goal, times in large.items())
    assert thin["rtol 0.2"] > 1.5
    yield "We aim at 1.5 times for floats and 3 for integers. The layers of the 8B model meet that"


def of_norms():
    """The strength of the LoRA during calibration."""
    best = {}
    for row in sorted(record("one_command")["norms"], key=lambda row: row["kept"]):
        best[row["task"], row["bytes"]] = row["strength"]
    strengths = {"e2e": 0.2, "extraction": 0.4, "arithmetic": 0.4}
    for (task, _), strength in best.items():
        assert strength == strengths[task]
    yield (
        "Four tenths keep most of two of the three LoRAs, so they are the default; on E2E a fifth "
        "keeps more"
    )


def of_more_time():
    """Smaller, for more time."""
    rows = [row for row in record("one_command")["rows"] if row["options"][1] == "0.95"]
    assert len(rows) == 10
    kept_shares = [row["kept"] for row in rows]
    low, high = (short(end, 3) for end in (min(kept_shares), max(kept_shares)))
    yield f"Where 0.95 was asked, {low} to {high} of the effect are kept on the held-out prompts"

    def ends_found(*kinds):
        found = [
            row["found"]["kept"] for row in rows if row["name"].partition(" keep ")[0] in kinds
        ]
        return short(min(found), 3), short(max(found), 3)

    low, high = ends_found("smollm2", "smollm2 sums")
    gemma, _ = ends_found("gemma-3-270m")
    yield (
        f"On further texts of the same kind SmolLM2 keeps {low} to {high} (E2E and sums), but "
        f"Gemma {gemma}, less than was asked"
    )
    low, high = ends_found("smollm2 extraction")
    yield f"On further texts of another kind (extraction) {low} to {high} are kept"


def of_files_as_they_came():
    """A LoRA file smaller, as it came."""
    sdxl, wan = record("resize")["rows"]
    assert (sdxl["layers"], wan["layers"], sdxl["rank"], wan["rank"]) == (1500, 1500, 64, 64)
    yield (
        f"1,500 layers of SDXL's sizes in {sdxl['cpu_seconds']:.0f} CPU seconds and "
        f"{sdxl['peak_mb']:.0f} MB, as many of Wan's in {wan['cpu_seconds']:.0f} and "
        f"{wan['peak_mb']:.0f} MB"
    )


def of_experts():
    """Mixtures of experts."""
    experts = record("experts")
    rows = {(row["way"], row["ratio"]): row for row in experts["rows"]}

    def percents_kept(way, ratios=(2, 4, 8)):
        return [percent(rows[way, ratio]["kept"]) for ratio in ratios]

    calibrated, plain_ones = percents_kept("each, calibrated"), percents_kept("each, LSR")
    yield (
        f"statistics of every expert keep {calibrated[0]} % of the LoRA's effect at half the "
        f"parameters, {calibrated[1]} % at a quarter and {calibrated[2]} % at an eighth; without "
        f"a base it is {plain_ones[0]}, {plain_ones[1]} and {plain_ones[2]} %"
    )
    ways = "shared terms", "each, LSR", "shared bases"
    half, quarter = (
        [short(rows[way, ratio]["relative_error"]) for way in ways] for ratio in (2, 4)
    )
    yield (
        f"they are {half[0]} of ΔW away where each expert alone is {half[1]}, and keep "
        f"{percents_kept(ways[0])[0]} %; bases shared by all experts, with a core for each, "
        f"{half[2]} and {percents_kept(ways[2])[0]} %. "
        f"At a quarter: {quarter[0]}, {quarter[1]} and {quarter[2]}"
    )
    yield f"the cosine of two ΔW is {short(experts['overlap_of_experts'], 3)} in the mean"
    lsr, svd = (rows[way, 4]["bytes"] / 1000 for way in ("each, LSR", "each, truncated SVD"))
    yield (
        f"at a quarter, the LoRA's {experts['bytes'] / 1000:.1f} kB become {lsr:.1f} kB as LSR "
        f"and {svd:.1f} kB as truncated SVD"
    )


def in_the_paper_checked():
    """Rows of the paper that were not reproduced."""
    lines = {line["method"]: line for line in record("compare-sst2")["lines"]}
    ours = lines["LSR as in the paper"]
    low, high = (signed(100 * end) for end in ours["difference"]["interval"])
    behind = 100 * (lines["LoRA, r = 8"]["score"]["mean"] - ours["score"]["mean"])
    yield (
        f"{signed(100 * ours['difference']['mean'])} points to LoRA of equal size (95 % interval "
        f"{low} to {high}), and {behind:.1f} below LoRA of rank 8, which has 2.4 times as many "
        "parameters"
    )
    ours, small, large = (
        percent(lines[method]["score"]["deviation"], 1)
        for method in ("LSR as in the paper", "LoRA, r = 3", "LoRA, r = 8")
    )
    yield f"over three seeds is {ours} points, LoRA's {small} of rank 3 and {large} of rank 8"


def in_fine_tuning():
    """LSR from scratch."""
    lines = {line["method"]: line for line in record("compare-sst2")["lines"]}
    faster, ours = (
        lines[method]["loss"]["values"]
        for method in ("the same, zero factor ×4", "LSR as in the paper")
    )
    assert all(theirs > own for theirs, own in zip(faster, ours, strict=True))
    yield f"it ends at a higher loss in each of {WORDS[len(ours)]} seeds"


def signed(value):
    return f"{'−' if value < 0.0 else '+'}{abs(value):.1f}"


def in_scale():
    yield from of_memory()
    yield from of_threads()
    yield from of_fleets()


def of_memory():
    """One large adapter."""
    runs = {(run["route"], run["blocks"]): run for run in record("memory")["runs"]}
    least = 2 * runs["terms", 1]["largest_layer_float64_bytes"]

    def beyond(run):
        return run["peak_after_writing"] - run["peak_after_import"] - least

    one, four, eighty = (runs["terms", blocks] for blocks in (1, 4, 80))
    of_a_layer = (beyond(eighty) - beyond(four)) / (eighty["layers"] - four["layers"])
    yield (
        f"twice the largest layer and {beyond(one) / 1e6:.0f} MB for one block, "
        f"{beyond(four) / 1e6:.0f} MB for four and {beyond(eighty) / 1e6:.0f} MB for eighty: from "
        f"four blocks on {of_a_layer / 1e3:.0f} kB for each further layer"
    )
    searched = max(beyond(run) for (route, _), run in runs.items() if route != "terms")
    yield f"comes to at most twice the largest layer and {searched / 1e6:.0f} MB"
    yield (
        f"The eighty blocks above, {eighty['layers']} layers, took "
        f"{eighty['seconds_in_all']:.0f} s in one process"
    )
    ratios = record("route_cost")["frobenius"]["all_ratios"]
    yield f"The {WORDS[len(ratios)]} runs came to {min(ratios):.1f} to {max(ratios):.1f}"


def of_threads():
    """Threads."""
    threads = record("threads")
    rows = {row["case"]: row for row in threads["rows"]}
    yield f"medians of {WORDS[threads.get('repeats', 5)]} runs in turns"
    busy = (
        f"{rows[f'{verb}, 771 layers, busy']['cpu_default_over_one']:.2f} for `{verb}`"
        for verb in ("inspect", "verify")
    )
    yield f"Beside a busy process on each core the ratio is {' and '.join(busy)}"
    square = {case: row["wall_default_over_one"] for case, row in rows.items() if "² rank" in case}
    last = [case for case in square if case.startswith("4096²")]
    there = " (there at one term alone)" if last == ["4096² rank 1"] else ""
    kept = [ratio for case, ratio in square.items() if "batch" not in case and "three" not in case]
    yield (
        f"takes {min(kept):.2f} to {max(kept):.2f} of the wall time with one thread, from 16 × 16 "
        f"to 4096 × 4096{there} and ranks 1 to 64"
    )


def of_fleets():
    """Many adapters."""
    fleet = record("fleet")
    resumed = fleet["resumed"]
    assert resumed["killed_run_has_the_bytes_of_the_calm_one"]
    assert resumed["kills"]["outcomes"] == resumed["kills"]["names"] == resumed["adapters"] == 1000
    assert len(resumed["kills"]["recorded_at_kills"]) == 3
    yield "A thousand of them, killed three times on the way with all workers"


def in_solvers():
    """Error curves, and the sums of three and more factors."""
    eight, thirty_two = record("error_curve")["rows"]
    excess = sorted(row["excess"] for row in (eight, thirty_two))
    yield (
        f"it takes {eight['ratio']:.2f} (8 terms) and {thirty_two['ratio']:.2f} (32) of the time "
        f"of SciPy's `svds` of that rank, its last point {excess[0]:.4f} to {excess[1]:.4f} above "
        "the optimum"
    )
    (limit,) = {row["limit"] for row in record("cp")["rows"]}
    yield f"The two were stopped after {limit:.0f} seconds on each problem"
    yield from of_the_spectrum_that_is_not_drawn()
    yield from of_stated_gaps()
    yield from of_known_answers()


def of_known_answers():
    """Three and more factors."""
    known = record("known_answers")
    for problem, words in (
        ("border rank two", "border rank two, three storage types"),
        (
            "sum operator",
            "sum operator in two terms, d = 3 … 10, bfloat16, float16, float32",
        ),
    ):
        apart = max(abs(row["found"] / row["theory"] - 1.0) for row in known[problem])
        yield f"| {words} | theory | within {math.ceil(1000 * apart) / 10:.1f} % |"
    errors = known["matrix multiplication"]
    exact = sum(error < 1e-10 for error in errors)
    found = f"exact from {exact} of {len(errors)} seeds"
    yield f"| 2×2 matrix multiplication, 7 terms | exact | {found} |"
    rows = known["inverse Laplacian"]
    best = problems.INVERSE_LAPLACIAN | problems.INVERSE_LAPLACIAN_LONG
    before = ", ".join(scientific(best[row["terms"]], 3) for row in rows)
    found = ", ".join(spread(row["errors"]) for row in rows)
    yield f"| inverse Laplacian 16³, 7, 8, 9 terms | {before} | {found} |"


DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def scientific(value, digits=2):
    """1.01·10⁻⁵ for 1.0123e-5."""
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}·10{str(int(power)).translate(DIGITS)}"


def spread(values):
    low, high = scientific(min(values), 3), scientific(max(values), 3)
    return low if low == high else f"{low} to {high}"


def of_stated_gaps():
    gaps = record("stated_gap")
    assert len(gaps["rows"]) == 13
    assert max(row["over_gap"] for row in gaps["rows"]) <= 1.0
    matrices = sum(row["matrices"] for row in gaps["rows"])
    rows = [side**2 for side in gaps["sides"]]
    excess = percent(max(row["excess"] for row in gaps["rows"]), 3)
    yield f"On {matrices:,} matrices of {min(rows)} to {max(rows)} rows, with thirteen kinds"
    yield f"was at most {excess} % above the optimum"


def of_the_spectrum_that_is_not_drawn():
    """Many terms, and large matrices: 0.3^k."""

    def excesses(name):
        return {
            row["solver"]: row["excess"]
            for row in record(name)["dense"]["rows"]
            if row["problem"] == "0.3^k"
        }

    at_4096 = excesses("solvers-threads1")
    assert [solver for solver, excess in at_4096.items() if excess > 1e-9] == [
        "scipy interpolative"
    ]
    yield "the excess of all but `interpolative` is below 1e-9 there"
    for size in (2048, 1024):
        ours = excesses(f"solvers-{size}-threads1")["lsrdecomp 1e-3"]
        assert ours < 1e-6
    yield "On 2048 × 2048 and 1024 × 1024 that of `decompose` is below 1e-6"


def in_operators():
    """A million unknowns."""
    times = record("operators-million")["times faster, setup included, at least"]
    yield f"CG without it was stopped after {times:.1f} times the seconds of GMRES with it"


def in_kernels():
    """Time of an LSR layer over LoRA's, in training and in a pass without a graph."""
    rows = record("layers-cpu")["rows"]

    def ratios(work, is_counted):
        return [
            row[work]["ratio"][arm]
            for row in rows
            for arm in ("LSR", "LSR, r = 8")
            if is_counted(row["width"], row["tokens"])
        ]

    def said(width, tokens, digits=1):
        each = ratios("training", lambda *sizes: sizes == (width, tokens))
        low, high = short(min(each), digits), short(max(each), digits)
        return low if low == high else f"{low} to {high}"

    yield (
        f"with one token {said(384, 1)} times as long at 384 wide, {said(768, 1)} at 768 and "
        f"{said(1024, 1)} at 1024, with 16 tokens {said(384, 16)}, {said(768, 16)} and "
        f"{said(1024, 16)}"
    )
    yield f"At 4096 wide one token takes {said(4096, 1)} of LoRA's time"
    many = ratios("training", lambda width, tokens: tokens >= 128 and (width, tokens) != (384, 128))
    yield (
        f"From 128 tokens on training takes {short(min(many))} to {short(max(many))} of LoRA's "
        f"time; only with 128 tokens at 384 wide it is {said(384, 128, 2)}"
    )
    passes = ratios("a pass", lambda *_: True)
    steps = ratios("a token", lambda *_: True)
    yield (
        f"A pass without a graph takes {short(min(passes))} to {short(max(passes))} of LoRA's "
        f"time, and a step of `generate` {short(min(steps))} to {short(max(steps))}"
    )


def of_draws():
    draws = record("promise")["draws"]
    ratios = [draw["apart"]["ratio"] / draw["replaced"]["ratio"] for draw in draws]
    held = sum(draw["replaced"]["holds"] for draw in draws)
    replaced = sum(ratio > 1.0 for ratio in ratios)
    enough, before = (
        sum(draw[way]["fresh"] >= draw["keep"] for draw in draws) for way in ("replaced", "apart")
    )
    printed = sum(
        abs(draw["replaced"]["kept"] - draw["replaced"]["fresh"]) <= 2 * draw["replaced"]["error"]
        for draw in draws
    )
    assert len(draws) == 100
    assert abs(held - sum(draw["apart"]["holds"] for draw in draws)) <= 1
    yield (
        f"of a hundred shares 95 should lie within two standard errors of the truth, and {held} do,"
        f" by the error of both; by the printed one alone, without the truth's own, {printed} do"
    )
    yield (
        f"Of the hundred versions {replaced} were replaced, and {enough} keep what was asked "
        f"instead of {before}"
    )
    yield f"files that are {percent(geometric_mean(ratios) - 1.0)} % larger in the mean"


def of_answer_draws():
    rows = by_seed("demo answers .9")
    assert len(rows) == 30
    intervals = [wilson_interval(row["alike"], row["answered"]) for row in rows]
    shares = [row["found"]["agreement"] for row in rows]
    assert {row["found"]["examples"] for row in rows} == {1000}
    pairs = list(zip(shares, intervals, strict=True))
    below = sorted(share for share, (low, _) in pairs if share < low)
    above = [share for share, (_, high) in pairs if share > high]
    assert (len(below), len(above)) == (2, 2)
    yield (
        "The command was run on the same LoRA with thirty draws of sentences. The LoRA's "
        f"class on 1,000 further ones is kept to {short(min(shares), 3)} to "
        f"{short(max(shares), 3)}, in {len(pairs) - 4} of thirty within the interval that the run "
        f"printed, in {sum(share >= 0.9 for share in shares)} at least to 0.9. Of the four outside "
        f"two keep more than it, two less: {short(below[1], 3)} and {short(below[0], 3)}"
    )


def of_ticket_draws():
    rows = by_seed("smollm2 tickets answers .9 distill 60")
    assert len(rows) == 10
    sizes = [row["bytes"] / 1000 for row in rows]
    counts = [row["found"]["n_matching"] for row in rows]
    assert {row["found"]["answered"] for row in rows} == {64}
    intervals = [wilson_interval(row["alike"], row["answered"]) for row in rows]
    assert all(low <= count / 64 for count, (low, _) in zip(counts, intervals, strict=True))
    above = sum(count / 64 > high for count, (_, high) in zip(counts, intervals, strict=True))
    enough = sum(count / 64 >= 0.9 for count in counts)
    yield (
        f"{26 + 10 - above} of forty draws lie within the interval that the run printed, 2 below it"
    )
    yield (
        "Ten draws of examples for tickets with SmolLM2 (`--keep-answers 0.9 --distill 60`) made "
        f"{min(sizes):.1f} to {max(sizes):.1f} kB, which give {min(counts)} to {max(counts)} of 64 "
        f"fresh prompts the LoRA's own answer, {sum(counts)} of 640 in all. In {enough} of ten it "
        f"is at least nine tenths; {10 - above} lie within the interval that the run printed, "
        f"{above} above it"
    )


def in_accuracy():
    yield from of_draws()
    yield from of_answer_draws()
    yield from of_ticket_draws()
    for storage in ("float32", "float16", "bfloat16"):
        roundoff = unit_roundoff(storage)
        power = str(round(math.log2(roundoff))).translate(DIGITS)
        half, whole = scientific(roundoff / 2), scientific(roundoff)
        yield f"| {storage} | 2{power} | about {half}, {whole} at most |"
    yield from of_the_demo()
    yield from of_integer_factors()


def of_the_demo():
    """In function."""
    demo = ROOT / "lsrdecomp" / "cli" / "demo_kept.json"
    whole, shipped = record("demo_function"), json.loads(demo.read_text(encoding="utf-8"))
    without, with_lora = (
        next(percent(row["accuracy"], 1) for row in whole["rows"] if row["method"] == method)
        for method in ("none", "lora")
    )
    yield f"without an adapter {without} %, with the LoRA {with_lora} %"

    def kept(rows, method):
        shares = {row["ratio"]: row["share"] for row in rows["rows"] if row["method"] == method}
        return joined(shares[ratio] for ratio in (96.0, 48.0, 19.2))

    lsr, svd = "lsr-kfac", "svd-kfac"
    yield (
        f"keeps {kept(shipped, lsr)} at 1/96, 1/48 and 1/19 instead of {kept(whole, lsr)}, "
        f"truncated SVD {kept(shipped, svd)} instead of {kept(whole, svd)}"
    )


def in_image_loras():
    """Measured."""

    def said(row, error):
        promised = f"{row['promised']:.3f} ± {row['promised_error']:.3f}"
        return f"{promised} | {row['kept']:.3f} ± {row[error]:.3f}".replace("0.", ".")

    for row in record("images")["rows"]:
        asked = f"--keep {row['keep']}" if "keep" in row else f"--ratio {row['ratio']:.0f}"
        alone = short(row["kept_by_energy"], 3).removeprefix("0")
        figures = said(row, "standard_error")
        yield f"| `{asked}` | {row['bytes']:,} | {figures} | {alone} |"
    for name, words in (("digits", "ViT, digits"), ("embeddings", "MiniLM, embeddings")):
        rows = record(name)["rows"]
        before = rows[0]["bytes_before"] / 1000
        size = f"{before:.1f}" if before < 100 else f"{before:.0f}"
        for row, first in zip(rows, (f" {words}, {size} kB", ""), strict=True):
            keep = short(row["keep"]).removeprefix("0")
            yield f"|{first} | {keep} | {said(row, 'standard_error')} | {row['bytes']:,} |"


def of_integer_factors():
    """Integer factors."""
    rows = record("integer_factors")["rows"]

    def added(storage, way):
        errors = [row["errors"] for row in rows if row["storage"] == storage]
        return max(each[way] - each["float64"] for each in errors)

    assert added("int8", "solved") <= 0.0
    in_eight, in_four = (short(added(bits, "rounded"), 3) for bits in ("int8", "int4"))
    yield f"and {in_eight} at most by rounding. In int4 rounding adds up to {in_four}"
    taken_back = []
    for row in rows:
        if row["storage"] == "int4":
            exact, rounded, solved = (
                row["errors"][way] ** 2 for way in ("float64", "rounded", "solved")
            )
            taken_back.append((rounded - solved) / (rounded - exact))
    yield f"solving takes back {percent(min(taken_back))} % of what it adds"


def of_planted_faults():
    """Those of a draw that tests noticed."""
    *rooms, total = record("mutants")["rows"]
    visible = total["faults"] - total["equivalent"]
    worst = min(rooms, key=lambda row: row["percent"])
    yield (
        f"of a third draw of {total['faults']} (`benchmarks/results/mutants.json`, seed "
        f"{record('mutants')['provenance'][-1]['seed']}) {total['noticed']} were noticed, "
        f"{total['percent']:.0f} % of the {visible} that anybody can see, and in `{worst['room']}` "
        f"{worst['percent']:.0f} %"
    )


PAGES = {
    README: in_readme,
    INDEX: in_index,
    LANGUAGE: in_language_models,
    SMALL: in_small_adapters,
    ARENA: of_published_rows,
    SPEECH: of_speech,
}
"""Pages whose every figure is claimed."""
CLAIMS = [
    (page, sentence)
    for page, sentences in (
        PAGES
        | {
            ACCURACY: in_accuracy,
            COMPRESS: in_compressing,
            PAPER: in_the_paper_checked,
            TRAINED: in_fine_tuning,
            SCALE: in_scale,
            SOLVERS: in_solvers,
            OPERATORS: in_operators,
            KERNELS: in_kernels,
            IMAGES: in_image_loras,
            MILLION: in_a_million,
            "CONTRIBUTING.md": of_planted_faults,
        }
    ).items()
    for sentence in sentences()
]


@pytest.mark.parametrize(
    ("page", "sentence"), CLAIMS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(CLAIMS)]
)
def test_a_sentence_says_what_its_record_says(page, sentence):
    assert plain(sentence) in plain((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "sentence"), [(page, each) for page, every in NO_RECORD.items() for each in every]
)
def test_a_sentence_without_a_record_is_still_there(page, sentence):
    assert plain(sentence) in plain((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_no_other_figure_of_a_page_is_without_a_record(page):
    """Shares, percents and spreads in the prose; figures of other kinds are not looked for."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = FENCE.sub(lambda block: block[2] if block[1] == "text" else "", text)
    text = plain("\n".join(line for line in text.splitlines() if not line.startswith("|")))
    for sentence in (
        *(sentence for other, sentence in CLAIMS if other == page),
        *NO_RECORD.get(page, ()),
    ):
        text = text.replace(plain(sentence), "")
    assert FIGURE.findall(text) == []


HELD_OTHERWISE = {
    ("compare.md", "Suite"): "what the suites are, and about how long they take",
    ("compare.md", "Structure"): "settings, of which tests/test_docs.py knows the names",
    ("fine-tuning-measured.md", "Wanted"): "advice; float32 and int8 are names",
    ("formats.md", "part of the tensor `lsr`"): "bytes of the format, as its writer has them",
    ("formats.md", "read"): "names of methods",
    ("found-in-the-wild.md", "Function"): "tests/benchmarks/test_found.py compares every row",
    ("kernels.md", "stage"): "tests/benchmarks/test_gpu_script.py compares the plan",
    ("paper-checked.md", "Place"): "the paper's own figures, arithmetic, and tests that rows name",
}
"""Tables by page and head of their first column whose figures are no record's, and why."""
CODE_AND_LINKS = re.compile(r"`[^`]*`|\]\([^)]*\)")
PAGES_WITH_FIGURES = [
    *sorted((ROOT / "docs" / "evidence").glob("*.md")),
    ROOT / IMAGES,
    ROOT / "docs" / "gallery" / "index.md",
    ROOT / "docs" / "reference" / "formats.md",
    ROOT / "README.md",
]


def rows_with_figures(text):
    """Yield the head of the first column, and a row, of tables that are written by hand."""
    head = None
    for line in FENCE.sub("", text).splitlines():
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = line.split("|")[1].strip()
        elif re.search(r"\d", CODE_AND_LINKS.sub("", line)):
            yield head, line


@pytest.mark.parametrize("page", PAGES_WITH_FIGURES, ids=lambda page: page.name)
def test_no_figure_of_a_table_is_without_a_record(page):
    name = page.relative_to(ROOT).as_posix()
    claimed = {plain(sentence) for other, sentence in CLAIMS if other == name}
    unclaimed = [
        line
        for head, line in rows_with_figures(page.read_text(encoding="utf-8"))
        if (page.name, head) not in HELD_OTHERWISE and plain(line) not in claimed
    ]
    assert unclaimed == []


def test_no_exception_for_tables_is_idle():
    """A table that has gone needs none."""
    there = set()
    for page in PAGES_WITH_FIGURES:
        heads = {head for head, _ in rows_with_figures(page.read_text(encoding="utf-8"))}
        there |= {(page.name, head) for head in heads}
    assert set(HELD_OTHERWISE) <= there
