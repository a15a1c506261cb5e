"""One number for a curve of answers: its size at equal answers, beside another curve's."""

import pytest

from benchmarks.language.answer_results import LSR, SVD, mean_size_ratio, rows_of_task


def row(method, size, n_matching, task="E2E", seed=0):
    facts = {"task": task, "method": method, "seed": seed}
    return facts | {"bytes": size, "n_matching": n_matching}


def test_a_curve_of_half_the_size_has_a_ratio_of_a_half():
    sizes, answers = [8000, 30_000, 60_000, 120_000], [3, 20, 37, 55]
    pairs = list(zip(sizes, answers, strict=True))
    rows = [row(SVD, size, count) for size, count in pairs]
    rows += [row(LSR, size // 2, count) for size, count in reversed(pairs)]
    assert mean_size_ratio(rows, LSR) == pytest.approx(0.5, rel=1e-12)
    assert mean_size_ratio(rows, SVD, LSR) == pytest.approx(2.0, rel=1e-12)


def test_the_ratio_is_the_geometric_mean_where_both_curves_are():
    # Between 10 and 20 answers it falls from 1 to 1/4, evenly in the logarithm.
    rows = [row(SVD, 1, 0), row(SVD, 100, 10), row(SVD, 10_000, 20)]
    rows += [row(LSR, 100, 10), row(LSR, 2500, 20)]
    assert mean_size_ratio(rows, LSR) == pytest.approx(0.5, rel=1e-12)


def test_a_larger_version_with_fewer_answers_is_no_point_of_the_curve():
    rows = [row(SVD, 100, 10), row(SVD, 200, 20)]
    rows += [row(LSR, 50, 10), row(LSR, 80, 9), row(LSR, 100, 20)]
    assert mean_size_ratio(rows, LSR) == pytest.approx(0.5, rel=1e-12)


def test_curves_without_a_common_count_of_answers_are_refused():
    rows = [row(SVD, 100, 1), row(SVD, 200, 5), row(LSR, 100, 6), row(LSR, 200, 9)]
    with pytest.raises(ValueError, match="kept by both LSR and truncated SVD"):
        mean_size_ratio(rows, LSR)
    with pytest.raises(ValueError, match="one point is no curve"):
        mean_size_ratio(rows[:3], LSR)


def test_rows_are_those_of_one_task_and_one_draw_of_its_texts():
    record = {"rows": [row(SVD, 1, 1), row(SVD, 2, 2, task="sums"), row(SVD, 1, 3, seed=1)]}
    assert rows_of_task(record) == [record["rows"][0]]
    assert rows_of_task(record, "sums") == [record["rows"][1]]
    assert rows_of_task(record, seed=1) == [record["rows"][2]]
