"""Which of several failures is the one to speak of; what is sent between ranks and launch."""

import signal

import pytest

from mmm_launch import contract
from mmm_launch.channel.failures import Failure, cause
from mmm_launch.contract import Report


def reported(report):
    return Failure.reported(report, report.time, "")


BOOM = reported(Report(1, "traceback", "Traceback …\nValueError: boom\n", 1, time=5.0))
LOST = reported(Report(0, "traceback", "Traceback …\nRuntimeError: … Connection closed by peer\n", 1, time=4.0))
USER = reported(Report(2, "user", "Connection refused is what this user's message says", 2, time=6.0))
KILLED = Failure.ended(3, 77, -signal.SIGKILL, 4.5, "")
ABORTED = Failure.ended(0, 78, -signal.SIGABRT, 4.1, "")
LEFT = Failure.ended(2, 79, 3, 7.0, "")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([LOST, BOOM], BOOM),  # though the lost connection was noticed earlier
        ([LOST, KILLED], KILLED),
        ([LOST, ABORTED], ABORTED),
        ([ABORTED, BOOM], BOOM),
        ([BOOM, KILLED], KILLED),  # by time
        ([BOOM, USER], BOOM),
        ([LOST, USER], USER),
        ([LOST, LEFT], LEFT),
        ([LOST], LOST),
    ],
)
def test_the_cause_comes_first(failures, expected):
    assert cause(failures) is expected
    assert cause(failures[::-1]) is expected


def test_exit_codes():
    assert (KILLED.exit_code, ABORTED.exit_code, LEFT.exit_code, USER.exit_code, BOOM.exit_code) == (137, 134, 3, 2, 1)


def test_a_report_survives_the_way():
    report = Report(1, "traceback", "naïve \udcff \n", 1, 2.5)
    assert Report.loads(report.dumps()).text == report.text
    assert len(Report(1, "traceback", "é" * 10**6, 1, 2.5).dumps()) < contract.SOCKET_BUFFER // 4


def test_shortening_keeps_both_ends():
    text = contract.shorten("a" * 500 + "b" * 500, limit=90)
    assert text.startswith("a" * 30 + "\n")
    assert text.endswith("\n" + "b" * 60)
    assert "910 characters left out" in text
    assert contract.shorten("abc") == "abc"
