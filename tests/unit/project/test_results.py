"""What ranks record of tests, and what becomes of it: a test that fails is never lost."""

from types import SimpleNamespace

from support.results import Recorder, read


def test_what_a_rank_records_of_its_tests(tmp_path):
    """Three at the same time, of which one fails and one is skipped; then a rank that does not come to its end."""

    def recorded(*ended, code=1):
        recorder = Recorder(tmp_path / "rank0.jsonl")
        for test in "abc":
            recorder.pytest_runtest_logstart(test)
        for test, outcome in ("a", "passed"), ("b", "failed"), ("c", "skipped"), ("b", "passed"), ("a", "passed"):
            of = {"failed": outcome == "failed", "skipped": outcome == "skipped", "longreprtext": "why"}
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=test, **of))
        for test in ended:
            recorder.pytest_runtest_logfinish(test)
        if code is not None:
            recorder.pytest_sessionfinish(None, code)
        return read(tmp_path, 1)

    results = recorded("c", "a", "b")
    assert results.outcomes == {"a": "passed", "b": "failed", "c": "skipped"}
    assert (results.problems, results.texts) == ([], {"b": ("why", [0])})
    results = recorded("b", code=None)
    assert results.outcomes == {"a": "failed", "b": "failed", "c": "failed"}
    assert results.problems == ["rank 0 did not come to its end (in a and c)"]
