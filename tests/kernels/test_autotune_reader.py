"""The reader of autotuning's files on anything at all: no exception, no failure forgotten, nothing erased."""

import json
import warnings

import hypothesis.strategies as st
import pytest
from autotune_stage import HERE, PROBLEM, measured, user_file
from hypothesis import HealthCheck, given, settings
from sparse24_kernels import Algorithm
from sparse24_kernels.gemm.autotune.records import Failure, problem_record
from sparse24_kernels.gemm.autotune.table import Table

pytestmark = pytest.mark.usefixtures("autotune_stage")
fuzzed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ADDED, HUNG = PROBLEM._replace(m=208), Algorithm(77)
FAILURE = problem_record(PROBLEM) | {"id": 5, "split_k": 1, "split_k_mode": -1, "reason": "hung"}
CANDIDATE = {"id": 3, "split_k": 1, "split_k_mode": -1, "sparse_us": 50.0, "dense_us": 100.0}
ENTRY = problem_record(PROBLEM) | {"candidates": [CANDIDATE]}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def changed(record):
    """The record with any of its fields replaced, dropped, or with others beside them."""
    fields = {name: st.just(value) | anything for name, value in record.items()}
    return st.fixed_dictionaries({}, optional=fields).flatmap(
        lambda found: st.dictionaries(st.text(), anything, max_size=1).map(lambda others: others | found)
    )


def records(record):
    return st.lists(st.just(record) | changed(record) | anything, max_size=4) | anything


files = st.fixed_dictionaries(
    {
        "format": st.just(2) | st.just(3) | anything,
        "environment": st.just(HERE._asdict()) | st.just(HERE._asdict()) | anything,
        "entries": records(ENTRY),
        "failures": records(FAILURE),
    }
)


def read() -> Table:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Table(HERE)


def check_a_save_over(raw: bytes) -> Table:
    """Save a measurement and a failure over `raw`: what was read before is read after. Returns the table before."""
    user_file().parent.mkdir(exist_ok=True)
    for old in user_file().parent.iterdir():
        old.unlink()
    user_file().write_bytes(raw)
    table, ours = read(), read()
    ours.add(ADDED, (measured(1, 50.0),))
    ours.fail(ADDED, HUNG, "hung")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours.save()
    after = read()
    assert after.entries == table.entries | {ADDED: (measured(1, 50.0),)}
    assert after.failures == {Failure(ADDED, HUNG, "").key: Failure(ADDED, HUNG, "hung")} | table.failures
    return table


@given(raw=st.binary(max_size=60))
@fuzzed
def test_bytes_that_are_no_table_are_kept_aside(raw):
    table = check_a_save_over(raw)
    assert not table.entries and not table.failures
    assert [aside.read_bytes() for aside in user_file().parent.glob("*.unreadable-*")] == [raw]


@given(cut=st.tuples(st.floats(0, 1), st.floats(0, 1)), patch=st.binary(max_size=8))
@fuzzed
def test_a_failure_outside_the_damage_is_remembered(cut, patch):
    table = {"format": 2, "environment": HERE._asdict(), "entries": [ENTRY] * 3, "failures": [FAILURE]}
    raw, failure = json.dumps(table, indent=1).encode(), json.dumps([FAILURE], indent=1).encode()[1:-1].strip()
    start, end = sorted(raw.index(b"entries") + int(part * len(raw)) for part in cut)
    damaged = raw[:start] + patch + raw[end:]
    failure = failure.replace(b"\n", b"\n ")
    assert failure in raw
    known = check_a_save_over(damaged).unusable(PROBLEM, Algorithm(5))
    assert known == "hung" or failure not in damaged


@given(data=anything | files)
@fuzzed
def test_every_record_stays_in_the_file_or_the_whole_file_is_kept_aside(data):
    raw = json.dumps(data).encode()
    table = check_a_save_over(raw)
    asides = [aside.read_bytes() for aside in user_file().parent.glob("*.unreadable-*")]
    assert asides in ([], [raw])
    kept = json.loads(user_file().read_text())
    for name in ("entries", "failures") if not asides else ():
        texts = [json.dumps(record) for record in kept[name]]  # as text, because NaN is not NaN, and 1 is true
        assert texts[: len(data[name])] == [json.dumps(record) for record in data[name]]
    ours = isinstance(data, dict) and data.get("environment") == HERE._asdict()
    if ours and isinstance(data["failures"], list) and json.dumps(FAILURE) in map(json.dumps, data["failures"]):
        assert table.unusable(PROBLEM, Algorithm(5)) is not None
