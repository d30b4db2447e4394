"""What Python code logs, and how it logs waits."""

from __future__ import annotations

import pytest
from support_log import every_wait_is_long, logged

from trunkline import _core, _waits
from trunkline._logging import Log
from trunkline._waits import Wait

__all__ = ["every_wait_is_long"]  # a fixture


def test_a_record_of_python_code_has_its_level_and_component(caplog: pytest.LogCaptureFixture) -> None:
    log = Log("stream")
    with logged(caplog, "DEBUG") as records:
        log.warn("one of %d", 3)
        log.info("100%")
        log.debug("a path: %s", "\udcff")
    assert records == ["WARNING stream: one of 3", "INFO stream: 100%", "DEBUG stream: a path: \\udcff"]


def test_a_record_that_nobody_wants_is_not_formatted(caplog: pytest.LogCaptureFixture) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    with logged(caplog, "INFO") as records:
        Log("stream").debug("%s", Costly())
    assert records == []


def test_an_unknown_component_is_rejected() -> None:
    with pytest.raises(ValueError, match='"motor" is not a component'):
        _core.log(2, "motor", b"")


def test_a_long_wait_is_logged_when_it_goes_on_and_when_it_ends(
    caplog: pytest.LogCaptureFixture, every_wait_is_long: None
) -> None:
    with logged(caplog) as records, Wait(Log("checkpoint"), "wait", warn_after=0.0) as wait:
        wait.check(lambda: "rank 1")
        wait.check(lambda: "rank 2")
        wait.check(lambda: "rank 3")
    assert records == [
        "WARNING checkpoint: still waiting after 0 s for rank 1",
        "INFO checkpoint: waited 0.0 s for rank 1",
    ]


def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog) as records, Wait(Log("checkpoint"), "wait") as wait:
        wait.check(lambda: "rank 1")
        assert wait.until(lambda seconds: True, lambda: "rank 2")
        assert not wait.until(lambda seconds: False, lambda: "rank 3", 0.0)
    assert records == []


def test_a_wait_for_a_flag_keeps_its_timeout(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    def never(seconds: float | None) -> bool:
        asked.append(seconds)
        return False

    wait = Wait(Log("checkpoint"), "wait")
    with wait:
        assert not wait.until(never, lambda: "", 5.0)
        assert not wait.until(never, lambda: "", None)
    assert asked == [_waits.LONG_SECONDS, 5.0 - _waits.LONG_SECONDS, _waits.LONG_SECONDS, None]
