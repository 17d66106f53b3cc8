from cdc_outbox.backoff import Backoff


def test_waits_double_up_to_the_longest_and_start_over_after_a_reset() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [backoff.next() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next() == 0.1


def test_jitter_takes_off_up_to_half_and_never_adds() -> None:
    waits = []
    for _ in range(200):
        waits.append(Backoff(8.0, 60.0).next(jitter=True))
    assert all(4.0 <= wait <= 8.0 for wait in waits)
    assert len(set(waits)) > 100


def test_jitter_does_not_slow_the_doubling() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.next(jitter=True)
    assert backoff.next() == 2.0
