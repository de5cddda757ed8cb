"""How the values of `tracewire engine`'s options are read."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tracewire_engine.launch.options import add_options, redis_url
from tracewire_engine.launch.secret import URL


def _parsed(*arguments: str, secrets: dict[str, str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser.add_argument_group("engine"), secrets or {})
    return parser.parse_args(["MODEL", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--queue-limit", "-1"], "a whole number of at least 0, got '-1'"),
        (["--queue-limit", "many"], "a whole number of at least 0, got 'many'"),
        (["--first-answer", "nan"], "a number of seconds, at least 0, got 'nan'"),
        (["--first-answer", "inf"], "a number of seconds, at least 0, got 'inf'"),
        (["--lora", "name"], "expected NAME=FOLDER, got 'name'"),
        (["--lora", "=folder"], "expected NAME=FOLDER, got '=folder'"),
        (["--bulk-listen", "7400"], "expected HOST:PORT, such as 0.0.0.0:7400, got '7400'"),
        (["--bulk-listen", "host:70000"], "expected HOST:PORT, such as 0.0.0.0:7400, got 'host:70000'"),
        (["--bulk-bytes", "0"], "a whole number of at least 1, got '0'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_was_expected(arguments: list[str], says: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=says):
        _parsed(*arguments)


def test_values_are_read() -> None:
    options = _parsed("--queue-limit", "0", "--first-answer", "2.5", "--lora", "a=/b=c")
    assert (options.queue_limit, options.first_answer, options.lora) == (0, 2.5, [("a", "/b=c")])


def test_the_url_is_an_option_s_a_file_s_or_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    (tmp_path / "url").write_text("redis://file\n")
    assert redis_url(_parsed("--url", "redis://option")) == "redis://option"
    assert redis_url(_parsed("--url-file", str(tmp_path / "url"))) == "redis://file"
    assert redis_url(_parsed(secrets={URL: "redis://secret"})) == "redis://secret"
    with pytest.raises(ValueError, match=r"--url-file: .*no-such"):
        redis_url(_parsed("--url-file", str(tmp_path / "no-such")))
    with pytest.raises(ValueError, match="--url, --url-file or TRACEWIRE_URL is required"):
        redis_url(_parsed())
