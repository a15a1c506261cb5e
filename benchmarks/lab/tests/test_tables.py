"""The tables of the laboratory at 80, 100 and 130 columns: no line too long, no figure cut."""

import pytest
from test_every_table import ALL, WIDTHS, check, printed

from benchmarks.lab.app import text_table
from benchmarks.lab.compare import table as compare_table
from benchmarks.lab.compare.table import Difference, Spread
from benchmarks.lab.recover import table as recover_table
from benchmarks.lab.recover.plan import RecoverPlan
from benchmarks.lab.recover.table import Gain, Judged, Recovery
from benchmarks.lab.suite import Suite


def compared():
    difference = Difference("lora r=8", 0.0123, (-0.0045, 0.0291), "equal")
    for method in ("lora r=8", "lsr 4x4, 16 terms", "svd at the same size"):
        for task in ("sst2", "mrpc", "cola", "qnli", "rte", "stsb"):
            score = Spread((0.81234, 0.82345, 0.80456))
            yield compare_table.Line(
                method=method,
                task=task,
                metric="matthews_correlation",
                score=score,
                metrics={"matthews_correlation": score, "accuracy": score},
                accuracy=score,
                loss=score,
                baseline=0.509,
                adapter_parameters=1234567,
                head_parameters=770,
                adapter_bytes=4938268,
                rate=3e-4,
                edge=True,
                steps=12345,
                wall_seconds=4321.0,
                failures=1,
                difference=difference,
            )


def recovered():
    judged = tuple(Judged(seed, 0.31234, 0.9123, 0.8765) for seed in range(3))
    lines = [
        recover_table.Line(
            task,
            label,
            label,
            640,
            1234567.0,
            4938268.0,
            {"compressed": judged, "distilled": judged, "recovered": judged, "scratch": judged},
        )
        for task in ("mrpc", "cola")
        for label in ("LSR, Fisher norm", "truncated SVD, Frobenius norm")
    ]
    gains = [
        Gain("mrpc", seed, "f1", 0.6931, 0.2123, 0.5, 0.9123, 0.51, 1234567, 4938268, 12)
        for seed in range(3)
    ]
    return Recovery(Suite.__new__(Suite), tuple(gains), tuple(lines), {}, (), {}, 80, 0.01, 100)


MADE_BY = {
    "compare": lambda: text_table(*compare_table.overview(list(compared()))),
    "compare, details": lambda: text_table(*compare_table.details(list(compared()))),
    "recover": lambda: text_table(*recover_table.table(recovered())),
    "recover, gains": lambda: text_table(*recover_table.gains_table(recovered())),
}
FIRST = {
    "compare": ("method", "1,234,567"),
    "compare, details": ("task", "method"),
    "recover": ("task", "1,234,567", "0.88 ± 0.00"),
    "recover, gains": ("task", "0.6931"),
}


@pytest.mark.parametrize("verb", MADE_BY)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_of_figures_that_took_hours_fits(verb, width, capsys, monkeypatch):
    narrow, whole = (printed(MADE_BY[verb](), each, capsys, monkeypatch) for each in (width, ALL))
    check(narrow, whole, width, FIRST[verb])


@pytest.mark.parametrize("kind", [Suite, RecoverPlan])
def test_every_setting_says_what_it_is(kind):
    assert all(len(field.help) > 8 and field.help.endswith(".") for field in kind.fields.values())
    assert all(f"{name} : " in kind.__doc__ for name in kind.fields)
