"""The options of kvhvdrun for elastic jobs."""

import pytest

from kvstore_hvd.launch import command

pytestmark = pytest.mark.alike


def plan(*arguments):
    return command._plan(command._options(arguments))


@pytest.mark.parametrize(
    ("arguments", "numbers", "slots"),
    [
        (["--min-np", "2"], (2, None, 256), {"localhost": 2}),
        (["--max-np", "3"], (1, None, 3), {"localhost": 3}),
        (["--max-np", "3", "-np", "2"], (2, 2, 3), {"localhost": 3}),
        (
            ["--min-np", "1", "-H", "localhost,127.0.0.2:1", "--slots", "3"],
            (1, None, 256),
            {"localhost": 3, "127.0.0.2": 1},
        ),
        (["--min-np", "1", "--hostfile", "hosts"], (1, None, 256), {"localhost": 2}),
    ],
)
def test_numbers_of_workers_and_hosts(monkeypatch, tmp_path, arguments, numbers, slots):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    made = plan(*arguments, "true")
    assert made.settings.replaces
    assert (made.settings.min_np, made.settings.first_np, made.settings.max_np) == numbers
    assert (made.hosts, made.script) == (slots, None)


def test_everything_else(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ["--reset-limit", "7", "--elastic-timeout", "5", "--blacklist-cooldown-range", "2", "9"]
    more = ["--event-log", "log", "--no-prefix", "-v", "--bind-cores", "--start-timeout", "8"]
    made = plan("--host-discovery-script", "./hosts --all", *options, *more, "true", "--min-np", "3")
    settings = made.settings
    assert made.script.command[-1] == "./hosts --all"
    assert (settings.min_np, settings.reset_limit, settings.elastic_timeout_s, settings.start_timeout_s) == (1, 7, 5, 8)
    assert settings.cooldown == (2.0, 9.0)
    given = made.options
    assert (given.event_log, given.no_prefix, given.verbose, given.bind_cores) == ("log", True, True, True)
    assert list(made.command[1:]) == ["--min-np", "3"]
    assert made.environment["PYTHONUNBUFFERED"] == "1"
    assert not [name for name in made.environment if name.startswith(("KVHVD_RANK", "KVHVD_SIZE", "KVHVD_LOCAL"))]
    defaults = plan("--min-np", "1", "true").settings
    assert (defaults.reset_limit, defaults.elastic_timeout_s, defaults.start_timeout_s) == (None, 600.0, 30.0)
    assert (defaults.cooldown, defaults.job == settings.job) == ((10.0, 300.0), False)


def test_a_file_of_options(tmp_path, capfd):
    path = tmp_path / "job.yaml"
    path.write_text("min-np: 1\nmax_num_proc: 3\nblacklist-cooldown-range: 5 50\nslots: 2\nreset-limit: 4\n")
    settings = plan("--config-file", str(path), "--reset-limit", "9", "true").settings
    assert (settings.min_np, settings.max_np, settings.reset_limit) == (1, 3, 9)
    assert settings.cooldown == (5.0, 50.0)
    path.write_text("num-proc: 2\nranks: [0, 1]\nverbose: no\n")
    given = plan("--config-file", str(path), "true").options
    assert (set(given.ranks), given.verbose) == ({0, 1}, False)
    # No word of a file becomes a part of the command.
    for text, fact in [
        ("blacklist-cooldown-range: 5", "argument --blacklist-cooldown-range: expected 2 arguments."),
        ("blacklist-cooldown-range: [5, 50, echo]", "echo does not exist."),
        ("output-filname: my echo", "--output-filname does not exist; did you mean --output-filename?"),
        ("unknown: no", "--unknown does not exist."),
    ]:
        path.write_text(f"min-np: 1\n{text}\n")
        assert command.main(["--config-file", str(path), "true"]) == 2
        assert f"kvhvdrun: {path}: {fact}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--min-np", "0"], "argument --min-np/--min-num-proc: '0' is not a whole number of at least 1."),
        (["--min-np", "3", "--max-np", "2"], "--min-np 3 is more than --max-np 2."),
        (["--min-np", "3", "-np", "2"], "--min-np 3 is more than -np 2."),
        (["--max-np", "257"], "a job has at most 256 workers"),
        (["--min-np", "1", "--elastic-timeout", "soon"], "--elastic-timeout: 'soon' is not a number of seconds"),
        (["--min-np", "1", "--blacklist-cooldown-range", "9", "8"], "the lower one first"),
        (["--host-discovery-script", "x", "-H", "localhost"], "both --hosts and --host-discovery-script name hosts."),
        (["--min-np", "3", "-H", "localhost:2"], "3 workers are needed, but the hosts have 2 slots."),
        (["--min-np", "1", "--output-filename", "out"], "--output-filename is not for elastic jobs.\n  Fix: omit it: "),
        (["--min-np", "1", "--ranks", "0"], "--ranks is not for elastic jobs."),
        (["--reset-limit", "1", "-np", "2"], "--reset-limit is for elastic jobs.\n  Fix: "),
    ],
)
def test_what_cannot_be_is_said(capfd, arguments, text):
    assert command.main([*arguments, "true"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.startswith("kvhvdrun: "), "Fix: " in err) == ("", True, True)
    assert text in err
