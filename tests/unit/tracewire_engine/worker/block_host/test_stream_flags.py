"""What a thread that stands for a stream and the thread that releases it tell each other. `tests.gpu_visits`: a GPU."""

from __future__ import annotations

import threading

from tracewire_engine.worker.block_host.stream_flags import ThreadFlags


def test_a_stream_waits_until_its_number_is_released() -> None:
    flags = ThreadFlags(limit_s=60)
    flags.arrive(1)
    assert (flags.has_arrived(1), flags.has_arrived(2), flags.has_passed(1)) == (True, False, False)
    releasing = threading.Timer(0.05, flags.release, [1])
    releasing.start()
    flags.hold(1)
    flags.go_on(1)
    releasing.join()
    assert flags.has_passed(1)
    assert not flags.expired(1)


def test_what_is_released_before_is_not_waited_for() -> None:
    flags = ThreadFlags(limit_s=60)
    flags.release(3)
    flags.hold(2)
    flags.hold(3)
    assert not flags.expired(3)


def test_a_stream_that_nothing_releases_goes_on_after_a_while_and_says_so() -> None:
    flags = ThreadFlags(limit_s=0.01)
    assert not flags.expired(0)
    flags.hold(4)
    assert [flags.expired(number) for number in (3, 4, 5)] == [True, True, False]
    assert [flags.expired_last(number) for number in (0, 3, 4, 5)] == [False, False, True, False]
